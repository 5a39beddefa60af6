"""One compiled program of a plan: its memory and collectives, and the compiler's estimate of its time."""

import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jax
import psutil
from jax.sharding import AbstractDevice, AbstractMesh

from covey.train.allocator import release_free_memory
from covey_plan import hlo
from covey_plan.program import Program

T = TypeVar("T")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class CompiledProgram:
    """Result of compiling a program; bytes on one device.

    Attributes:
        name: the program's.
        seconds: time that lowering and compiling took.
        arguments, results: bytes of its arguments, and of its results that do not take an argument's place.
        temporary: bytes that it allocates in addition.
        refused: bytes that the compiler says the program needs where it is too large for the device; else 0.
        compiling: most bytes that the compiler held on the host; 0 where that is not the device's memory.
        host_bytes: bytes of the host that its trace and its executable keep; 0 where the executable is freed.
        collectives: in program order.
        cycles: compiler's estimate of the cycles outside loops of unknown length, and in one turn of those. Kernels are
            not in it. 0 where the compiler gives none: on CPUs and GPUs, and for collectives alone. None where the text
            is not known.
        kernels: number of executions of custom calls outside and inside, as for `cycles`.
        unread: whether its text could not be read, so that collectives and cycles are not known.
    """

    name: str
    seconds: float
    arguments: int = 0
    results: int = 0
    temporary: int = 0
    refused: int = 0
    compiling: int = 0
    host_bytes: int = 0
    collectives: tuple[hlo.Instruction, ...] = ()
    cycles: tuple[int, int] | None = None
    kernels: tuple[int, int] = (0, 0)
    unread: bool = False


def compile_program(
    program: Program, read_text: bool, platform: str = "", executables: list[Any] | None = None
) -> CompiledProgram:
    """Compile `program`, and read its memory, and its collectives and estimates, from the result.

    Args:
        program: of shapes, on its devices.
        read_text: read collectives and cycles too, from the text of the program.
        platform: platform of its devices. A CPU shares the host's memory, so that the compiler's counts too. A
            compiler for TPUs may be newer than the jaxlib that reads what it wrote, and so writes the text as well.
        executables: gets the executable, which otherwise is freed.
    """
    with TemporaryDirectory(prefix="covey-plan-") as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder} if read_text and platform == "tpu" else {}
        result, compiled = _compile(program, platform == "cpu", executables, options)
        return result if compiled is None or not read_text else _with_text(result, _text_of(compiled, Path(folder)))


def _compile(
    program: Program, on_host: bool, executables: list[Any] | None, options: dict[str, str | bool]
) -> tuple[CompiledProgram, Any]:
    """Return the memory of a program, and what the compiler returns; None if it refuses the program."""
    before = process_memory() if on_host else 0
    reset_peak_memory()
    start = time.monotonic()
    try:
        compiled = _wait_for(partial(lower(program).compile, options or None))
    except jax.errors.JaxRuntimeError as error:
        needed = _refused_bytes(str(error))
        if needed is None:
            raise
        return CompiledProgram(program.name, time.monotonic() - start, refused=needed), None
    seconds = time.monotonic() - start
    if executables is not None:
        executables.append(compiled)
    compiling = peak_memory() - before if on_host else 0
    memory: Any = compiled.memory_analysis()
    result = CompiledProgram(
        program.name,
        seconds,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        compiling=compiling,
        host_bytes=max(process_memory() - before, 0) if on_host and executables is not None else 0,
    )
    return result, compiled


def lower(program: Program) -> jax.stages.Lowered:
    """Lower a program for its devices, which need not be there. Since JAX 0.11 Pallas asks for the GPU that it lowers
    for, and looks for a real one unless the mesh of this thread describes one.
    """
    shapes = (x for x in jax.tree.leaves((program.args, program.kwargs)) if isinstance(x, jax.ShapeDtypeStruct))
    device: Any = next((one for x in shapes if x.sharding for one in x.sharding.device_set), None)
    if device is None or device.platform != "gpu":
        return program.lower()
    described = AbstractDevice(device.device_kind, device.core_count, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=described)):
        return program.lower()


def _wait_for(call: Callable[[], T]) -> T:
    """Return the result of `call`, made in another thread: the compiler does not return to Python before its end, and
    Ctrl-C is to end a plan at once.
    """
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="compiler", daemon=True).start()
    return result.result()


def _text_of(compiled: Any, folder: Path) -> str | None:
    """Return the text of a compiled program, or that which its compiler has written to `folder`; None without one."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        return next((path.read_text() for path in folder.glob("*.after_codegen.txt")), None)


def _with_text(program: CompiledProgram, written: str | None) -> CompiledProgram:
    """Return `program` with the collectives and estimates in the text of the compiled one."""
    if written is None:
        return replace(program, unread=True)
    text = hlo.Program(written)
    cycles, kernels = [0, 0], [0, 0]
    for each in text.instructions:
        cycles[None in each.loops] += each.cycles * each.executions
        kernels[None in each.loops] += each.executions * each.kernel
    estimates: dict[str, Any] = {"cycles": tuple(cycles), "kernels": tuple(kernels)}
    return replace(program, collectives=tuple(text.collectives()), **estimates)


def _refused_bytes(message: str) -> int | None:
    """Return the bytes that the compiler for TPUs says a program needs when it refuses it; None for another error.

    >>> _refused_bytes("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm.")
    18790481920
    """
    used = re.search(r"[Uu]sed ([\d.]+)([KMG]?) of [\d.]+[KMG]? hbm", message)
    return int(float(used[1]) * UNITS[used[2]]) if used else None


def process_memory() -> int:
    """Return the resident bytes of this process, after free memory went back to the system."""
    release_free_memory()
    return int(psutil.Process().memory_info().rss)


def peak_memory() -> int:
    """Return the most resident bytes of this process since `reset_peak_memory`.

    The kernel keeps them, so that no peak is missed. Where it cannot begin again (systems other than Linux, some
    containers), they count from the beginning of the process.
    """
    with suppress(OSError):
        if line := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(line[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory() -> None:
    """Reset the peak of `peak_memory` to the current memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
