"""Child process of the Python tool: it locks itself in, and executes the program that it reads from stdin.

    python -P -s -S -u native_child.py FOLDER TELL CPU_SECONDS MEMORY_BYTES FILE_BYTES [limits]

TELL is a file descriptor to which it writes the names of the protections that hold. Without the word `limits` it
refuses the program unless all of them hold. It ends with the thread that started it. It imports the standard library
alone.

    limits     CPU seconds, memory, size of a file, open files, core files, processes (which do not count for root)
    landlock   no file but the standard library and shared libraries can be read, none outside FOLDER be written; no
               TCP, no signals out
    seccomp    no socket, process, program, or signal to another process; no change of who may use a file, of its
               times or attributes, or of how a process is scheduled; none of the kernel's larger surfaces
"""

import ctypes
import errno
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
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER_MODE = 38, 22, 2
SET_SIGNAL_OF_PARENTS_END = 1
LOAD, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
"""Instructions of classic BPF."""
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
CLONE_THREAD = 0x00010000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets of what a filter sees of a system call."""

# Numbers of the same system calls on both machines. fork, vfork, chmod, chown, lchown, utime, utimes and futimesat are
# not there on ARM. Landlock does not cover who may use a file, its times and its attributes.
REFUSED = {
    "x86_64": (
        41, 42, 43, 44, 46, 49, 50, 53,  # socket, connect, accept, sendto, sendmsg, bind, listen, socketpair
        57, 58, 59, 322,  # fork, vfork, execve, execveat
        62, 200, 129, 297, 424, 434, 438,  # kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_*
        101, 310, 311, 109, 112, 141, 302,  # ptrace, process_vm_*, setpgid, setsid, setpriority, prlimit64
        155, 161, 165, 166, 272, 308,  # pivot_root, chroot, mount, umount2, unshare, setns
        29, 64, 68, 135, 248, 249, 250, 303, 304, 300, 319,  # shmget, semget, msgget, personality, keys, handles, memfd
        298, 321, 323, 425, 426, 427,  # perf_event_open, bpf, userfaultfd, io_uring_*
        90, 91, 268, 452, 92, 93, 94, 260,  # chmod, fchmod, fchmodat, fchmodat2, chown, fchown, lchown, fchownat
        132, 235, 261, 280, 469,  # utime, utimes, futimesat, utimensat, file_setattr
        188, 189, 190, 463, 197, 198, 199, 466,  # setxattr, lsetxattr, fsetxattr, setxattrat, removexattr, …
        203, 144, 142, 314, 251,  # sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr, ioprio_set
        256, 279,  # migrate_pages, move_pages
    ),
    "aarch64": (
        198, 203, 202, 206, 211, 200, 201, 199, 221, 281, 129, 130, 138, 240, 424, 434, 438, 117, 270, 271, 154, 157,
        140, 261, 41, 51, 40, 39, 97, 268, 194, 190, 186, 92, 217, 218, 219, 264, 265, 262, 279, 241, 280, 282, 425,
        426, 427, 52, 53, 452, 55, 54, 88, 469, 5, 6, 7, 463, 14, 15, 16, 466, 122, 119, 118, 274, 30,
        238, 239,
    ),
}  # fmt: skip
MACHINES = {"x86_64": (0xC000003E, 56, 234, 157), "aarch64": (0xC00000B7, 220, 131, 167)}
"""Number of the architecture in a filter, and those of clone, tgkill and prctl."""
CLONE3 = 435
PACKAGES = ("site-packages", "dist-packages")
"""Folders inside of that of the standard library that are no part of it."""
X32 = 0x40000000
"""Bit of the numbers of x86's other set of system calls."""


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
    """Return what a program reads: the standard library without the packages beside it, and shared libraries."""
    library, machine = os.path.dirname(os.__file__), f"{platform.machine()}-linux-gnu"
    found = [os.path.join(library, name) for name in os.listdir(library) if name not in PACKAGES]
    found += [path for path in sys.path if path != library]
    for folder in (os.path.join(sys.base_prefix, "lib"), "/lib64", "/usr/lib64", "/lib", "/usr/lib"):
        names = os.listdir(folder) if os.path.isdir(folder) else []
        found += [os.path.join(folder, name) for name in names if ".so" in name]
    return [*found, f"/lib/{machine}", f"/usr/lib/{machine}", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]


def lock_files(libc: ctypes.CDLL, read: Sequence[str], show: Sequence[str], write: Sequence[str]) -> bool:
    """Let this process read below `read`, list the folders below `show`, and write below `write` alone; return False
    where the kernel cannot.
    """
    abi = libc.syscall(CREATE_RULESET, None, 0, 1)
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


def lock_calls(libc: ctypes.CDLL) -> bool:
    """Refuse this process the system calls above; return False where the kernel cannot, or the machine is another."""
    if (machine := platform.machine()) not in MACHINES or libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    program = b"".join(struct.pack("<HBBI", *one) for one in call_filter(machine, os.getpid()))
    code = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    return bool(libc.prctl(SET_SECCOMP, FILTER_MODE, described, 0, 0) == 0)


def call_filter(machine: str, process: int) -> list[tuple[int, int, int, int]]:
    """Return the filter: instructions (code, jump if true, jump if false, value)."""
    architecture, clone, signal_thread, control = MACHINES[machine]
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    return [
        (LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, architecture), refuse,
        (LOAD, 0, 0, NUMBER), (JUMP_SET, 0, 1, X32), refuse,
        *(one for number in REFUSED[machine] for one in ((JUMP_EQUAL, 0, 1, number), refuse)),
        (JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE | errno.ENOSYS),  # the C library then uses clone
        (JUMP_EQUAL, 0, 4, control), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_EQUAL, 0, 1, SET_SIGNAL_OF_PARENTS_END),
        refuse, (RETURN, 0, 0, ALLOW),
        (JUMP_EQUAL, 0, 3, clone), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_SET, 4, 0, CLONE_THREAD), refuse,
        (JUMP_EQUAL, 0, 2, signal_thread), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_EQUAL, 0, 1, process),
        (RETURN, 0, 0, ALLOW), refuse,
    ]  # fmt: skip


def main(folder: str, tell: int, cpu: int, memory: int, file: int, only_limits: bool) -> None:
    """Lock this process in, and execute the program."""
    program = sys.stdin.buffer.read().decode(errors="replace")
    libc = ctypes.CDLL(None, use_errno=True)
    set_limits(cpu, memory, file)
    on_linux = sys.platform == "linux"
    if on_linux:
        libc.prctl(SET_SIGNAL_OF_PARENTS_END, signal.SIGKILL)
    os.chdir(folder)
    locked = {
        "landlock": on_linux and lock_files(libc, readable(), [os.path.dirname(os.__file__)], [folder]),
        "seccomp": on_linux and lock_calls(libc),
    }
    os.write(tell, ",".join(["limits", *(name for name, holds in locked.items() if holds)]).encode())
    os.close(tell)
    if not (only_limits or all(locked.values())):
        sys.exit(1)
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        inner = error.__traceback__ and error.__traceback__.tb_next  # without the line above
        traceback.print_exception(error.with_traceback(inner))
        sys.exit(1)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0], int(words[1]), int(words[2]), int(words[3]), int(words[4]), words[5:] == ["limits"])
