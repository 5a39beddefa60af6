"""Seconds of a phase: the least that the machine allows, and what is expected of the compiled programs.

Peak rates of this machine are measured once per process, through JAX with the precision that the models use: a peak is
what JAX reaches here, not what a data sheet says. The best of some calls counts: other work can only take away.
"""

import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from covey.config.recipe import Recipe, SFTRecipe
from covey.models.config import ModelConfig
from covey_plan.compiled import CompiledProgram
from covey_plan.hlo import Instruction
from covey_plan.lengths import Lengths
from covey_plan.machines import Machine
from covey_plan.topologies import mesh_size, rollout_config
from covey_plan.work import BLOCKS_VISITED, GRID_STEP, KERNEL_SHARE, Call, Phase, Sizes, step_phases

CPU_SHARE = 0.4
"""Share of the roofline that a phase reaches on CPUs: 39 to 57 per cent in updates, 56 to 74 in decoding (measured)."""
CALLS = 8
STREAMED = 256 * 2**20
"""Number of bytes that are read: more than any cache holds."""
FEW_STREAMED = 64 * 2**20
"""The same while a run trains: more than the caches of most processors hold."""


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
        compiled: seconds of the devices by the compiler's estimate, with kernels charged from their flops and bytes,
            and what the devices wait for from the bytes that move and the number of collectives; None without an
            estimate.
        expected: seconds of the devices, `compiled` or those at the machine's assumed shares of its peaks, and those of
            the host in which these have nothing to do.
        parts: what `expected` is made of, by name.
    """

    phase: Phase
    link_bytes: float
    compute: float
    memory: float
    link: float
    compiled: float | None
    expected: float
    parts: Mapping[str, float]

    @property
    def roofline(self) -> float:
        """Least number of seconds."""
        return max(self.compute, self.memory, self.link)

    @property
    def bound(self) -> str:
        """Name of the longest time: compute, memory or link."""
        times = {"compute": self.compute, "memory": self.memory, "link": self.link}
        return max(times, key=times.__getitem__)


Calls = Sequence[tuple[CompiledProgram, Call]]
"""Programs of a phase with their calls."""


def phase_time(phase: Phase, programs: Mapping[str, CompiledProgram], machine: Machine, rates: Rates) -> PhaseTime:
    """Return the seconds of `phase` on `rates.count` devices of `machine`.

    Args:
        programs: compiled ones by name.
    """
    calls = [(programs[name], call) for name, call in phase.calls.items() if name in programs]
    moved = sum(_turns(one, call) * one.sent for program, call in calls for one in program.collectives)
    compute, memory, link = phase.flops / rates.flops, phase.bytes / rates.bandwidth, moved / rates.link
    roofline, cycles = max(compute, memory, link), [program.cycles for program, _ in calls]
    if machine.clock and all(each is not None for each in cycles) and any(map(any, filter(None, cycles))):
        parts = _estimated(phase, calls, machine, rates)
        compiled = max(sum(parts.values()), roofline)
        parts["above the estimate"] = compiled - sum(parts.values())
    else:
        parts, compiled = _assumed(phase, calls, machine, rates, compute, link), None
    beside = sum(parts.values()) if phase.runs_ahead else 0.0
    parts["host"] = max(phase.host - beside, 0.0) if machine.platform != "cpu" else 0.0  # on a CPU its share has it
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return PhaseTime(phase, moved, compute, memory, link, compiled, sum(parts.values()), parts)


def step_times(
    recipe: Recipe | SFTRecipe,
    config: ModelConfig,
    lengths: Lengths,
    sizes: Sizes,
    machine: Machine,
    flops: float,
    programs: Sequence[CompiledProgram] = (),
    fixed_shapes: bool = False,
    processes: int = 1,
) -> list[PhaseTime]:
    """Return the seconds of the phases of a step; arguments as for `work.step_phases`, and:

    Args:
        machine: one of the devices.
        flops: its peak flops/s with operands of the run's type.
        programs: compiled ones.
    """
    mesh, of_rollout = recipe.model.mesh, rollout_config(recipe).size
    by_name = {program.name: program for program in programs}
    times = []
    for phase in step_phases(recipe, config, lengths, sizes, mesh.data * mesh.fsdp, fixed_shapes, processes):
        devices = of_rollout if of_rollout and phase.name == "rollout" else mesh_size(mesh)
        count = 1 if machine.platform == "cpu" else devices  # virtual devices share one processor
        rates = Rates(flops * count, machine.bandwidth * count, machine.link, count)
        times.append(phase_time(phase, by_name, machine, rates))
    return times


def _estimated(phase: Phase, calls: Calls, machine: Machine, rates: Rates) -> dict[str, float]:
    """Return the parts of a phase by the compiler's estimates."""
    parts = {program.name: _cycles(program, call) / machine.clock for program, call in calls}
    parts["attention kernels"] = phase.kernel_flops * BLOCKS_VISITED / (rates.flops * KERNEL_SHARE)
    of_each = rates.bandwidth / rates.count
    slower = max(1.0, GRID_STEP * of_each / phase.cache.grid_step) if phase.cache.grid_step else 1.0
    parts["decode kernels"] = slower * phase.cache.read / rates.bandwidth
    parts["waiting for links"] = _waited(calls, machine, rates)
    return parts


def _waited(calls: Calls, machine: Machine, rates: Rates) -> float:
    """Return the seconds of the collectives that devices wait for, by their bytes and their beginnings."""
    return sum(
        _turns(one, call) * (one.sent / rates.link + machine.latency + one.hops * machine.hop)
        for program, call in calls
        for one in program.collectives
        if not one.asynchronous
    )


def _assumed(
    phase: Phase, calls: Calls, machine: Machine, rates: Rates, compute: float, link: float
) -> dict[str, float]:
    """Return the longest of the times at the machine's assumed shares, and what beginning collectives takes."""
    read = phase.bytes + max(phase.cache.read - phase.cache.live, 0.0)
    times = {
        "compute": compute / machine.share,
        "memory": read / rates.bandwidth / machine.memory_share,
        "links": link / machine.memory_share,
    }
    longest = max(times, key=times.__getitem__)
    number = sum(_turns(one, call) for program, call in calls for one in program.collectives)
    return {longest: times[longest], "beginning collectives": number * machine.latency}


def _turns(one: Instruction, call: Call) -> int:
    """Return the number of executions of a collective; `call` has the turns of loops of unknown length."""
    return one.executions * (call.turns if call.turns and None in one.loops else call.count)


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
    return _rates(dtype, 2048 if jax.default_backend() == "cpu" else 8192, STREAMED, best_seconds)


@cache
def present_rates(dtype: str = "float32") -> MachinePeaks:
    """Measure the rates of the default device under its present load, with small arrays: a model is in its memory. It
    takes half a second on a processor.
    """
    return _rates(dtype, 1024 if jax.default_backend() == "cpu" else 4096, FEW_STREAMED, _usual_seconds)


def _rates(dtype: str, side: int, size: int, seconds: Callable[..., float]) -> MachinePeaks:
    square = jnp.ones((side, side), dtype)
    streamed, matrix = jnp.ones(size // 4), jnp.ones((1024, size // 4096))
    reading = min(seconds(jax.jit(jnp.sum), streamed), seconds(product, jnp.ones((1, 1024)), matrix))
    return MachinePeaks(2 * side**3 / seconds(product, square, square), size / reading)


product = jax.jit(partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32))


def best_seconds(call: Callable[..., Any], *operands: Any) -> float:
    """Return the seconds of the fastest call, without the first, which compiles."""
    return min(_times(call, operands))


def _usual_seconds(call: Callable[..., Any], *operands: Any) -> float:
    """Return the median of the seconds of the calls."""
    return statistics.median(_times(call, operands))


def _times(call: Callable[..., Any], operands: Sequence[Any]) -> list[float]:
    jax.block_until_ready(call(*operands))
    return timeit.repeat(lambda: jax.block_until_ready(call(*operands)), number=1, repeat=CALLS)
