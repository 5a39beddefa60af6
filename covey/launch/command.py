"""The training command that is started several times, and how it goes on after a failure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.config import recipe
from covey.config.overrides import split
from covey.errors import CoveyError

VERBS = ("train",)
"""Commands that use several processes."""


@dataclass(frozen=True)
class TrainingCommand:
    """Words behind `covey` of a training command, its run folder when the words name one, and the number of devices of
    the mesh that its recipe sets; 0 when it sets none.
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
        if self.run is None:
            raise CoveyError(
                "restarts need to know the run folder", want="a command with --out FOLDER or --resume FOLDER"
            )
        return (self.words[0], "--resume", self.run)

    def next_words(self) -> tuple[str, ...]:
        """Return the words for another attempt: they go on with the run if it has begun, else they begin it."""
        return self.resume_words if self.run is not None and recipe.is_run(Path(self.run)) else self.words


def training_command(words: Sequence[str]) -> TrainingCommand:
    """Check that `words` are a training command whose recipe and settings are valid.

    Raises:
        CoveyError: they are another command, or the command itself would be refused.
    """
    if not words or words[0] not in VERBS:
        got = f"covey {words[0]}" if words else "nothing"
        raise CoveyError(f"{got} cannot be launched as several processes", want="covey launch … train NAME_OR_YAML")
    names, pairs = split(words[1:], 1)
    flags = dict(pairs)
    if "--resume" not in flags and not names:
        raise CoveyError("no recipe is given to launch", want=f"covey launch … {words[0]} NAME_OR_YAML")
    source = flags.get("--resume") or names[0]
    settings = recipe.load_any(source, [f"{flag}={value}" for flag, value in pairs if flag != "--resume"])
    mesh = settings.model.mesh
    devices = mesh.data * mesh.fsdp * mesh.tp
    return TrainingCommand(tuple(words), flags.get("--resume") or settings.out, devices if devices > 1 else 0)
