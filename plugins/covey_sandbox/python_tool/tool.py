"""The Python tool: it executes a program of the model in one of two engines.

    child   a process that locks itself in (`native_child`): limits, no capabilities, Landlock and seccomp, on Linux
    wasm    CPython as WebAssembly (`wasm`): fuel and memory are limited, and results repeat bit for bit

A run logs as it begins which engine it uses and what holds there, and does not begin if it has neither. Both keep
accidents and careless programs in; against a determined attacker they promise nothing: kernels, compilers and
interpreters have faults.
"""

import logging
from collections.abc import Callable, Iterator
from functools import cache

from covey.config.schema.envs import PythonEngine
from covey.errors import CoveyError, RecipeError
from covey.registry import install_command
from covey_envs.protocol import FaultError, independent
from covey_sandbox.python_tool import wasm
from covey_sandbox.python_tool.sandbox import IN_WASM, PROTECTIONS, Limits, Outcome, run_in_wasm, run_program

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

MAX_SHOWN = 250
"""Maximum characters of what a program printed that an error shows: its end, where the exception is."""


REMEDY = "a Linux of 5.13 or newer on x86-64 or ARM 64, as a user who reads Python's library without root's rights"
"""Systems on which all protections hold."""


class ProgramError(Exception):
    """A program that failed; the text is for the model."""


@cache
def protections() -> tuple[str, ...]:
    """Return the names of the protections of a child process that hold on this system."""
    return run_program("", Limits(seconds=60.0)).protections  # a busy machine may need them to start it


def missing_protections() -> list[str]:
    """Return the names of the protections of a child process that do not hold on this system."""
    return [name for name in PROTECTIONS if name not in protections()]


def choose_engine() -> PythonEngine:
    """Return the engine of this system: child where all protections hold, else wasm.

    Raises:
        RecipeError: not all of them hold, and the packages of wasm are missing.
    """
    if not (missing := missing_protections()):
        return "child"
    if not (packages := wasm.missing_packages()):
        return "wasm"
    raise RecipeError(
        f"the Python tool lacks protections on this system: {', '.join(missing)}",
        want=f"{', '.join(PROTECTIONS)}, or the engine wasm",
        fix=f"{install_command('wasm')}, which brings {' and '.join(packages)}; or {REMEDY}; or in a"
        " container of its own the tool python_with_limits",
        where="envs.tools",
    )


def begin() -> None:
    """Begin with the engine of this system.

    Raises:
        RecipeError: as for `choose_engine`.
    """
    if choose_engine() == "child":
        begin_with_child()
        return
    log.warning(f"the Python tool's engine child lacks protections on this system: {', '.join(missing_protections())}")
    begin_with_wasm()


def begin_with_child() -> None:
    """Log the protections that hold on this system.

    Raises:
        RecipeError: not all of them do.
    """
    if missing := missing_protections():
        raise RecipeError(
            f"the Python tool's engine child lacks protections on this system: {', '.join(missing)}",
            want=", ".join(PROTECTIONS),
            fix=f"{REMEDY}; or envs.python_engine: wasm",
            where=wasm.WHERE,
        )
    held, limits = ", ".join(protections()), Limits()
    log.info(
        f"the Python tool's engine: child; protections: {held}; limits: {limits.cpu_seconds} s of computing time,"
        f" {limits.seconds:g} s in all, {_sizes(limits)}"
    )


def begin_with_wasm() -> None:
    """Compile the interpreter, if that has not been done, and log the limits.

    Raises:
        RecipeError: the packages are missing, or it does not work here.
    """
    wasm.require_packages()
    if failure := run_in_wasm("").failure:
        log.warning(f"the Python tool's compiled interpreter does not work here ({failure}): it is compiled anew")
        wasm.module_path().unlink(missing_ok=True)
        failure = run_in_wasm("").failure
    if failure:
        raise RecipeError(
            f"the Python tool's engine wasm does not work here, with {wasm.module_path()}: {failure}",
            fix="envs.python_engine: child",
            where=wasm.WHERE,
        )
    log.info(
        f"the Python tool's engine: {wasm.engine_name()}; no files, sockets, processes or threads; limits:"
        f" {IN_WASM.fuel:,} instructions, {_sizes(IN_WASM)}, and as a last resort {IN_WASM.seconds:g} s"
    )


def findings() -> Iterator[tuple[str, str, str]]:
    """Yield the engine for `covey doctor`, with the protections that hold on this system: subject, result and fix."""
    try:
        engine = choose_engine()
    except RecipeError as error:
        yield "programs", error.what, error.fix
        return
    held = ", ".join(protections()) or "none"
    lacking = f"; without {', '.join(missing)}" if (missing := missing_protections()) else ""
    yield "programs", f"the Python tool's engine {engine}; protections of a process: {held}{lacking}", ""


def _sizes(limits: Limits) -> str:
    return f"{limits.memory >> 20} MiB of memory, {limits.output >> 10} KiB of output"


def _tool(run: Callable[[str], Outcome], at_start: Callable[[], None]) -> Callable[[str], str]:
    """Make a tool that executes programs by `run`."""

    def python(program: str) -> str:
        """Execute a Python program and return what it prints.

        Args:
            program: The program. It has the standard library, and prints its result.
        """
        try:
            outcome = run(program)
        except CoveyError as error:
            raise FaultError(f"cannot execute programs: {error.what}", want=error.want, fix=error.fix) from error
        except OSError as error:
            raise FaultError(f"cannot execute programs: {error}") from error
        return _printed(outcome)

    python.at_start = at_start  # type: ignore[attr-defined]
    python.has_own_limits = True  # type: ignore[attr-defined]
    return independent(python)


def _printed(outcome: Outcome) -> str:
    if outcome.is_fault:
        raise FaultError(f"cannot execute programs: {outcome.failure}")
    if outcome.failure:
        end = outcome.output.strip()[-MAX_SHOWN:]
        raise ProgramError(f"{outcome.failure}\n{end}" if end else outcome.failure)
    return outcome.output.strip() or "(the program printed nothing)"


python = _tool(lambda program: (run_program if choose_engine() == "child" else run_in_wasm)(program), begin)
python_with_limits = _tool(
    lambda program: run_program(program, only_limits=True),
    lambda: log.warning(
        "programs of the model can read and write this user's files and use the network: only limits hold"
    ),
)
python_with_limits.independent = False  # type: ignore[attr-defined]  # its programs can write the same files

ENGINES: dict[PythonEngine, Callable[[str], str]] = {
    "auto": python,
    "child": _tool(run_program, begin_with_child),
    "wasm": _tool(run_in_wasm, begin_with_wasm),
}
"""Engine → the tool `python` with it."""


def with_engine(engine: PythonEngine) -> Callable[[str], str]:
    """Return the tool `python` with an engine; the tool has this function as its `with_engine`.

    Raises:
        RecipeError: the packages of the engine are missing.
    """
    if engine == "wasm":
        wasm.require_packages()
    return ENGINES[engine]


python.with_engine = with_engine  # type: ignore[attr-defined]
