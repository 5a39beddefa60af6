"""Resident memory of this process, and the highest since a moment.

The kernel keeps the highest and can be told to begin again, so that no peak is missed. Where it cannot (systems other
than Linux, some containers), the highest is that of the whole life of the process.
"""

import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from covey.allocator import release_free_memory


def resident() -> int:
    """Return the resident bytes of this process, after free memory went back to the system."""
    release_free_memory()
    return int(psutil.Process().memory_info().rss)


def highest() -> int:
    """Return the most resident bytes of this process since `begin_again`."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin_again() -> None:
    """Let `highest` begin with the memory of now."""
    with suppress(OSError):
        descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)
