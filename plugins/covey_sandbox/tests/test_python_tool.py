"""The Python tool against programs that want out, or never end."""

import asyncio
import ctypes
import errno
import logging
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

import psutil
import pytest

from covey.config.schema.envs import PythonEngine
from covey.errors import EpisodeError, RecipeError
from covey_envs.registry import resolve_tool
from covey_envs.runner import EnvironmentRunner
from covey_envs.tools import Tool, ToolEnvironment
from covey_sandbox.python_tool import sandbox, tool, wasm
from covey_sandbox.python_tool.sandbox import POLL_SECONDS, PROTECTIONS, Limits, excess, run_program
from covey_sandbox.python_tool.tool import ENGINES, ProgramError, python, python_with_limits

T = TypeVar("T")

# What a program does against this system's protections is tried by `test_python_sandbox.py`.
HOSTILE = """
import os, subprocess, tempfile
def tries(name, act):
    try:
        act()
        print(name, 'DONE')
    except BaseException as error:
        print(name, type(error).__name__)
library = os.path.dirname(os.__file__)
tries('packages', lambda: [open(f'{library}/site-packages/{name}') for name in PACKAGES or ['x']])
tries('interpreter', lambda: open('BINARY', 'rb'))
tries('outside', lambda: open('OUTSIDE', 'w'))
tries('delete', lambda: os.remove('KEPT'))
tries('system', lambda: subprocess.run(['id']))
tries('memory', lambda: bytearray(10**10))
tries('large', lambda: open('large', 'wb').write(b'0' * (1 << 22)))
open('x', 'w').write('mine')
for name in MODULES:
    __import__(name)
print(sorted(os.environ), os.listdir('.'), open('x').read())
"""
CALL = '<tool_call>{"name": "python", "arguments": {"program": "1"}}</tool_call>'
WITH_LIBRARIES = [m for m in ("bz2", "curses", "lzma", "readline", "sqlite3", "ssl", "zlib") if find_spec(m)]
NESTED = """
import os, time
for _ in range(%d):
    os.mkdir('x')
    os.chdir('x')
"""
LONG_NAMES = """
import os
for _ in range(17):
    os.mkdir('x' * 250)
    os.chdir('x' * 250)
i = 0
while True:
    i += 1; open(str(i), 'w')
"""


@pytest.fixture(scope="module", autouse=True)
def protections() -> None:
    if run_program("").protections != PROTECTIONS:
        pytest.skip("this kernel has no Landlock or no seccomp")


def test_a_program_stays_in_its_folder_and_alone(tmp_path: Path) -> None:
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    kept.write_text("here")
    as_it_was, before = kept.stat(), os.environ["PATH"]
    words = {"OUTSIDE": outside, "KEPT": kept, "BINARY": Path(sys.executable).resolve(), "MODULES": WITH_LIBRARIES}
    words["PACKAGES"] = [path.name for path in Path(sysconfig.get_path("stdlib"), "site-packages").glob("*.*")]
    outcome = run_program(re.sub("|".join(words), lambda word: str(words[word[0]]), HOSTILE))
    assert outcome.failure == "", outcome.output
    *tries, last = outcome.output.splitlines()
    assert len(tries) == 7
    assert [line for line in tries if line.endswith("DONE")] == []
    assert "memory MemoryError" in tries
    assert re.fullmatch(
        r"\['LC_ALL', 'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED'\] \[('x', 'large'|'large', 'x')\] mine", last
    )
    assert not outside.exists()
    assert kept.stat() == as_it_was
    assert kept.read_text() == "here"
    assert os.environ["PATH"] == before


@pytest.mark.parametrize(
    ("program", "limits", "failure"),
    [
        ("print('before')\nwhile True: pass", Limits(seconds=60, cpu_seconds=1), "more than 1 s of computing time"),
        ("import os, time\nos.close(1); os.close(2); time.sleep(60)", Limits(seconds=0.5), "longer than 0.5 s"),
        ("while True: print('x' * 1000)", Limits(), "printed more than 65,536 bytes"),  # it would be 1 GB in a second
        (
            "i = 0\nwhile True:\n    i += 1; open(str(i), 'w')",
            Limits(folder=1 << 22),
            "wrote more than 4,194,304 bytes",
        ),
        (f"{NESTED % 3000}\ntime.sleep(60)", Limits(), "made folders more than 100 deep"),
        (f"{NESTED % 3000}\nos._exit(3)", Limits(), "the program"),  # it may end before the depth is seen
        (LONG_NAMES, Limits(folder=1 << 20), "wrote more than 1,048,576 bytes"),
        ("import signal; signal.raise_signal(signal.SIGKILL)", Limits(), "the program was killed"),
        ("import sys; print('bye'); sys.exit(3)", Limits(), "exit code 3"),
    ],
)
def test_a_program_that_does_not_end_is_ended(
    program: str, limits: Limits, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Limits().folder == 1 << 25
    looks, began = [], time.monotonic()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "excess", lambda *given: looks.append(given) or excess(*given))
    outcome = run_program(program, limits)
    assert len(looks) <= (time.monotonic() - began) / POLL_SECONDS + 1
    assert [*tmp_path.iterdir()] == []
    assert failure in outcome.failure
    assert len(outcome.output) <= limits.output
    assert ("before" in outcome.output) == ("before" in program)


@pytest.mark.slow
def test_no_program_outlives_a_killed_run() -> None:
    code = """
from covey_sandbox.python_tool.sandbox import Limits, run_program
run_program("import time; time.sleep(600)", Limits(600))
"""
    run = subprocess.Popen([sys.executable, "-c", code])
    try:
        locked = until(lambda: [p for p in psutil.Process(run.pid).children() if "Seccomp:\t2" in status(p.pid)])
        assert set(re.findall(r"Cap(?:Inh|Prm|Eff|Amb):\t(\w+)", status(locked[0].pid))) == {"0" * 16}
        assert os.geteuid() or f"CapBnd:\t{'0' * 16}" in status(locked[0].pid)
    finally:
        run.kill()
        run.wait()
    assert until(lambda: "State:\tZ" in (left := status(locked[0].pid)) or not left)


def status(process: int) -> str:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process}/status").read_text()
    return ""


def until(found: Callable[[], T]) -> T:
    end = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return result


def test_the_model_gets_what_its_program_printed_or_why_it_failed() -> None:
    assert python("import math\nprint(math.comb(20, 10), {'a', 'b'} == {'b', 'a'})") == "184756 True"
    with pytest.raises(ProgramError, match=r"exit code 1(.|\n)*line 2(.|\n)*ZeroDivisionError: division by zero\Z"):
        python("a = 0; print('so far ' * 100)\nprint(1 / a)")


def test_a_run_begins_only_where_all_protections_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{{ messages[0].content }}"
    with caplog.at_level(logging.INFO, "covey"):
        (runner := EnvironmentRunner(tools=["python"])).prepare(template)
    assert runner.tools is not None
    assert "protections: limits, capabilities, landlock, seccomp" in caplog.text
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(EpisodeError, match=r"cannot execute programs: .*No such file"):
        asyncio.run(ToolEnvironment({"prompt": []}, runner.tools).step(CALL))
    monkeypatch.undo()
    monkeypatch.setattr(sandbox, "PROTECTIONS", ("moat",))
    with pytest.raises(EpisodeError, match="this system lacks protections: moat"):
        python("1")
    monkeypatch.setattr(tool, "PROTECTIONS", (*PROTECTIONS, "moat"))
    monkeypatch.setattr(wasm, "PACKAGES", ("no_such_package",))
    with pytest.raises(RecipeError, match=r"the Python tool lacks .*: moat(.|\n)*python_with_limits"):
        EnvironmentRunner(tools=["python"]).prepare(template)


def test_a_folder_that_is_swapped_with_a_link_to_itself_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").symlink_to("x")
    really_open, exchange = os.open, 2

    def open_swapped(path: str, *words: int, **folder: int | None) -> int:
        if path == "x" and (tmp_path / "x").is_dir():
            paths = (bytes(tmp_path / name) for name in ("x", "y"))
            assert not ctypes.CDLL(None).renameat2(-100, next(paths), -100, next(paths), exchange)
            assert (tmp_path / "y").is_dir()
        return really_open(path, *words, **folder)

    monkeypatch.setattr(os, "open", open_swapped)
    assert excess(str(tmp_path), 1 << 20) == ""
    assert (tmp_path / "x").is_symlink()


def test_an_error_while_a_program_is_followed_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    children, start = [], sandbox._start

    def fail(*_: object) -> str:
        raise OSError(errno.EIO, "no such disk")

    monkeypatch.setattr(sandbox, "_start", lambda *words: children.append(start(*words)) or children[0])
    monkeypatch.setattr(sandbox, "excess", fail)
    with pytest.raises(EpisodeError, match=r"cannot execute programs: .*no such disk"):
        tool.ENGINES["child"]("import time; time.sleep(5)")
    assert children[0].returncode == -signal.SIGKILL


# --- where it is named


@pytest.mark.parametrize("lacking", [(), ("landlock",), ("landlock", "no packages")])
def test_doctor_says_what_holds_for_the_programs_of_a_model(
    monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...]
) -> None:
    held = tuple(name for name in tool.PROTECTIONS if name not in lacking)
    monkeypatch.setattr(tool, "protections", lambda: held)
    monkeypatch.setattr(wasm, "missing_packages", lambda: ["wasmtime"] if "no packages" in lacking else [])
    ((_, result, fix),) = tool.findings()
    engine = "wasm" if lacking else "child"
    if "no packages" in lacking:
        assert "lacks protections on this system: landlock" in result
        assert "wasm" in fix
    else:
        assert result.startswith(f"the Python tool's engine {engine}; protections of a process: {', '.join(held)}")
        assert result.endswith("; without landlock" if lacking else "seccomp")


@pytest.mark.parametrize("name", ["python_with_limits", "covey.envs.python_tool:python_with_limits"])
def test_a_recipe_names_the_tools_and_an_older_one_too(name: str) -> None:
    assert resolve_tool(name) is python_with_limits
    assert not Tool.of(python_with_limits).independent
    with pytest.raises(RecipeError, match="did you mean 'python_with_limits'"):
        resolve_tool("python_with_limit")


@pytest.mark.parametrize("engine", ["auto", "child"])
def test_each_engine_is_independent(engine: Any) -> None:
    assert Tool.of(resolve_tool("python", engine)).independent


def test_each_engine_that_can_be_set_is_there() -> None:
    assert set(get_args(PythonEngine)) == {*ENGINES}
