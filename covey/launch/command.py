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
        got = f"covey {words[0]}" if words else "nothing"
        raise CoveyError(f"{got} cannot be launched as several processes", want="covey launch … train NAME_OR_YAML")
    if words[0] not in TRAINING:
        return _evaluation(words) if words[0] == "eval" else _export(words)
    names, pairs = split(words[1:], 1)
    flags = dict(pairs)
    if "--resume" not in flags and not names:
        raise CoveyError("no recipe is given to launch", want=f"covey launch … {words[0]} NAME_OR_YAML")
    source = flags.get("--resume") or names[0]
    settings = recipe.load_any(source, [f"{flag}={value}" for flag, value in pairs if flag != "--resume"])
    return TrainingCommand(tuple(words), _folder(flags.get("--resume") or settings.out), _devices(settings))


def _folder(name: str | None) -> str | None:
    """Return the folder without slashes at its end: the launcher makes a folder of logs beside it, whose name begins
    with it.
    """
    return None if name is None else str(Path(name).expanduser())


def _devices(settings: recipe.Recipe | recipe.SFTRecipe) -> int:
    mesh = settings.model.mesh
    devices = mesh.data * mesh.fsdp * mesh.tp
    return devices if devices > 1 else 0


def _evaluation(words: Sequence[str]) -> TrainingCommand:
    names, pairs = split(words[1:], 1)
    if not names:
        raise CoveyError("no model is given to evaluate", want="covey launch … eval RUN_OR_MODEL [--recipe NAME]")
    source = dict(pairs).get("--recipe") or names[0]
    settings = recipe.load_any(source, [f"{flag}={value}" for flag, value in pairs if flag != "--recipe"])
    return TrainingCommand(tuple(words), str(Path(names[0])) if recipe.is_run(names[0]) else "eval", _devices(settings))


def _export(words: Sequence[str]) -> TrainingCommand:
    names, pairs = split(words[1:], 1)
    flags = {flag.removeprefix("--"): value for flag, value in pairs}
    out = flags.get("out")
    if not names or out is None:
        what = "no model is given to export" if not names else "no folder is given to export to"
        raise CoveyError(what, want="covey launch … export RUN_OR_MODEL --out FOLDER")
    if flags.get("format") == "gguf":
        raise CoveyError(
            "a GGUF file is written by one process",
            want="--format hf or peft for several; llama.cpp converts the first to GGUF",
            fix=f"{shlex.join(['covey', *words])}, where one process can hold the model",
        )
    return TrainingCommand(tuple(words), _folder(out))
