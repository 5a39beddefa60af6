"""`covey watch`: the files of a run folder alone say what the run does, whoever writes them."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from covey.errors import CoveyError
from covey.files import MAX_LINE
from covey.train.storage import take_lock
from covey_report.cli import watch as watching
from covey_report.cli.watch import watch
from covey_status.watched_run import DEAD, FAILED, FINISHED, RUNNING, STOPPED, NewLines, WatchedRun, read_heartbeat

NASTY = "\x1b]0;owned\x07[bold red]x[/]\u202e"
ROW = {"reward": 0.5, "reward_error": 0.1, "kl": 0.01, "step_time": 2.0, "tokens_per_second": 20.0}


def append(file: Path, *rows: Any) -> None:
    with file.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def beat(folder: Path, **more: Any) -> None:
    now = time.time()
    content = {"phase": "update", "since": now - 5, "now": now, "process": 1, "host": os.uname().nodename}
    content |= {"step": 0, "total": 20, "done": 0, "parts": 0, "compiling": 0, "seconds": 61.0, "memory": 2_000_000_000}
    draft = folder / ".heartbeat.json"
    draft.write_text(json.dumps(content | more))
    draft.replace(folder / "heartbeat.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with three steps, whose process has not said how it ended."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: x\nmethod: rl\nrewards: [first_letter]\ntraining:\n  show: [kl]\n")
    (run / "checkpoints" / "lock").touch()
    append(run / "metrics.jsonl", *({"step": step} | ROW for step in (1, 2, 3)))
    beat(run, step=3)
    return run


@contextmanager
def running(folder: Path) -> Iterator[None]:
    with take_lock(folder / "checkpoints"):
        yield


def shown(folder: Path, width: int = 80, **options: Any) -> tuple[int, str]:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, _environ={})
    return watch(folder, console=console, **options), file.getvalue()


def test_once_shows_the_steps_and_the_state(folder: Path) -> None:
    with running(folder):
        beat(folder, step=3, compiling=2)
        code, text = shown(folder, once=True)
    assert code == 0
    lines = text.splitlines()
    assert lines[0].startswith("step 1/20  reward 0.500 ±0.100")
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/20", "2/20", "3/20"]
    assert lines[-2].split("  ")[1:] == ["3/20", "1m01s", "left 34s", "20 tok/s", "2.0 GB"]
    assert lines[-1] == "update: compiling program 2 5s  reward ▁▁▁"


@pytest.mark.parametrize("width", [40, 120])
def test_once_fits_any_terminal(folder: Path, width: int) -> None:
    append(folder / "metrics.jsonl", {"step": 4, NASTY: 1.0, "reward": 1e300} | {f"m{i}": i for i in range(50)})
    append(folder / "samples.jsonl", *({"step": 1, "prompt": NASTY, "text": NASTY * 40, "reward": r} for r in (0, 1)))
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, _environ={})
    with running(folder):
        beat(folder, phase=NASTY * 3)
        assert watch(folder, once=True, console=console) == 0
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "\x1b]" not in text
    assert "best" in text


def test_a_run_that_grows_is_followed_to_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "INTERVAL", 0.02)
    found: list[tuple[int, str]] = []
    with running(folder):
        thread = threading.Thread(target=lambda: found.append(shown(folder)))
        thread.start()
        with (folder / "metrics.jsonl").open("a") as metrics:
            for step in range(4, 21):
                line = json.dumps({"step": step} | ROW) + "\n"
                metrics.write(line[:10])
                metrics.flush()
                time.sleep(0.01)  # a look in between finds half a line
                metrics.write(line[10:])
                metrics.flush()
                beat(folder, step=step)
        summary = {"before": {"reward": 0.5, "x": "y"}, "after": {"reward": 1.5}, "steps": 20, "seconds": 90.0}
        (folder / "summary.json").write_text(json.dumps(summary))
        beat(folder, step=20, ended="finished")
    thread.join(30)
    [(code, text)] = found
    assert code == 0
    assert re.findall(r"^step (\d+)/20", text, re.M) == [str(step) for step in range(1, 21)]
    assert "reward       0.500 → 1.500" in text
    assert "steps        20 in 1m30s" in text


@pytest.mark.parametrize(
    ("ended", "state", "words"),
    [
        ({}, DEAD, "this run seems to be dead: no process holds its lock"),
        ({"ended": "stopped", "reason": "SIGTERM"}, STOPPED, "this run has stopped: SIGTERM"),
        ({"ended": "failed", "reason": f"no memory {NASTY}"}, FAILED, "this run has failed: no memory \\x1b"),
        ({"ended": NASTY}, DEAD, "this run seems to be dead"),
    ],
)
def test_a_run_that_has_ended_too_early_is_told_with_the_way_on(
    folder: Path, ended: dict[str, str], state: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(folder, step=3, ahead="rollout", **ended)
    code, text = shown(folder)
    told = capsys.readouterr().out
    assert code == 75
    assert words in told
    assert f"go on with: covey train --resume {folder}" in told
    assert text.splitlines()[-1].startswith(state)
    assert "rollout" not in text
    assert "\x1b" not in told + text


def test_a_run_on_another_machine_is_dead_when_its_heartbeat_stops(folder: Path) -> None:
    run = WatchedRun(folder)
    beat(folder, host="elsewhere")
    run.look()
    assert run.state == RUNNING
    run._fresh_until = 0.0
    run.look()
    assert run.state == DEAD
    beat(folder, host="elsewhere", now=time.time() + 1)
    run.look()
    assert run.state == RUNNING
    beat(folder, host="elsewhere", now=time.time() - 3600)
    other = WatchedRun(folder)
    other.look()
    assert other.state == DEAD


def test_a_run_of_an_older_version_has_no_end_in_its_heartbeat(folder: Path) -> None:
    (folder / "heartbeat.json").unlink()
    (folder / "summary.json").write_text('{"after": {"reward": 1.0}}')
    run = WatchedRun(folder)
    run.look()
    assert run.state == FINISHED
    with running(folder):  # the look has taken no lock that a run needs
        run.look()
        assert run.state == RUNNING


def test_json_is_one_line_for_each_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(folder / "metrics.jsonl", {"step": 4, NASTY: 1e308, "reward": 0.25, "text": "x", "n": None})
    assert watch(folder, once=True, as_json=True) == 75
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.isascii()
    found = json.loads(out)
    assert (found["state"], found["step"], found["total"]) == ("dead", 4, 20)
    assert found["metrics"] == {"step": 4, "reward": 0.25}
    assert found["memory"] == 2_000_000_000


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"now": "x", "since": [], "step": -1, "total": 1e999, "phase": 3, "seconds": true}', "[" * 10**5],
)
def test_a_heartbeat_of_another_form_is_no_error(folder: Path, content: str) -> None:
    (folder / "heartbeat.json").write_text(content)
    (folder / "summary.json").write_text(content)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(f'{content}\n{{"step": 3}}\n{{"step": {"9" * 400}}}\n{{"step": 4, "reward": {"9" * 400}}}\n')
    code, text = shown(folder, once=True)
    assert code == 75
    assert "step 4" in text


def test_lines_are_read_once_and_a_cut_file_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    lines = NewLines(file)
    assert list(lines.read()) == []
    file.write_bytes(b"a\nb\nc")
    assert list(lines.read()) == [b"a\n", b"b\n"]
    file.write_bytes(b"a\nb\ncd\n" + b"x" * (MAX_LINE + 5) + b"\ne\n")
    assert [line[:3] for line in lines.read()] == [b"cd\n", b"xxx", b"xxx", b"e\n"]
    file.write_bytes(b"a\n")
    assert list(lines.read()) == [b"a\n"]
    file.write_bytes(b"0123456789\nlast\n")
    assert list(NewLines(file, tail=8).read()) == [b"89\n", b"last\n"]  # the first look at a large file


def test_the_heartbeat_of_a_run_is_read_back(tmp_path: Path) -> None:
    from covey.monitor.status import Status
    from covey_status.watchdog import Watchdog

    status = Status(step=3, total=9, phase="x", compiling=1, seconds=5.5, left=2.0, tokens_per_second=7.0, memory=8)
    with Watchdog(tmp_path, 0, every=0.01, status=lambda: status) as watchdog:
        watchdog.phase("update")
        while (found := read_heartbeat(tmp_path)) is None or found.phase != "update":
            time.sleep(0.01)
    assert not found.ended
    ended = read_heartbeat(tmp_path)
    assert ended is not None
    assert ended.ended == FINISHED
    assert (ended.step, ended.compiling, ended.memory) == (3, 1, 8)
    with pytest.raises(CoveyError), Watchdog(tmp_path, 0, status=lambda: status):
        raise CoveyError("the disk is full", fix="make room")
    failed = read_heartbeat(tmp_path)
    assert failed is not None
    assert (failed.ended, failed.reason) == (FAILED, "the disk is full")


COVEY = [sys.executable, "-m", "covey"]


@pytest.mark.slow
def test_on_a_real_terminal_it_draws_and_ends_with_the_run(folder: Path) -> None:
    """A pseudo-terminal: the live lines are drawn, the steps stay, and nothing but the view moves the cursor."""
    columns = 40
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with running(folder):
        append(folder / "samples.jsonl", {"step": 4, "prompt": NASTY, "text": NASTY, "reward": 1.0})
        process = subprocess.Popen(
            [*COVEY, "watch", str(folder)], stdin=side, stdout=side, stderr=side, env=env | {"TERM": "xterm-256color"}
        )
        os.close(side)
        first = read_until(main, "left ")
        append(folder / "metrics.jsonl", {"step": 5} | ROW)
        beat(folder, step=5)
        second = read_until(main, "5/20")
        beat(folder, step=5, ended="failed", reason="out of memory")
    rest = read_until(main, "--resume")
    assert process.wait(30) == 75
    os.close(main)
    assert "3/20" in first
    assert "5/20" in second
    assert "out of memory" in rest
    everything = first + second + rest
    assert "\x07" not in everything
    assert "\x1b]" not in everything
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", everything)
    assert "\x1b" not in plain
    assert all(
        len(line) <= columns for line in re.split(r"[\r\n]+", plain) if "resume" not in line and "lock" not in line
    )


def read_until(terminal: int, text: str) -> str:
    """What the terminal shows until `text` is in it."""
    found, deadline = "", time.monotonic() + 60
    while text not in found:
        assert time.monotonic() < deadline, found
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                found += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break  # the other side is closed
    return found


def test_ctrl_c_ends_the_watch_and_not_the_run(folder: Path) -> None:
    # Where the tests run in the background the signal is ignored, and a process would inherit that.
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            running(folder),
            subprocess.Popen([*COVEY, "watch", str(folder)], stdout=subprocess.PIPE, text=True) as process,
        ):
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGINT, kept)
    assert process.returncode == 130
    assert "the watch has ended, and the run goes on" in out
