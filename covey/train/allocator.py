"""Return free memory from the C library's allocator to the system. Only glibc can; elsewhere nothing happens.

glibc carves blocks of up to 32 MB out of heaps, one heap for each of several threads, and keeps what is freed there for
later blocks. Caches and buffers of changing sizes leave holes: some rollouts of SmolLM2-135M left 1 GB. To map such
blocks one by one (mallopt) frees as much, and costs a rollout twice the page faults.
"""

import ctypes
import platform


def release_free_memory() -> None:
    """Return the free memory of all heaps to the system. Takes some hundredths of a second where heaps are large."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
