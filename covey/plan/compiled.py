"""One compiled program of a plan: its memory and collectives, and the compiler's estimate of its time."""

import math
import re
import resource
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import psutil

from covey.allocator import release_free_memory
from covey.parallel.programs import Program
from covey.plan import hlo

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one loop of a program.

    Attributes:
        opcode: kind.
        loops: trip counts of the loops around it, outermost first; None where the program computes it.
        count: number of its instructions in the loop's body.
        bytes: size of what one turn of the innermost loop exchanges, on one device.
        sent: bytes that a device sends for it in a turn, over a ring; see `hlo.Instruction.sent`.
        asynchronous: whether the device computes meanwhile.
        hops: number of devices that the data of a turn passes, one after the other; see `hlo.Instruction.hops`.
    """

    opcode: str
    loops: tuple[int | None, ...]
    count: int
    bytes: int
    sent: int
    asynchronous: bool = False
    hops: int = 0

    @property
    def turns(self) -> int:
        """Number of turns of the innermost loop in one call; a loop of unknown length has one."""
        return math.prod(1 if trips is None else trips for trips in self.loops)


@dataclass(frozen=True)
class CompiledProgram:
    """Result of compiling a program; bytes are those of one device.

    Attributes:
        name: the program's.
        seconds: time that lowering and compiling took.
        arguments, results: bytes of its arguments, and of its results that do not take an argument's place.
        temporary: bytes that it allocates beside them.
        refused: bytes that the compiler says the program needs where it is too large for the device; else 0.
        compiling: most bytes that the compiler held on the host; 0 where that is not the device's memory.
        host_bytes: bytes of the host that its trace and its executable keep; 0 where the executable is freed.
        collectives: by loop.
        cycles: compiler's estimate of the cycles outside loops of unknown length, and in one turn of those. Kernels are
            not in it. None where the compiler gives no estimate.
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
    collectives: tuple[Collective, ...] = ()
    cycles: tuple[int, int] | None = None
    kernels: tuple[int, int] = (0, 0)
    unread: bool = False


def compile_program(
    program: Program, read_text: bool, on_host: bool = False, executables: list[Any] | None = None
) -> CompiledProgram:
    """Compile `program`, and read its memory, and its collectives and estimates, from the result.

    Args:
        program: of shapes, on its devices.
        read_text: read collectives and cycles too, from the text of the program.
        on_host: whether the device's memory is that of the host, so that the compiler's counts too.
        executables: gets the executable, which otherwise is freed.
    """
    before = process_memory() if on_host else 0
    reset_peak_memory()
    start = time.monotonic()
    try:
        compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = _refused_bytes(str(error))
        if needed is None:
            raise
        return CompiledProgram(program.name, time.monotonic() - start, refused=needed)
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
    return _with_text(result, compiled) if read_text else result


def _with_text(program: CompiledProgram, compiled: Any) -> CompiledProgram:
    """Return `program` with the collectives and estimates in the text of the compiled one."""
    try:
        text = hlo.Program(compiled.as_text() or "")
    except jax.errors.JaxRuntimeError:  # a compiler may be newer than the jaxlib that reads what it wrote
        return replace(program, unread=True)
    by_loop: dict[tuple[str, hlo.Loops, bool], list[hlo.Instruction]] = defaultdict(list)
    for one in text.collectives():
        by_loop[one.opcode, one.loops, one.asynchronous].append(one)
    collectives = tuple(
        Collective(
            opcode, loops, len(group), sum(x.bytes for x in group), sum(x.sent for x in group), asynchronous,
            sum(x.hops for x in group),
        )
        for (opcode, loops, asynchronous), group in by_loop.items()
    )  # fmt: skip
    cycles, kernels = [0, 0], [0, 0]
    for each in text.instructions:
        cycles[None in each.loops] += each.cycles * each.executions
        kernels[None in each.loops] += each.executions * each.kernel
    estimates: dict[str, Any] = {"cycles": tuple(cycles), "kernels": tuple(kernels)} if any(cycles) else {}
    return replace(program, collectives=collectives, **estimates)


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
    containers), they are those of the whole life of the process.
    """
    with suppress(OSError):
        if line := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(line[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory() -> None:
    """Reset the peak of `peak_memory` to the current memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
