"""A real run on a pseudo-terminal: what it draws, and what `covey watch` says of it before and after it is killed."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from covey_status.watched_run import DEAD, RUNNING, WatchedRun

COLUMNS = 72
SMALL = "--model.source scratch:arithmetic-tiny --max-steps 400 --prompts-per-step 2 --num-generations 2"
SMALL += " --max-sampling-rounds 1 --evaluation.prompts 4 --checkpoint-every-n-steps 0"


@pytest.mark.slow
def test_a_run_is_drawn_watched_and_found_dead(tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    command = [
        sys.executable,
        "-m",
        "covey",
        "train",
        "arithmetic-tiny",
        *SMALL.split(),
        "--out",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=env | {"TERM": "xterm-256color"})
    os.close(side)
    try:
        drawn = read_until(terminal, " 3/400 ", "left ")
        run = WatchedRun(tmp_path / "run")
        rows = run.look()
        assert run.state == RUNNING
        assert run.heartbeat is not None
        assert run.heartbeat.total == 400
        assert {row["step"] for row in rows} >= {1, 2, 3}
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    run.look()
    assert run.state == DEAD
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert re.search(r"step +reward", shown)
    assert re.search(r"[━─]{8,}  \d+/400  .*left ", shown)
    assert "compiling program 1" in shown
    assert "\x1b" not in shown
    assert max(map(cell_len, re.split(r"[\r\n]+", shown))) <= COLUMNS


def read_until(terminal: int, *words: str) -> str:
    """What the terminal shows until all `words` are in it."""
    found, deadline = "", time.monotonic() + 600
    while not all(word in found for word in words):
        assert time.monotonic() < deadline, found
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 65536).decode(errors="replace")
    return found
