"""Write the seccomp filters of the Python tool: system calls that a program may use, by name, for each machine.

    apt-get install libseccomp2                  of Debian 13 or newer, which has libseccomp 2.6
    python tools/seccomp_filters.py [LIBRARY]    LIBRARY is the path of libseccomp.so.2 if it is not installed

Whatever is not named here is refused, also what a newer kernel adds. A system call of another architecture, and of
x86's x32, ends the program. `native_child` replaces `PROCESS` by its own process number and loads the filter.
"""

import ctypes
import errno
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "plugins" / "covey_sandbox" / "python_tool"
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine → its number in a filter."""
PROCESS = 0x5EC0C0DE
"""Placeholder of the number of the process in a filter, above the greatest that Linux gives."""
MINIMUM_VERSION = (2, 6)
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EQUAL, MASKED_EQUAL = 4, 7
BAD_ARCHITECTURE = 2

ALLOWED = """
read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 lseek close close_range sendfile
copy_file_range dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
epoll_pwait epoll_pwait2 eventfd eventfd2 ftruncate fsync fdatasync fadvise64 flock umask
stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64
getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat link linkat symlink symlinkat
mmap munmap mremap mprotect madvise msync brk
futex set_robust_list get_robust_list rseq membarrier set_tid_address restart_syscall exit exit_group
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause
alarm setitimer getitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
getpid gettid getppid getpgrp getpgid getsid getuid geteuid getgid getegid getresuid getresgid getgroups
getrusage getrlimit getpriority sched_yield sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min sched_rr_get_interval
getrandom getcpu uname sysinfo wait4 waitid
"""
"""Calls with any arguments: files by descriptor or under Landlock, memory, threads, time, facts about the process."""

WORD = 0xFFFFFFFF
O_ACCMODE, O_WRONLY, O_RDWR, O_TRUNC, O_ASYNC = 0o3, 0o1, 0o2, 0o1000, 0o20000
CLONE_THREAD, CLONE_NAMESPACES = 0x00010000, 0x7E020000
"""Landlock tells a truncation by `open` from ABI 3; before, it asks for the right to write of the mode alone."""


def openings(argument: int) -> list[dict[int, tuple[int, int]]]:
    """Return when a file may be opened: without O_TRUNC, or for writing, which Landlock checks."""
    return [{argument: (O_TRUNC, 0)}, *({argument: (O_ACCMODE, mode)} for mode in (O_WRONLY, O_RDWR))]


CONDITIONS: dict[str, list[dict[int, tuple[int, int]]]] = {
    "open": openings(1),
    "openat": openings(2),
    "creat": [{}],
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, locks, F_DUPFD_CLOEXEC; no F_SETOWN, F_SETSIG, F_SETLEASE, F_NOTIFY
    "fcntl": [
        *({1: (WORD, command)} for command in (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030)),
        {1: (WORD, 4), 2: (O_ASYNC, 0)},  # F_SETFL
    ],
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": [{1: (WORD, command)} for command in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)],
    "clone": [{0: (CLONE_THREAD | CLONE_NAMESPACES, CLONE_THREAD)}],
    "kill": [{0: (WORD, PROCESS)}],
    "tgkill": [{0: (WORD, PROCESS)}],
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA, which names memory
    "prctl": [{0: (WORD, option)} for option in (3, 15, 16, 0x53564D41)],
    "prlimit64": [{0: (WORD, 0), 2: (2**64 - 1, 0)}],  # reading its own
}
"""Call → the alternatives under which it is allowed: {argument: (mask, value)}."""
NOT_THERE = ("clone3", "openat2")
"""Calls that the C library and programs replace by older ones where the kernel does not have them."""


class Comparison(ctypes.Structure):
    """libseccomp's `scmp_arg_cmp`."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def load(path: str = "libseccomp.so.2") -> ctypes.CDLL:
    """Load libseccomp."""
    library = ctypes.CDLL(path, use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_version.restype = ctypes.POINTER(ctypes.c_uint)
    context = ctypes.c_void_p
    for name, kinds in {
        "arch_add": (ctypes.c_uint32,), "arch_remove": (ctypes.c_uint32,), "export_bpf": (ctypes.c_int,),
        "attr_set": (ctypes.c_int, ctypes.c_uint32),
        "rule_add_array": (ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(Comparison)),
    }.items():  # fmt: skip
        getattr(library, f"seccomp_{name}").argtypes = (context, *kinds)
    return library


def version(library: ctypes.CDLL) -> tuple[int, ...]:
    """Return the version of libseccomp."""
    return tuple(library.seccomp_version()[:3])


def make_filter(library: ctypes.CDLL, machine: str) -> bytes:
    """Return the filter of a machine: instructions of classic BPF."""
    context = library.seccomp_init(REFUSE | errno.EPERM)
    if machine != os.uname().machine:
        check(library.seccomp_arch_add(context, MACHINES[machine]))
        check(library.seccomp_arch_remove(context, 0))  # the machine that this runs on
    check(library.seccomp_attr_set(context, BAD_ARCHITECTURE, KILL))
    rules = {**{name: [{}] for name in ALLOWED.split()}, **CONDITIONS}
    for name, alternatives in rules.items():
        for alternative in alternatives:
            add_rule(library, context, machine, name, ALLOW, alternative)
    for name in NOT_THERE:
        add_rule(library, context, machine, name, REFUSE | errno.ENOSYS, {})
    file = os.memfd_create("filter")
    with open(file, "rb") as exported:
        check(library.seccomp_export_bpf(context, file))
        return os.pread(file, os.fstat(exported.fileno()).st_size, 0)


def add_rule(
    library: ctypes.CDLL, context: int, machine: str, name: str, action: int, wanted: dict[int, tuple[int, int]]
) -> None:
    """Add a rule, unless the machine does not have the call."""
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number == -1:
        sys.exit(f"this libseccomp does not know {name}")
    if library.seccomp_syscall_resolve_name_arch(MACHINES[machine], name.encode()) < 0:
        return
    tests = [Comparison(at, MASKED_EQUAL, mask, value) for at, (mask, value) in wanted.items()]
    array = (Comparison * max(len(tests), 1))(*tests)
    check(library.seccomp_rule_add_array(context, action, number, len(tests), array))


def check(code: int) -> None:
    """End with the error of a call of libseccomp."""
    if code:
        sys.exit(f"libseccomp: {os.strerror(-code)}")


def main() -> None:
    """Write the filters into the package."""
    library = load(*sys.argv[1:2])
    if version(library) < MINIMUM_VERSION:
        sys.exit(f"libseccomp {'.'.join(map(str, version(library)))}, wanted: 2.6 or newer (Debian 13: libseccomp2)")
    for machine in MACHINES:
        (FOLDER / f"seccomp_{machine}.bpf").write_bytes(make_filter(library, machine))


if __name__ == "__main__":
    main()
