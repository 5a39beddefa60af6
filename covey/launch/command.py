"""The command that is started several times, and how a training command goes on after a failure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.config import recipe
from covey.config.overrides import split
from covey.errors import CoveyError

TRAINING = ("train", "sft")
"""Commands that a restart resumes."""
VERBS = (*TRAINING, "eval", "export")
"""Commands that use several processes."""


@dataclass(frozen=True)
class TrainingCommand:
    """Words behind `covey` of a command, its run folder, or the model to evaluate or the folder to export to, when the
    words name one, and the number of devices of the mesh that its recipe sets; 0 when it sets none.
    """

    words: tuple[str, ...]
    run: str | None
    devices: int = 0

    @property
    def resume_words(self) -> tuple[str, ...]:
        """Words that go on with the run.

        Raises:
            CoveyError: the words name no run folder.
        """
        if self.run is None or self.words[0] not in TRAINING:
            raise CoveyError(
                "restarts need to know the run folder", want="a command with --out FOLDER or --resume FOLDER"
            )
        return (self.words[0], "--resume", self.run)

    def next_words(self) -> tuple[str, ...]:
        """Return the words for another attempt: they go on with the run if it has begun, else they begin it."""
        begun = self.words[0] in TRAINING and self.run is not None and recipe.is_run(Path(self.run))
        return self.resume_words if begun else self.words


def training_command(words: Sequence[str]) -> TrainingCommand:
    """Check that `words` are a command of several processes whose recipe and settings are valid.

    Raises:
        CoveyError: they are another command, or the command itself would be refused.
    """
    if not words or words[0] not in VERBS:
        command = f"covey {words[0]}" if words else "nothing"
        raise CoveyError(f"{command} cannot be launched as several processes", want="covey launch … train NAME_OR_YAML")
    names, pairs = split(words[1:], 1)
    flags, verb = dict(pairs), words[0]
    if verb == "export":
        return TrainingCommand(tuple(words), _export_folder(words, names, pairs))
    flag, usage = ("--resume", "NAME_OR_YAML") if verb in TRAINING else ("--recipe", "RUN_OR_MODEL [--recipe NAME]")
    if not names and (verb == "eval" or flag not in flags):
        missing = "no model is given to evaluate" if verb == "eval" else "no recipe is given to launch"
        raise CoveyError(missing, want=f"covey launch … {verb} {usage}")
    changes = [f"{name}={value}" for name, value in pairs if name != flag]
    settings = recipe.load_any(flags.get(flag) or names[0], changes)
    if verb == "eval":
        run: str | None = names[0] if recipe.is_run(names[0]) else "eval"
    else:
        run = flags.get("--resume") or settings.out
    mesh = settings.model.mesh
    devices = mesh.data * mesh.fsdp * mesh.tp
    return TrainingCommand(tuple(words), _without_slash(run), devices if devices > 1 else 0)


def _without_slash(folder: str | None) -> str | None:
    """Return the folder without slashes at its end: the launcher makes a folder of logs beside it, whose name begins
    with it.
    """
    return None if folder is None else str(Path(folder).expanduser())


def _export_folder(words: Sequence[str], names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str | None:
    flags = {flag.removeprefix("--"): value for flag, value in pairs}
    if not names or "out" not in flags:
        missing = "no model is given to export" if not names else "no folder is given to export to"
        raise CoveyError(missing, want="covey launch … export RUN_OR_MODEL --out FOLDER")
    if flags.get("format") == "gguf":
        raise CoveyError(
            "a GGUF file is written by one process",
            want="--format hf or peft for several; llama.cpp converts the first to GGUF",
            fix=f"{shlex.join(['covey', *words])}, where one process can hold the model",
        )
    return _without_slash(flags["out"])
