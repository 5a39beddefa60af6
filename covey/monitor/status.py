"""Status of a run: what it does now, as the terminal shows it and as `heartbeat.json` has it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """State of a run at one moment.

    Attributes:
        step: number of optimizer updates made.
        total: number of updates of the whole run; 0 while that is not known.
        phase: name of the current phase; empty between two phases.
        phase_seconds: seconds since the phase began.
        done: number of parts of the phase that are finished, of `parts`; both are 0 if the phase does not count any.
        parts: number of parts of the phase.
        compiling: number of the program of this phase that is being compiled; 0 if none is.
        seconds: seconds of the run, those before a resume included.
        left: expected seconds until training ends, without compilation; 0 while that is not known.
        tokens_per_second: speed of the last step; 0 before the first.
        memory: memory in use, in bytes; 0 if that is not known.
    """

    step: int = 0
    total: int = 0
    phase: str = ""
    phase_seconds: float = 0.0
    done: int = 0
    parts: int = 0
    compiling: int = 0
    seconds: float = 0.0
    left: float = 0.0
    tokens_per_second: float = 0.0
    memory: int = 0

    @property
    def activity(self) -> str:
        """Phase with the count of its finished parts and the program that is being compiled."""
        count = f" {self.done}/{self.parts}" if self.parts else ""
        return f"{self.phase}{count}" + (f": compiling program {self.compiling}" if self.compiling else "")
