"""What a program of the Python tool cannot reach, on each kernel: the table of docs/python-tool.md, by cells.

A kernel of an older Landlock is this one whose later rights a child does not use.
"""

import ctypes
import errno
import os
import platform
import re
import runpy
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey_sandbox.python_tool import native_child, sandbox
from covey_sandbox.python_tool.sandbox import Outcome, run_program

ROOT = Path(__file__).parents[3]
FILTERS = Path(native_child.__file__).parent
COLUMNS = ("none", "1", "2", "3", "4", "5", "6")

# What an act raises is its errno. Those of no effect anywhere: calls that reach the kernel find their arguments wrong.
ATTACKS = r"""
import ctypes, errno, os, resource, signal, socket
LIBC = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    if getattr(LIBC, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) == -1:
        raise OSError(ctypes.get_errno(), name)
def tries(promise, name, act):
    try:
        act()
        print(promise, name, 'DONE', sep='|')
    except OSError as error:
        print(promise, name, errno.errorcode[error.errno], sep='|')
parent, kept, new = os.getppid(), b'KEPT', ctypes.create_string_buffer(64)
open('x', 'w').close()
own = os.open('x', os.O_RDWR)
empty = f'{os.path.dirname(os.__file__)}/email/mime/__init__.py'
number = ctypes.byref(ctypes.c_int(1))
for promise, acts in {
    'reads no other file': {
        'file': lambda: open(kept),
        'folder': lambda: os.listdir('/root'),
        'process': lambda: open(f'/proc/{parent}/environ'),
        'watch': lambda: call('inotify_init1', 0),
        'attribute': lambda: os.getxattr(kept, 'user.kept'),
    },
    'writes, moves and removes no other file': {
        'write': lambda: open(kept, 'w'),
        'append': lambda: open(kept, 'a'),
        'make': lambda: os.mkdir('../x'),
        'remove': lambda: os.remove(kept),
        'move': lambda: os.rename(kept, 'moved'),
        'cover': lambda: os.rename('x', kept),
        'link': lambda: os.link(kept, 'linked'),
    },
    'truncates no other file': {
        'truncate': lambda: os.truncate(kept, 0),
        'open': lambda: os.open(kept, os.O_RDONLY | os.O_TRUNC),
        'library': lambda: os.open(empty, os.O_RDONLY | os.O_TRUNC),
        'odd mode': lambda: os.open(empty, 3 | os.O_TRUNC),
    },
    'changes no mode, owner, time or attribute': {
        'mode': lambda: os.chmod(kept, 0o777),
        'own mode': lambda: os.chmod('x', 0o4777),
        'owner': lambda: os.chown(kept, os.getuid(), os.getgid()),
        'times': lambda: os.utime(kept, (1, 1)),
        'attribute': lambda: os.setxattr(kept, 'user.x', b'x'),
        'unattribute': lambda: os.removexattr(kept, 'user.kept'),
        'flags': lambda: call('ioctl', own, 0x40086602, number),
        'fifo': lambda: os.mkfifo('fifo'),
        'device': lambda: os.mknod('null', 0o20600, os.makedev(1, 3)),
    },
    'sends no signal': {
        'kill': lambda: os.kill(parent, 0),
        'group': lambda: os.killpg(os.getpgid(parent), 0),
        'group of its own': lambda: os.kill(0, 0),
        'thread': lambda: call('syscall', TGKILL, parent, parent, 0),
        'descriptor': lambda: call('syscall', 424, 0, 0, None, 0),
        'owner': lambda: call('fcntl', own, 8, parent),
        'extended owner': lambda: call('fcntl', own, 15, (ctypes.c_int * 2)(1, parent)),
        'which': lambda: call('fcntl', own, 10, 9),
        'flag': lambda: call('fcntl', own, 4, os.O_ASYNC | os.O_RDWR),
        'lease': lambda: call('fcntl', own, 1024, 0),
        'ioctl flag': lambda: call('ioctl', own, 0x5452, number),
        'ioctl owner': lambda: call('ioctl', own, 0x8901, number),
        'ioctl group': lambda: call('ioctl', own, 0x8902, number),
    },
    'uses no shared memory or queue': {
        'get memory': lambda: call('shmget', 0, 4096, 0o1600),
        'memory': lambda: call('shmat', SHARED, None, 0),
        'remove memory': lambda: call('shmctl', SHARED, 0, None),
        'detach memory': lambda: call('shmdt', 1),
        'get semaphore': lambda: call('semget', 0, 1, 0o1600),
        'semaphore': lambda: call('semop', SEMAPHORE, new, 1),
        'remove semaphore': lambda: call('semctl', SEMAPHORE, 0, 0, None),
        'get queue': lambda: call('msgget', 0, 0o1600),
        'send': lambda: call('msgsnd', QUEUE, number, 0, 0o4000),
        'receive': lambda: call('msgrcv', QUEUE, new, 0, 0, 0o4000),
        'remove queue': lambda: call('msgctl', QUEUE, 0, None),
        'named queue': lambda: call('mq_open', b'/none', 0),
        'memory file': lambda: os.memfd_create('x'),
    },
    'opens no socket': {
        'tcp': lambda: socket.socket(socket.AF_INET),
        'udp': lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        'local': lambda: socket.socket(socket.AF_UNIX),
        'pair': lambda: socket.socketpair(),
    },
    'starts and traces no process': {
        'fork': lambda: os.fork() or os._exit(0),
        'program': lambda: os.execv('/bin/sh', ['sh', '-c', 'exit']),
        'trace': lambda: call('ptrace', 16, parent, None, None),
        'session': lambda: call('setsid'),
        'cores': lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent)),
        'scheduler': lambda: os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0)),
        'priority': lambda: os.setpriority(os.PRIO_PROCESS, parent, 10),
        'limit': lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
        'own limit': lambda: call('setrlimit', 4, (ctypes.c_ulong * 2)(0, 0)),
    },
    'keeps its user and its end': {
        'group': lambda: os.setegid(os.getegid()),
        'user': lambda: os.seteuid(os.geteuid()),
        'all groups': lambda: os.setresgid(-1, -1, -1),
        'groups': lambda: os.setgroups([]),
        'survive': lambda: call('prctl', 1, 0),
        'keep': lambda: call('prctl', 8, 1),
        'capabilities': lambda: call('capset', None, None),
    },
    "reaches no administrator's call": {
        'reboot': lambda: call('reboot', 0x1234),
        'swapoff': lambda: call('swapoff', b'/no/such'),
        'swapon': lambda: call('swapon', b'/no/such', 0),
        'accounting': lambda: call('acct', b'/no/such'),
        'mount': lambda: call('mount', b'/no', b'/no/such', b'no', 0, None),
        'unmount': lambda: call('umount2', b'/no/such', 0),
        'name': lambda: call('sethostname', None, 1000),
        'clock': lambda: call('clock_settime', 99, new),
        'log': lambda: call('klogctl', 10, None, 0),
        'namespace': lambda: call('unshare', 0),
        'personality': lambda: call('personality', 0xFFFFFFFF),
        'io_uring': lambda: call('syscall', 425, 0, None),
    },
}.items():
    for name, act in acts.items():
        tries(promise, name, act)
"""
IPC = {"SHARED": "shmget", "SEMAPHORE": "semget", "QUEUE": "msgget"}
LAWFUL = """
import array, fcntl, os, resource, select, shutil, signal, sqlite3, tempfile, threading, time
with open('x', 'w') as file:
    file.write('first'); file.truncate(3); file.flush(); os.fsync(file.fileno())
open('x', 'w').write('second'); os.rename('x', 'y'); shutil.copyfile('y', 'z'); os.symlink('z', 'l'); os.link('y', 'h')
thread = threading.Thread(target=lambda: open('t', 'w').close()); thread.start(); thread.join()
heard = []; signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)
reading, writing = os.pipe(); fcntl.fcntl(reading, fcntl.F_SETFL, os.O_NONBLOCK); os.write(writing, b'x')
os.set_blocking(reading, True); print(select.select([reading], [], [], 1)[0] == [reading], len(heard), os.isatty(1))
base = sqlite3.connect('base'); base.execute('create table a (b)'); base.commit()
with tempfile.TemporaryDirectory(dir='.') as folder:
    open(f'{folder}/q', 'w').close()
print(resource.getrlimit(resource.RLIMIT_CORE), os.sched_getaffinity(0) != set(), time.sleep(0.01), os.umask(0o77) >= 0)
print(sorted(os.listdir('.')), open('l').read(), os.get_terminal_size.__name__, os.stat('/').st_mode > 0)
"""


def kernel_abi() -> int:
    """Return the version of Landlock's interface, 0 for none."""
    return max(ctypes.CDLL(None).syscall(native_child.CREATE_RULESET, None, 0, 1), 0) if sys.platform == "linux" else 0


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield promise, column and content of the cells of the document's table, whose last column is of all versions."""
    text = (ROOT / "docs" / "python-tool.md").read_text("utf-8")
    for promise, without, with_it in re.findall(
        r"^\| a program ([^|]*?) \| ([^|]*?) \| ([^|]*?) \|$", text, re.MULTILINE
    ):
        yield promise, COLUMNS[0], without
        yield from ((promise, column, with_it) for column in COLUMNS[1:])


CELLS = tuple(cells())


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], dict[str, dict[str, str]]]]:
    """Attack once for each version of Landlock: version → promise → attack → errno or DONE."""
    if sandbox.PROTECTIONS[1:] != native_child_protections():
        pytest.skip("this kernel has no Landlock or no seccomp: no test reached the cell")
    libc, kept = ctypes.CDLL(None), tmp_path_factory.mktemp("kept") / "kept"
    kept.write_text("here")
    before = kept.stat()
    numbers = {"SHARED": libc.shmget(0, 4096, 0o1600), "SEMAPHORE": libc.semget(0, 1, 0o1600)}
    numbers |= {"QUEUE": libc.msgget(0, 0o1600)}
    words = {**numbers, "KEPT": kept, "TGKILL": {"x86_64": 234, "aarch64": 131}[platform.machine()]}
    program, outcomes = re.sub("|".join(words), lambda word: str(words[word[0]]), ATTACKS), {}

    def run(abi: int) -> dict[str, dict[str, str]]:
        if abi not in outcomes:
            outcomes[abi] = by_promise(run_with(abi, program))
        return outcomes[abi]

    yield run
    after = kept.stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_ctime_ns, after.st_size) == (
        before.st_mode, before.st_mtime_ns, before.st_ctime_ns, before.st_size,
    )  # fmt: skip
    assert not libc.shmctl(numbers["SHARED"], 0, None)  # they are still there
    assert not libc.semctl(numbers["SEMAPHORE"], 0, 0, None)
    assert not libc.msgctl(numbers["QUEUE"], 0, None)


def native_child_protections() -> tuple[str, ...]:
    return run_program("").protections[1:]


def run_with(abi: int, program: str) -> Outcome:
    """Execute a program with Landlock's interface of this version at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "LANDLOCK_ABI", abi)
        return run_program(program)


def by_promise(outcome: Outcome) -> dict[str, dict[str, str]]:
    """Return promise → attack → errno or DONE."""
    assert outcome.failure == "", outcome
    results: dict[str, dict[str, str]] = {}
    for line in outcome.output.splitlines():
        promise, name, result = line.split("|")
        results.setdefault(promise, {})[name] = result
    return results


@pytest.mark.parametrize(("promise", "column", "cell"), CELLS)
def test_a_cell_of_the_table_is_true(
    promise: str, column: str, cell: str, attack: Callable[[int], dict[str, dict[str, str]]]
) -> None:
    if column == "none":
        assert cell == "no: WebAssembly"
        refusal = run_with(0, "print('it ran')")
        assert (refusal.output, refusal.is_fault) == ("", True)
        assert refusal.failure == "this system lacks protections: landlock"
        return
    assert cell == "holds"
    if kernel_abi() < int(column):
        pytest.skip("this kernel's Landlock is older: no test reached the cell")
    results = attack(int(column))[promise]
    files = {"reads no other file", "writes, moves and removes no other file", "truncates no other file"}
    refused = {"EPERM", "EACCES", "EXDEV"} if promise in files else {"EPERM"}
    assert {name: result for name, result in results.items() if result not in refused} == {}


def test_the_table_has_every_promise(attack: Callable[[int], dict[str, dict[str, str]]]) -> None:
    assert list(attack(sandbox.LANDLOCK_ABI)) == list(dict.fromkeys(promise for promise, _, _ in CELLS))
    assert len(CELLS) == 10 * len(COLUMNS)


@pytest.mark.parametrize("abi", [1, 6])
def test_programs_keep_what_they_need(abi: int, attack: Callable[[int], dict[str, dict[str, str]]]) -> None:
    outcome = run_with(abi, LAWFUL)
    assert outcome.failure == "", outcome
    first, second, third = outcome.output.splitlines()
    assert (first, second) == ("True 2 False", "(0, 0) True None True")
    assert third == "['base', 'h', 'l', 't', 'y', 'z'] second get_terminal_size True"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is of x86-64")
def test_a_call_of_x32_ends_the_program(attack: Callable[[int], dict[str, dict[str, str]]]) -> None:
    outcome = run_program("import ctypes; print('before'); ctypes.CDLL(None).syscall(0x40000000 | 39); print('after')")
    assert (outcome.output, outcome.failure) == ("before\n", "the program ended with exit code -31")


REFUSED = {
    "x86_64": (
        41, 42, 43, 44, 46, 49, 50, 53,  # socket, connect, accept, sendto, sendmsg, bind, listen, socketpair
        56, 57, 58, 59, 322,  # clone (a process), fork, vfork, execve, execveat
        62, 234, 200, 129, 297, 424, 434, 438,  # kill and tgkill of others, tkill, rt_sigqueueinfo, …, pidfd_*
        101, 310, 311, 109, 112, 141, 302,  # ptrace, process_vm_*, setpgid, setsid, setpriority, prlimit64
        155, 161, 165, 166, 272, 308,  # pivot_root, chroot, mount, umount2, unshare, setns
        29, 30, 31, 67, 64, 65, 66, 220, 68, 69, 70, 71, 240,  # shm*, sem*, msg*, mq_open
        135, 248, 249, 250, 303, 304, 300, 319,  # personality, keys, handles, fanotify_init, memfd_create
        298, 321, 323, 425, 426, 427,  # perf_event_open, bpf, userfaultfd, io_uring_*
        90, 91, 268, 452, 92, 93, 94, 260,  # chmod, fchmod, fchmodat, fchmodat2, chown, fchown, lchown, fchownat
        132, 235, 261, 280, 469, 76, 133, 259,  # utime, utimes, futimesat, utimensat, file_setattr, truncate, mknod*
        188, 189, 190, 463, 197, 198, 199, 466,  # setxattr, lsetxattr, fsetxattr, setxattrat, removexattr, …
        203, 144, 142, 314, 251, 160, 256, 279,  # sched_set*, ioprio_set, setrlimit, migrate_pages, move_pages
        105, 106, 113, 114, 116, 117, 119, 122, 123, 126,  # set*uid, set*gid, setgroups, setfs*, capset
        163, 164, 167, 168, 169, 170, 172, 173, 175, 313, 246,  # acct, settimeofday, swap*, reboot, …, kexec_load
    ),
    "aarch64": (
        198, 203, 202, 206, 211, 200, 201, 199, 220, 221, 281, 129, 131, 130, 138, 240, 424, 434, 438, 117, 270, 271,
        154, 157, 140, 261, 41, 51, 40, 39, 97, 268, 194, 195, 196, 197, 190, 191, 192, 193, 186, 187, 188, 189, 180,
        92, 217, 218, 219, 264, 265, 262, 279, 241, 280, 282, 425, 426, 427, 52, 53, 452, 55, 54, 88, 469, 45, 33,
        5, 6, 7, 463, 14, 15, 16, 466, 122, 119, 118, 274, 30, 164, 238, 239, 143, 144, 145, 146, 147, 149, 151, 152,
        159, 91, 89, 170, 224, 225, 142, 161, 105, 273, 104,
    ),
}  # fmt: skip
"""Numbers of calls that no program may use, with first arguments that are not its own."""
NAMED = {"x86_64": (56, 234, 435, 437, 157), "aarch64": (220, 131, 435, 437, 167)}
"""Numbers of clone, tgkill, clone3, openat2 and prctl."""
ALLOW, REFUSE, MISSING, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000


def verdict(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Return the verdict of a filter: an interpreter of classic BPF."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    at, loaded = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            loaded = struct.unpack_from("<I", data, value)[0]
        elif code == 0x54:
            loaded &= value
        else:
            at += yes if {0x15: loaded == value, 0x35: loaded >= value, 0x25: loaded > value}[code] else no


@pytest.mark.parametrize("machine", sorted(ARCHITECTURES))
def test_a_filter_refuses_all_but_the_calls_that_it_names(machine: str) -> None:
    program, architecture = (FILTERS / f"seccomp_{machine}.bpf").read_bytes(), ARCHITECTURES[machine]
    assert {number: verdict(program, architecture, number, 1, 1, 1) for number in REFUSED[machine]} == dict.fromkeys(
        REFUSED[machine], REFUSE
    )
    assert {verdict(program, architecture, number) for number in range(470, 2000)} == {REFUSE}  # of later kernels
    clone, tgkill, clone3, openat2, prctl = NAMED[machine]
    flags = (0x11, 0x3D0F00, 0x3F0F00, 0x10010F00)  # a fork, a thread, and one in another name space of files, of users
    assert [verdict(program, architecture, clone, one) for one in flags] == [REFUSE, ALLOW, REFUSE, REFUSE]
    assert verdict(program, architecture, tgkill, native_child.PROCESS) == ALLOW
    assert {verdict(program, architecture, number) for number in (clone3, openat2)} == {MISSING}
    options = {1: REFUSE, 8: REFUSE, 15: ALLOW, 24: REFUSE}
    assert {option: verdict(program, architecture, prctl, option) for option in options} == options
    assert {verdict(program, 1, number) for number in range(500)} == {KILL}
    if machine == "x86_64":
        assert {verdict(program, architecture, X32 | number) for number in range(600)} == {KILL}


@pytest.mark.slow
@pytest.mark.parametrize("machine", sorted(ARCHITECTURES))
def test_the_filters_are_those_that_the_script_makes(machine: str) -> None:
    script = runpy.run_path(str(ROOT / "tools" / "seccomp_filters.py"))
    shipped, architecture = (FILTERS / f"seccomp_{machine}.bpf").read_bytes(), ARCHITECTURES[machine]
    assert script["PROCESS"] == native_child.PROCESS
    assert shipped.count(struct.pack("<I", native_child.PROCESS)) == sum(
        struct.unpack_from("<I", shipped, at + 4)[0] == native_child.PROCESS for at in range(0, len(shipped), 8)
    )
    try:
        library = script["load"]()
    except OSError:
        pytest.skip("needs libseccomp")
    if (made := script["make_filter"](library, machine)) == shipped:
        return  # another version of the library may order the instructions otherwise
    rules = [rule for rules in script["CONDITIONS"].values() for rule in rules]
    values = {value for rule in rules for _, value in rule.values()}
    cases = [(0, 0, 0), *((v, v, v) for v in sorted(values)), (0, 4, 0o20000), (0, 0o1000, 0o1001), (0, 0o1003, 0o1000)]
    for number in range(600):
        for case in cases:
            assert verdict(made, architecture, number, *case) == verdict(shipped, architecture, number, *case), number


def test_a_library_that_only_root_can_read_is_a_missing_protection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[int], dict[str, dict[str, str]]]
) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    (library := tmp_path / "library").mkdir(mode=0o700)
    (library / "os.py").touch()
    os.chown(library, 65534, 65534)
    child = f"import os, runpy\nos.__file__ = '{library}/os.py'\nrunpy.run_path('{sandbox.CHILD}', run_name='__main__')"
    (tmp_path / "child.py").write_text(child)
    monkeypatch.setattr(sandbox, "CHILD", tmp_path / "child.py")
    outcome = run_program("print('it ran')")
    assert (outcome.output, outcome.failure) == ("", "this system lacks protections: capabilities")
