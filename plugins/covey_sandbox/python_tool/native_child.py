"""Child process of the Python tool: it locks itself in, and executes the program that it reads from stdin.

    python -P -s -S -u native_child.py FOLDER TELL CPU_SECONDS MEMORY_BYTES FILE_BYTES LANDLOCK_ABI [limits]

TELL is a file descriptor to which it writes the names of the protections that hold. Without the word `limits` it
refuses the program unless all of them hold. It ends with the thread that started it. It imports the standard library
alone. It uses no later version of Landlock's interface than LANDLOCK_ABI.

    limits        CPU seconds, memory, size of a file, open files, core files, processes (which do not count for root)
    capabilities  none, also for root: it has the rights of the user who owns its files and no others
    landlock      no file but the standard library and shared libraries can be read, none outside FOLDER be written
    seccomp       no system call but those that `tools/seccomp_filters.py` names
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls, the same on every architecture."""
SET_SIGNAL_OF_PARENTS_END, SET_SECCOMP, DROP_BOUND, SET_NO_NEW_PRIVILEGES, AMBIENT = 1, 22, 24, 38, 47
FILTER_MODE, CLEAR_AMBIENT = 2, 4
"""Options of prctl, and their values."""
CAPABILITIES_VERSION = 0x20080522
PROCESS = 0x5EC0C0DE
"""Placeholder of the number of the process in a filter."""
PACKAGES = ("site-packages", "dist-packages")
"""Folders inside of that of the standard library that are no part of it."""


def set_limits(cpu: int, memory: int, file: int) -> None:
    """Limit this process and what it starts."""
    limits = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: file,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for what, limit in limits.items():
        resource.setrlimit(what, (limit, limit))


def readable() -> list[str]:
    """List the paths that a program may read: the standard library without the packages beside it, shared libraries."""
    library, machine = os.path.dirname(os.__file__), f"{platform.machine()}-linux-gnu"
    paths = [os.path.join(library, name) for name in os.listdir(library) if name not in PACKAGES]
    paths += [path for path in sys.path if path != library]
    for folder in (os.path.join(sys.base_prefix, "lib"), "/lib64", "/usr/lib64", "/lib", "/usr/lib"):
        names = os.listdir(folder) if os.path.isdir(folder) else []
        paths += [os.path.join(folder, name) for name in names if ".so" in name]
    return [*paths, f"/lib/{machine}", f"/usr/lib/{machine}", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]


def drop_capabilities(libc: ctypes.CDLL) -> bool:
    """Drop all capabilities, also those that this process could get back; return whether none is left and the standard
    library can be read without them.
    """
    for capability in range(64):  # refused to those who have none
        libc.prctl(DROP_BOUND, capability, 0, 0, 0)
    libc.prctl(AMBIENT, CLEAR_AMBIENT, 0, 0, 0)
    header, left = struct.pack("<Ii", CAPABILITIES_VERSION, 0), ctypes.create_string_buffer(24)
    failed = libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.capset(header, bytes(24))
    return not (failed or libc.capget(header, left) or any(left.raw)) and os.access(os.__file__, os.R_OK)


def lock_files(libc: ctypes.CDLL, highest: int, read: Sequence[str], show: Sequence[str], write: Sequence[str]) -> bool:
    """Let this process read below `read`, list the folders below `show`, and write below `write` alone, with a version
    of Landlock's interface up to `highest`; return False where the kernel cannot.
    """
    abi = min(libc.syscall(CREATE_RULESET, None, 0, 1), highest)
    if abi < 1:
        return False
    rights = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    handled = struct.pack("<QQQ", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = libc.syscall(CREATE_RULESET, handled, len(handled), 0)
    reading, listing = 0b1101, 0b1000  # execute, read files, list folders
    for path, access in [*((p, reading) for p in read), *((p, listing) for p in show), *((p, rights) for p in write)]:
        try:
            beneath = os.open(path, os.O_PATH)
        except OSError:  # it is not there, or not for this user
            continue
        granted = access if os.path.isdir(path) else access & 0b111
        refused = libc.syscall(ADD_RULE, ruleset, 1, struct.pack("<Qi", granted, beneath), 0)
        os.close(beneath)
        if refused:
            return False
    return not (libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(RESTRICT_SELF, ruleset, 0))


def read_filter() -> bytes:
    """Return the filter of this machine, for this process; nothing where there is none."""
    path = os.path.join(os.path.dirname(__file__), f"seccomp_{platform.machine()}.bpf")
    if not os.path.exists(path):
        return b""
    with open(path, "rb") as file:
        return file.read().replace(struct.pack("<I", PROCESS), struct.pack("<I", os.getpid()))


def lock_calls(libc: ctypes.CDLL, program: bytes) -> bool:
    """Limit this process to the system calls that a filter allows; return False where the kernel cannot."""
    if not program or libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    code = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    return bool(libc.prctl(SET_SECCOMP, FILTER_MODE, described, 0, 0) == 0)


def lock(libc: ctypes.CDLL, folder: str, abi: int) -> dict[str, bool]:
    """Lock this process in; return which protections hold."""
    read, calls = readable(), read_filter()
    capabilities = drop_capabilities(libc)
    libc.prctl(SET_SIGNAL_OF_PARENTS_END, signal.SIGKILL)  # behind the change of rights, which may clear it
    files = lock_files(libc, abi, read, [os.path.dirname(os.__file__)], [folder])
    return {"capabilities": capabilities, "landlock": files, "seccomp": lock_calls(libc, calls)}


def main(folder: str, tell: int, cpu: int, memory: int, file: int, abi: int, only_limits: bool) -> None:
    """Lock this process in, and execute the program."""
    program = sys.stdin.buffer.read().decode(errors="replace")
    libc = ctypes.CDLL(None, use_errno=True)
    set_limits(cpu, memory, file)
    os.chdir(folder)
    locked = lock(libc, folder, abi) if sys.platform == "linux" else {}
    os.write(tell, ",".join(["limits", *(name for name, holds in locked.items() if holds)]).encode())
    os.close(tell)
    if not (only_limits or (locked and all(locked.values()))):
        sys.exit(1)
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        inner = error.__traceback__ and error.__traceback__.tb_next  # without the line above
        traceback.print_exception(error.with_traceback(inner))
        sys.exit(1)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0], int(words[1]), int(words[2]), int(words[3]), int(words[4]), int(words[5]), words[6:] == ["limits"])
