"""The Python tool: it executes a program of the model in a child process that locks itself in (`python_child`).

A program has a temporary empty folder, no variables of this process's environment, no network, no other processes, and
limits on seconds, memory, files and output. What of this holds depends on the kernel: a run logs it as it begins, and
does not begin without Landlock and seccomp. It keeps accidents and careless programs in; against a determined attacker
it promises nothing: kernels and interpreters have faults.
"""

import logging

from covey.envs.python_programs import PROTECTIONS, Limits, Outcome, run_program
from covey.errors import RecipeError

log = logging.getLogger(__name__)

MAX_SHOWN = 250
"""Maximum characters of what a program printed that an error shows: its end, where the exception is."""


class ProgramError(Exception):
    """A program that failed; the text is for the model."""


def python(program: str) -> str:
    """Execute a Python program and return what it prints.

    Args:
        program: The program. It has the standard library, and prints its result.
    """
    return _printed(run_program(program))


def python_with_limits(program: str) -> str:
    """Execute a Python program and return what it prints.

    Args:
        program: The program. It has the standard library, and prints its result.
    """
    return _printed(run_program(program, only_limits=True))


def tell_protections() -> None:
    """Log which protections hold on this system.

    Raises:
        RecipeError: not all of them do.
    """
    found = run_program("", Limits(seconds=60.0))  # a busy machine may need them to start it
    missing = [name for name in PROTECTIONS if name not in found.protections]
    if missing:
        what = f"the Python tool has no {' and no '.join(missing)} on this system"
        fix = (
            "a Linux of 5.13 or newer; or in a container of its own the tool covey.envs.python_tool:python_with_limits"
        )
        raise RecipeError(what, want=", ".join(PROTECTIONS), fix=fix, where="envs.tools")
    log.info(f"the Python tool's protections: {', '.join(found.protections)}")


def warn_of_limits_alone() -> None:
    """Warn that programs can read and write the files of this user, and use the network."""
    log.warning("programs of the model can read and write this user's files and use the network: only limits hold")


python.at_start = tell_protections  # type: ignore[attr-defined]
python_with_limits.at_start = warn_of_limits_alone  # type: ignore[attr-defined]
python_with_limits.__name__ = "python"  # the model sees one tool of this name


def _printed(outcome: Outcome) -> str:
    if outcome.failure:
        shown = outcome.output.strip()[-MAX_SHOWN:]
        raise ProgramError(f"{outcome.failure}\n{shown}" if shown else outcome.failure)
    return outcome.output.strip() or "(the program printed nothing)"
