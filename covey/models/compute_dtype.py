"""Choice of the type of products where `ModelOptions.compute_dtype` is auto."""

import re
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from covey.parallel.mesh import platform_of

AUTO = "auto"
CPUINFO = Path("/proc/cpuinfo")
CPU_FLAGS = ("amx_bf16", "avx512_bf16")
"""Flags of /proc/cpuinfo of processors that multiply bfloat16 in hardware."""


def resolve_compute_dtype(compute_dtype: str, platform: str | None = None) -> str:
    """Return `compute_dtype`; for auto bfloat16 where the devices of `platform`, by default the first device of this
    process, multiply it in hardware, else float32.

    These devices do: TPUs, NVIDIA GPUs of compute capability 8.0 or more, and processors under Linux with one of
    `CPU_FLAGS`. Other GPUs are not asked, and get float32.
    """
    if compute_dtype != AUTO:
        return compute_dtype
    platform = platform or platform_of(SingleDeviceSharding(jax.local_devices()[0]))
    in_hardware = _cpu_has_bfloat16() if platform == "cpu" else platform in ("tpu", "cuda")
    return "bfloat16" if in_hardware else "float32"


def _cpu_has_bfloat16() -> bool:
    if not CPUINFO.is_file():  # it is Linux alone that has one
        return False
    flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(errors="replace"), re.M)
    return flags is not None and not set(CPU_FLAGS).isdisjoint(flags[1].split())
