"""State of a run at one moment."""

from dataclasses import dataclass

from covey.display import BESIDE


@dataclass(frozen=True)
class Status:
    """State of a run at one moment.

    Attributes:
        step: number of optimizer updates made.
        total: number of updates of the whole run; 0 while that is not known.
        phase: name of the current phase; empty between two phases.
        ahead: names of the phases of the threads that sample and score ahead of training meanwhile, with `BESIDE`
            between them; empty if there are none.
        phase_seconds: seconds since the phase began.
        done: number of parts of the phase that are finished, of `parts`; both are 0 if the phase does not count any.
        parts: number of parts of the phase.
        compiling: number of the program of this phase that is being compiled; 0 if none is.
        program: its name; empty if that is not known.
        seconds: seconds of the run, also before a resume.
        left: expected seconds until training ends, without compilation; 0 while that is not known.
        tokens_per_second: speed of the last step; 0 before the first.
        memory: memory in use, in bytes; 0 if that is not known.
    """

    step: int = 0
    total: int = 0
    phase: str = ""
    ahead: str = ""
    phase_seconds: float = 0.0
    done: int = 0
    parts: int = 0
    compiling: int = 0
    program: str = ""
    seconds: float = 0.0
    left: float = 0.0
    tokens_per_second: float = 0.0
    memory: int = 0

    @property
    def activity(self) -> str:
        """Phase with the count of its finished parts, the phases of other threads, and the program that is
        being compiled.
        """
        count = f" {self.done}/{self.parts}" if self.parts else ""
        program = f"program {self.compiling}" + (f", {self.program}" if self.program else "")
        phases = BESIDE.join(filter(None, (f"{self.phase}{count}", self.ahead)))
        return ": ".join(filter(None, (phases, f"compiling {program}" if self.compiling else "")))
