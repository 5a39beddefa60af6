"""Seconds of a phase: the least that the machine allows, and what is expected of the compiled programs."""

from collections.abc import Mapping
from dataclasses import dataclass

from covey.plan.compiled import CompiledProgram
from covey.plan.machines import Machine
from covey.plan.work import BLOCKS_VISITED, KERNEL_SHARE, Call, Phase


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
    """Return what the calls of a program move, or of that only what it waits for; turns of a loop of unknown length are
    those of all calls.
    """
    return sum(
        one.total_sent() * (call.turns if call.turns and None in one.loops else call.count)
        for one in program.collectives
        if not (waited and one.asynchronous)
    )


def _cycles(program: CompiledProgram, call: Call) -> float:
    outside, inside = program.cycles or (0, 0)
    return call.count * outside + (call.turns or call.count) * inside
