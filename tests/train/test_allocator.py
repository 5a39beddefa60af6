"""What arrays leave behind when they are freed, each measured in a process of its own."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc can")

FREED = """
import numpy as np
from pathlib import Path
from covey.train.allocator import release_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

def fill(count):
    return [(np.ones(2**18), bytes(300_000)) for _ in range(count)]  # 2 MiB, and a small block behind it that stays

np.ones(2**21)  # its freeing raises glibc's own threshold above 2 MiB
before = resident()
held = [small for large, small in fill(100)]
if {release}:
    release_free_memory()
print(resident() - before)
"""


def freed_but_resident(release: bool) -> float:
    """Return the MiB that a process holds after it freed 200 MiB in blocks between which it keeps 30 MiB."""
    code = FREED.format(release=release)
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_freed_arrays_go_back_to_the_system() -> None:
    assert freed_but_resident(release=False) > 200
    assert freed_but_resident(release=True) < 60
