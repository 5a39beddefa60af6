"""Hardware for which a run can be planned: rates, memory and links of one device, and their sources.

This module does not import JAX, so that a mistake in `--on` is answered at once.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from covey.errors import CoveyError, nearest

GB = 1e9
GIB = 2.0**30


@dataclass(frozen=True)
class Machine:
    """One device.

    Attributes:
        name: as `--on` names it.
        platform: as JAX names it: `tpu`, `gpu` or `cpu`.
        flops: peak flops/s of products by the type of their operands; float32 means full precision.
        bandwidth: bytes/s between memory and processor.
        memory: bytes that programs can use.
        link: bytes/s of one link to a neighbouring device in one direction; one ring of devices moves no more.
        clock: cycles/s by which the compiler's own estimates are converted to seconds; 0 where it gives none.
        share: assumed share of the peak flops/s that a phase reaches where the compiler gives no estimate.
        memory_share: the same of `bandwidth` and `link`.
        latency: seconds that a collective takes before its first byte moves.
        hop: seconds that each further device of its ring adds.
        source: where the figures come from.
    """

    name: str
    platform: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    link: float
    clock: float
    share: float
    memory_share: float
    latency: float
    hop: float
    source: str


def _tpu(name: str, teraflops: float, bandwidth: float, memory: float, link: float, clock: float) -> Machine:
    # A product of full float32 precision is six of bfloat16 operands.
    source = f"cloud.google.com/tpu/docs/{name}; a link is the interconnect per chip over its links and two directions"
    rates = (
        {"bfloat16": teraflops * 1e12, "float32": teraflops * 1e12 / 6},
        bandwidth * GB,
        memory * GIB,
        link * GB,
        clock * 1e9,
    )
    # jax-ml.github.io/scaling-book/sharding: a hop takes 1 us; gathering 32 kB over 4 chips of v5e took 8 us.
    return Machine(name, "tpu", *rates, 0.4, 0.4, latency=5e-6, hop=1e-6, source=source)


def _gpu(
    name: str, product: str, teraflops: float, float32: float, bandwidth: float, memory: float, link: float
) -> Machine:
    source = f"{product} data sheet, dense rates; a link is NVLink in one direction"
    rates = {"bfloat16": teraflops * 1e12, "float32": float32 * 1e12}, bandwidth * GB, memory * GB, link * GB, 0.0
    # The shares are those of published runs (docs/calibration.md). NCCL sums 128 bytes in 25 us (NVIDIA/nccl#1453).
    return Machine(name, "gpu", *rates, 0.23, 0.4, latency=25e-6, hop=0.0, source=source)


MACHINES = {
    # The compiler for v5e gives programs 15.75 of the 16 GiB.
    "v5e": _tpu("v5e", 197, 819, 15.75, 50, 1.5),
    "v5p": _tpu("v5p", 459, 2765, 95, 100, 1.75),
    "v6e": _tpu("v6e", 918, 1640, 31.25, 100, 1.75),
    "h100": _gpu("h100", "NVIDIA H100 SXM", 989, 67, 3350, 80, 450),
    "h200": _gpu("h200", "NVIDIA H200 SXM", 989, 67, 4800, 141, 450),
    "b200": _gpu("b200", "NVIDIA HGX B200", 2250, 75, 8000, 180, 900),
}
"""Name → device; a CPU is measured (`roofline.peaks`), not listed."""

MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables with the fraction of a GPU's memory that JAX takes, and above which it allocates nothing."""


def machine_for_jax(name: str) -> Machine:
    """Return the device `name` with the memory that JAX gives to programs: of a GPU three quarters, unless one of
    `MEMORY_FRACTIONS` is set; without preallocation too.

    Raises:
        CoveyError: the fraction is no number above 0.
    """
    machine, given = MACHINES[name], next(filter(None, map(os.environ.get, MEMORY_FRACTIONS)), "0.75")
    if machine.platform != "gpu":
        return machine
    if not re.fullmatch(r"\d+(?:\.\d*)?|\.\d+", given) or not float(given):
        raise CoveyError(f"{MEMORY_FRACTIONS[-1]}={given}", want="a fraction of a GPU's memory, such as 0.9")
    taken = f"JAX takes {float(given):.0%} of {machine.memory / GB:.0f} GB ({MEMORY_FRACTIONS[-1]})"
    return replace(machine, memory=float(given) * machine.memory, source=f"{machine.source}; {taken}")


CPU = "cpu"
EXAMPLES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "h100:8", "h200:8", "b200:8", CPU)
"""One target for each machine, for help, errors and completion."""
FORMS = f"{', '.join(EXAMPLES[:-1])} or {EXAMPLES[-1]}"


@dataclass(frozen=True)
class Target:
    """Devices for which a run is planned.

    Attributes:
        name: as `--on` gives them.
        machine: name of the device.
        count: number of devices; None on a CPU, which has as many virtual devices as the mesh asks for.
        processes: number of processes that GPUs are divided among; TPUs know their hosts.
    """

    name: str
    machine: str
    count: int | None
    processes: int = 1

    @property
    def platform(self) -> str:
        """Platform of the devices, as JAX names it."""
        return CPU if self.machine == CPU else MACHINES[self.machine].platform


def parse_target(text: str) -> Target:
    """Return the devices that `--on` names; a GPU without a number is one, and `h100:2x8` are two processes of 8 each.

    Raises:
        CoveyError: there is no such device, or its number is missing or malformed.

    >>> parse_target("V5e:2x4")
    Target(name='v5e:2x4', machine='v5e', count=8, processes=1)
    """
    machine, colon, shape = text.lower().partition(":")
    if machine not in (CPU, *MACHINES):
        raise CoveyError(f"there is no machine {machine!r}", want=FORMS, fix=nearest(machine, EXAMPLES))
    if machine == CPU:
        if colon:
            raise CoveyError(f"--on {text}", want="--on cpu: it has as many devices as model.mesh asks for")
        return Target(CPU, CPU, None)
    is_gpu = MACHINES[machine].platform == "gpu"
    shape = "1" if is_gpu and not colon else shape
    form = r"([1-9]\d{0,3}x)?[1-9]\d{0,4}" if is_gpu else r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}"
    if not re.fullmatch(form, shape):
        fix = next(f"--on {example}" for example in EXAMPLES if example.startswith(machine))
        raise CoveyError(f"--on {text}: {shape!r} is no number of devices", want=FORMS, fix=fix)
    sizes = [int(size) for size in shape.split("x")]
    processes = sizes[0] if is_gpu and len(sizes) == 2 else 1
    return Target(f"{machine}:{shape}", machine, math.prod(sizes), processes)
