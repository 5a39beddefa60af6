"""Child process of the Python tool's second engine: it executes the program that it reads from stdin in CPython as
WebAssembly, or compiles that once.

    python -P -s -S wasm_child.py LIBRARY compile SOURCE TARGET
    python -P -s -S wasm_child.py LIBRARY run MODULE TELL FUEL MEMORY_BYTES

LIBRARY is the folder that the package wasmtime lies in, TELL a file descriptor to which it writes the fuel that was
used and how the program ended: `exit CODE`, `fuel`, the name of a trap, or `error of the engine`. Of this system the
program has its standard output and errors alone: no files, sockets, processes or threads. Its clock and its random
numbers are made here, so that they are the same each time. Fuel is one unit for each instruction of WebAssembly, and
what a call of the host is estimated to be worth.
"""

import os
import random
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import wasmtime

WASI = "wasi_snapshot_preview1"
COMMAND = ("python", "-P", "-s", "-S", "-u", "-c")
"""Unbuffered, so that what was printed is in order, and is there when the fuel ends."""
WITH_NUL = "raise SyntaxError('source code string cannot contain null bytes')"
FIRST_TIME = 946_684_800_000_000_000
"""Time at which a program begins, the year 2000, in nanoseconds since 1970."""
TICK = 1_000_000
"""Nanoseconds that pass with each reading of the clock."""
CALL_FUEL = 200_000
"""Fuel that a call of a function below costs: about the instructions that execute in its time."""
NOT_SUPPORTED = 58
SUBSCRIPTION, EVENT = "<QB7xI4xQQH6x", "<QHB21x"
"""Layouts of what a program waits for (its mark, kind, clock, time, precision, flags), and of what is answered."""
ABSOLUTE = 1


class ExitError(Exception):
    """End of the program that it asked for itself; `code` is its exit code."""

    def __init__(self, code: int):
        self.code = code & 0xFF


class Host:
    """Functions of the host that depend on nothing outside the program.

    Args:
        store: what holds the fuel.
    """

    def __init__(self, store: "wasmtime.Store"):
        self._store, self._time, self._random = store, FIRST_TIME, random.Random(0)

    def read_clock(self, caller: Any, clock: int, precision: int, out: int) -> int:
        """Write the time, which passes by reading it and by sleeping."""
        self._charge()
        self._time += TICK
        caller["memory"].write(caller, struct.pack("<Q", self._time % (1 << 64)), out)
        return 0

    def draw(self, caller: Any, out: int, count: int) -> int:
        """Write `count` random bytes, which are the same in each program."""
        self._charge()
        caller["memory"].write(caller, self._random.randbytes(count), out)
        return 0

    def wait(self, caller: Any, subscriptions: int, events: int, count: int, out: int) -> int:
        """Let the time pass that a program wants to sleep; it cannot wait for anything else."""
        self._charge()
        memory, size = caller["memory"], struct.calcsize(SUBSCRIPTION)
        for start in range(subscriptions, subscriptions + count * size, size):
            mark, kind, _, time, _, flags = struct.unpack(SUBSCRIPTION, memory.read(caller, start, start + size))
            if kind == 0:
                self._time = max(self._time, time) if flags & ABSOLUTE else self._time + time
                memory.write(caller, struct.pack(EVENT, mark, 0, kind), events)
                memory.write(caller, struct.pack("<I", 1), out)
                return 0
        return NOT_SUPPORTED

    def exit(self, caller: Any, code: int) -> None:
        """End the program. The engine's own function refuses codes above 125, which a program may use."""
        raise ExitError(code)

    def _charge(self) -> None:
        self._store.set_fuel(max(self._store.get_fuel() - CALL_FUEL, 1))


def engine() -> "wasmtime.Engine":
    """Return the engine, with the settings that a module is compiled for."""
    import wasmtime

    config = wasmtime.Config()
    config.consume_fuel = True
    config.cranelift_nan_canonicalization = True  # else the bits of NaN depend on the processor
    return wasmtime.Engine(config)


def compile_module(source: str, target: str) -> None:
    """Write the machine code of a module to a new file."""
    import wasmtime

    code = wasmtime.Module.from_file(engine(), source).serialize()
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(code)


def execute(path: str, tell: int, fuel: int, memory: int) -> None:
    """Execute the program in stdin with a compiled module, and tell the fuel that it used and how it ended."""
    import wasmtime

    compiler = engine()
    try:
        module = wasmtime.Module.deserialize_file(compiler, path)
    except wasmtime.WasmtimeError:
        sys.exit("the compiled interpreter cannot be loaded")
    store = wasmtime.Store(compiler)
    store.set_fuel(fuel)
    store.set_limits(memory_size=memory)
    store.set_wasi(system(sys.stdin.buffer.read().decode(errors="replace")))
    try:
        linked(store, compiler).instantiate(store, module).exports(store)["_start"](store)
        ended = "exit 0"
    except ExitError as end:
        ended = f"exit {end.code}"
    except wasmtime.Trap as trap:
        ended = "fuel" if trap.trap_code == wasmtime.TrapCode.OUT_OF_FUEL else trap.trap_code.name
    except wasmtime.WasmtimeError:
        ended = "error of the engine"
    os.write(tell, f"{fuel - store.get_fuel()} {ended}".encode())


def system(program: str) -> "wasmtime.WasiConfig":
    """Configure the system that a program sees: its arguments, a variable that fixes hashes, and where to print."""
    import wasmtime

    wasi = wasmtime.WasiConfig()
    wasi.argv = [*COMMAND, WITH_NUL if "\0" in program else program]  # NUL would end it here
    wasi.env = [("PYTHONHASHSEED", "0")]
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    return wasi


def linked(store: "wasmtime.Store", compiler: "wasmtime.Engine") -> "wasmtime.Linker":
    """Link the functions of the host: those of WASI, with four replaced."""
    import wasmtime

    i32, i64 = wasmtime.ValType.i32(), wasmtime.ValType.i64()
    host = Host(store)
    replaced: dict[str, tuple[list[wasmtime.ValType], list[wasmtime.ValType], Callable[..., int | None]]] = {
        "clock_time_get": ([i32, i64, i32], [i32], host.read_clock),
        "random_get": ([i32, i32], [i32], host.draw),
        "poll_oneoff": ([i32, i32, i32, i32], [i32], host.wait),
        "proc_exit": ([i32], [], host.exit),
    }
    linker = wasmtime.Linker(compiler)
    linker.allow_shadowing = True
    linker.define_wasi()
    for name, (kinds, results, function) in replaced.items():
        linker.define_func(WASI, name, wasmtime.FuncType(kinds, results), function, access_caller=True)
    return linker


if __name__ == "__main__":
    library, task, *words = sys.argv[1:]
    sys.path.append(library)
    if task == "compile":
        compile_module(words[0], words[1])
    else:
        execute(words[0], int(words[1]), int(words[2]), int(words[3]))
