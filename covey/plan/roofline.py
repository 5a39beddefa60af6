"""Seconds of a phase: the least that the machine allows, and what is expected of the compiled programs.

Peak rates of this machine are measured once per process, through JAX with the precision that the models use: a peak is
what JAX reaches here, not what a data sheet says. The best of some calls counts: other work can only take away.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from covey.plan.compiled import CompiledProgram
from covey.plan.machines import Machine
from covey.plan.work import BLOCKS_VISITED, KERNEL_SHARE, Call, Phase

CALLS = 8
STREAMED = 256 * 2**20
"""Number of bytes that are read: more than any cache holds."""


@dataclass(frozen=True)
class Rates:
    """Rates of all devices together: flops/s of the run's products, bytes/s of memory; bytes/s over a link; and their
    number.
    """

    flops: float
    bandwidth: float
    link: float
    count: int


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase.

    Attributes:
        phase: its work.
        link_bytes: bytes that a device sends.
        compute, memory, link: seconds that each would take alone; the roofline is the longest.
        compiled: seconds by the compiler's estimate, with kernels charged from their flops, and what the devices wait
            for from the bytes that move; None without an estimate.
        expected: `compiled`, or the roofline over the machine's assumed share of it.
    """

    phase: Phase
    link_bytes: float
    compute: float
    memory: float
    link: float
    compiled: float | None
    expected: float

    @property
    def roofline(self) -> float:
        """Least number of seconds."""
        return max(self.compute, self.memory, self.link)

    @property
    def bound(self) -> str:
        """Name of the longest time: compute, memory or link."""
        times = {"compute": self.compute, "memory": self.memory, "link": self.link}
        return max(times, key=times.__getitem__)


def phase_time(phase: Phase, programs: Mapping[str, CompiledProgram], machine: Machine, rates: Rates) -> PhaseTime:
    """Return the seconds of `phase` on `rates.count` devices of `machine`.

    Args:
        programs: compiled ones by name.
    """
    calls = [(programs[name], call) for name, call in phase.calls.items() if name in programs]
    moved, waited = (sum(_link_bytes(program, call, only) for program, call in calls) for only in (False, True))
    compute, memory, link = phase.flops / rates.flops, phase.bytes / rates.bandwidth, moved / rates.link
    roofline = max(compute, memory, link)
    compiled = None
    if machine.clock and all(program.cycles is not None for program, _ in calls):
        cycles = sum(_cycles(program, call) for program, call in calls)
        kernels = phase.kernel_flops * BLOCKS_VISITED / (rates.flops * KERNEL_SHARE)
        compiled = max(cycles / machine.clock + kernels + waited / rates.link, roofline)
    expected = roofline / machine.share if compiled is None else compiled
    return PhaseTime(phase, moved, compute, memory, link, compiled, expected)


def _link_bytes(program: CompiledProgram, call: Call, waited: bool) -> float:
    """Return the bytes that a device sends in the calls of a program; with `waited`, in synchronous collectives alone.
    Turns of a loop of unknown length are those of all calls.
    """
    return sum(
        one.total_sent * (call.turns if call.turns and None in one.loops else call.count)
        for one in program.collectives
        if not (waited and one.asynchronous)
    )


def _cycles(program: CompiledProgram, call: Call) -> float:
    outside, inside = program.cycles or (0, 0)
    return call.count * outside + (call.turns or call.count) * inside


@dataclass(frozen=True)
class MachinePeaks:
    """Rates of a large square product in flops/s, and of reading in bytes/s."""

    matmul: float
    bandwidth: float


@cache
def machine_peaks(dtype: str = "float32") -> MachinePeaks:
    """Measure the peaks of the default device, with operands of `dtype`."""
    side = 2048 if jax.default_backend() == "cpu" else 8192
    square = jnp.ones((side, side), dtype)
    streamed, matrix = jnp.ones(STREAMED // 4), jnp.ones((1024, STREAMED // 4096))
    reading = min(best_seconds(jax.jit(jnp.sum), streamed), best_seconds(product, jnp.ones((1, 1024)), matrix))
    return MachinePeaks(2 * side**3 / best_seconds(product, square, square), STREAMED / reading)


product = jax.jit(partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32))


def best_seconds(call: Callable[..., Any], *operands: Any) -> float:
    """Return the seconds of the fastest call, without the first, which compiles."""
    jax.block_until_ready(call(*operands))
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(call(*operands))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
