"""Memory that a run uses now."""

import jax
import psutil


def memory_in_use() -> int:
    """Return the bytes in use: on the fullest accelerator of this process, or by this process if it has none."""
    stats = [device.memory_stats() for device in jax.local_devices() if device.platform != "cpu"]
    used = [int(found["bytes_in_use"]) for found in stats if found and "bytes_in_use" in found]
    return max(used) if used else int(psutil.Process().memory_info().rss)
