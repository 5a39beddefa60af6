"""This machine: its devices as a plan takes them, facts for the reader, and its rates beside the data sheet."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import covey
from benchmarks import common
from benchmarks.accelerator.checks import Context
from benchmarks.accelerator.results import Row
from covey.config.schema import MeshConfig
from covey.errors import CoveyError
from covey.parallel.mesh import mesh_from_config
from covey_plan import doctor
from covey_plan.compiled import peak_memory
from covey_plan.machines import CPU, MACHINES, Machine, Target
from covey_plan.roofline import machine_peaks
from covey_plan.topologies import GPUS, Places

KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
} | {gpu.name: name for name, gpu in GPUS.items()}
"""Kind of a device, as JAX names it → name of the machine in a plan."""
NEEDED = ("jax", "float32", "bfloat16", "gpu", "sampler")
"""Subjects of `covey doctor` without which no check is worth its time."""


def describe() -> dict[str, Any]:
    """Return version and devices, which results belong to, and facts for the reader."""
    devices = jax.devices()
    identity = {
        "covey": f"{covey.__version__}, sources {sources_digest()}",
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }
    facts = common.machine() | {"versions": common.versions(), "memory_gb": round(memory_limit() / 1e9, 2)}
    return {"identity": identity, "machine": facts}


def sources_digest() -> str:
    """Return the first digits of a digest of the package's sources: results of other sources are not continued."""
    digest, folder = hashlib.sha256(), Path(covey.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def measure(context: Context) -> Iterator[Row]:
    """Measure products and reading, once `covey doctor` has found JAX, its devices and the sampler in order.

    Raises:
        CoveyError: it has not.
    """
    findings = [finding for check in doctor.CHECKS for finding in check() if finding.subject in NEEDED]
    for finding in findings:
        if finding.fix:
            raise CoveyError(f"{finding.subject}: {finding.result}", fix=finding.fix)
    sheet = MACHINES.get(KINDS.get(jax.devices()[0].device_kind, ""))
    for dtype in ("float32",) if is_cpu() else ("float32", "bfloat16"):
        context.tell(f"products of {dtype}")
        peaks = machine_peaks(dtype)
        expected = None if sheet is None else sheet.flops[dtype] / 1e12
        yield Row(f"products of {dtype}", common.short(peaks.matmul / 1e12), expected, "TFLOP/s")
    expected = None if sheet is None else sheet.bandwidth / 1e9
    yield Row("reading memory", common.short(peaks.bandwidth / 1e9), expected, "GB/s")


def is_cpu() -> bool:
    """Return whether the checks run in their own tiny sizes."""
    return str(jax.devices()[0].platform) == "cpu"


def memory_limit() -> int:
    """Return the bytes of a device that programs can use; 0 where it does not say."""
    return int((jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0))


def memory_peak() -> int:
    """Return the most bytes that this process has held on a device; on a CPU, at all; 0 if the device does not say."""
    return peak_memory() if is_cpu() else int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def target_here(count: int) -> Target:
    """Return so many devices of this machine as the target of a plan."""
    kind = jax.devices()[0].device_kind
    return Target(CPU, CPU, None) if is_cpu() else Target(f"{count} × {kind}", KINDS.get(kind, kind), count)


def machine_here(dtype: str) -> Machine | None:
    """Return one of the devices with the memory that programs can use. Rates of one that no data sheet is known of are
    measured, with operands of `dtype`. None on a CPU, which a plan measures itself.
    """
    if is_cpu():
        return None
    kind, memory = jax.devices()[0].device_kind, float(memory_limit())
    if name := KINDS.get(kind):
        return replace(MACHINES[name], memory=memory or MACHINES[name].memory)
    like, rates = MACHINES["h100" if jax.devices()[0].platform == "gpu" else "v5p"], machine_peaks(dtype)
    source = f"a large {dtype} product and a sum, measured now"
    measured = replace(like, name=kind, flops={dtype: rates.matmul}, bandwidth=rates.bandwidth, clock=0.0)
    return replace(measured, memory=memory or math.inf, source=source)


def places_of(config: MeshConfig, devices: Sequence[Any]) -> Places:
    """Return the mesh of `config` over the first devices, or the first one alone."""
    count = config.data * config.fsdp * config.tp
    mesh = mesh_from_config(config, devices[:count]) if count > 1 else None
    return Places(mesh or devices[0])
