"""`covey board` and `covey watch --web` say where the page is and what is wrong, and end quietly."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["board", "missing"], "there is no such folder"),
        (["board", ".", "--port", "70000"], "a whole number from 0 to 65535"),
        (["board", ".", "--port", "x"], "--port is 'x'"),
        (["watch", ".", "--web", "--once"], "--web stands beside --once"),
        (["watch", ".", "--web"], "this is no run folder"),
    ],
)
def test_mistakes_are_told(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("serving")
def test_a_port_in_use_is_told_and_the_next_one_taken_where_none_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from covey_report.board import app

    with app.listen() as first, app.listen() as second:
        port, other = first.getsockname()[1], second.getsockname()[1]
        assert {port, other} <= set(range(app.PORT, app.PORT + app.PORTS))
        assert first.getsockname()[0] == "127.0.0.1"
        assert main(["board", str(tmp_path), "--port", str(port)]) == 2
        assert f"port {port} is in use" in capsys.readouterr().err


def test_a_missing_package_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["board", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "a board needs the package uvicorn" in said
    assert "[serve]" in said


@pytest.mark.slow
@pytest.mark.usefixtures("serving")
def test_a_board_of_one_run_answers_and_ends_quietly(make_run: Any) -> None:
    command = [sys.executable, "-m", "covey", "watch", str(make_run(steps=2)), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={}) as process:
        assert process.stdout is not None
        (url,) = re.findall(r"http://\S+", process.stdout.readline())
        with urllib.request.urlopen(f"{url}runs") as answer:
            assert [run["name"] for run in json.load(answer)["runs"]] == ["run"]
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
        assert process.returncode == 0
