"""Links, pipes and devices in a run folder that others have made. Nothing that they lead to is read, written or
removed, and the error names the link and the fix.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.cli.commands import COMMANDS
from covey.cli.main import main
from covey.errors import ResumeError
from covey.files import open_below, replace_file
from covey.monitor.run_files import SUMMARY
from covey.monitor.writer import MetricsWriter, write_answers, write_bad_batch
from covey.run.folder import model_folder, read_summary
from covey.train.checkpoint import Checkpointer
from covey.train.storage import CheckpointStore, take_lock

HEARTBEAT, STACKS = "heartbeat.json", "stacks.txt"
SECRET = '{"step": 1}\n{"step": 9, "mine": "keep"}\n'
PID = os.getpid()


def watch(run: Path, once: bool) -> int:
    """Watch a run, where the package of the command is there; likewise below."""
    return int(pytest.importorskip("covey_report.cli.watch").watch(run, once))


def is_locked(folder: Path) -> bool:
    return bool(pytest.importorskip("covey_status.watched_run").is_locked(folder))


def write_report(out: Path, runs: list[Path]) -> int:
    return int(pytest.importorskip("covey_report.page").write_report(out, runs))


def watchdog(run: Path, limit: float) -> Any:
    return pytest.importorskip("covey_status.watchdog").Watchdog(run, limit)


def track(run: Path) -> None:
    pytest.importorskip("covey_trackers.trackers").Tracked(run, {}).identity()


def write_tokens(run: Path) -> None:
    pytest.importorskip("covey_report.run_files")
    MetricsWriter(run, resume_at=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a checkpoint as far as commands look before they import JAX."""
    run = tmp_path / "run"
    (run / "checkpoints" / "00000001").mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: x\nmethod: rl\nrewards: [first_letter]\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of the user outside the run folder."""
    (tmp_path / "mine").write_text(SECRET)
    return tmp_path / "mine"


WRITERS: list[tuple[str, Callable[[Path], object]]] = [
    ("checkpoints/lock", lambda run: take_lock(run / "checkpoints").close()),
    ("metrics.jsonl", lambda run: MetricsWriter(run, resume_at=1)),
    ("samples.jsonl", lambda run: MetricsWriter(run, resume_at=1)),
    ("tokens.jsonl", write_tokens),
    ("after.jsonl", lambda run: write_answers(run, "after", [])),
    ("bad/00000007.jsonl", lambda run: write_bad_batch(run, 7, [], {"x": np.zeros(2)})),
    ("bad/00000007.npz", lambda run: write_bad_batch(run, 7, [], {"x": np.zeros(2)})),
    ("tracking-id", track),
    ("model/tokenizer.json", model_folder),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_no_file_is_written_through_a_link(
    folder: Path, mine: Path, name: str, write: Callable[[Path], object]
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    with pytest.raises(
        ResumeError, match=r"a link is in the way\n.*\n  fix: put what it leads to in its place"
    ) as error:
        write(folder)
    assert error.value.where == str(folder / name)
    assert mine.read_text() == SECRET


def test_no_folder_is_written_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "bad").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResumeError, match="bad: a link is in the way"):
        write_bad_batch(folder, 7, [], {})
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("draft", [".report.html", f".report.html.{PID}"], ids=["plain", "of this process"])
def test_a_file_is_not_replaced_through_a_link_at_its_draft(folder: Path, mine: Path, draft: str) -> None:
    (folder / draft).symlink_to(mine)
    write_report(folder / "report.html", [folder])
    assert mine.read_text() == SECRET
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "draft", [f".{HEARTBEAT}", f".{HEARTBEAT}.{PID}", HEARTBEAT], ids=["plain", "of this process", "in place"]
)
def test_a_heartbeat_is_not_written_through_a_link(folder: Path, mine: Path, draft: str) -> None:
    (folder / draft).symlink_to(mine)
    with watchdog(folder, 0):
        pass
    assert mine.read_text() == SECRET
    assert json.loads((folder / HEARTBEAT).read_text())["ended"] == "finished"
    assert not (folder / HEARTBEAT).is_symlink()


def test_stacks_are_not_written_through_a_link(folder: Path, mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / STACKS).symlink_to(mine)
    with watchdog(folder, 1e-9):
        pass
    assert mine.read_text() == SECRET
    assert "stacks.txt cannot be written" in caplog.text
    assert "a link is in the way" in caplog.text


def test_logs_of_processes_are_not_written_through_a_link(tmp_path: Path, mine: Path) -> None:
    local = pytest.importorskip("covey_hosts.local")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "process-1.log").symlink_to(mine)
    with pytest.raises(ResumeError, match=r"process-1\.log: a link is in the way"):
        local.Attempt(["true"], local.LocalOptions(), tmp_path / "logs", 0).__enter__()
    assert mine.read_text() == SECRET


def test_leftovers_of_checkpoints_elsewhere_are_not_removed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run removes unfinished checkpoints: not in a folder that a link leads to."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "00000002.partial").mkdir(parents=True)
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").symlink_to(elsewhere)
    uses = [["train", "--resume"], ["eval"], ["chat"], ["export", "--out", str(tmp_path / "new")], ["watch"]]
    for words in (use for use in uses if use[0] in COMMANDS):
        assert main([*words, str(folder)]) == 2
        told = capsys.readouterr().err
        assert f"{folder / 'checkpoints'}: a link is in the way" in told
        assert "link its whole folder" in told
    assert [path.name for path in elsewhere.iterdir()] == ["00000002.partial"]


@pytest.mark.parametrize("name", ["00000002", "00000002.partial", "00000002.old"])
def test_a_checkpoint_that_is_a_link_is_neither_read_nor_removed(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "SHA256SUMS").touch()
    (folder / "checkpoints" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResumeError, match=rf"{name}: a link is in the way"):
        _look_at(folder / "checkpoints")
    assert (tmp_path / "elsewhere" / "SHA256SUMS").exists()


def _look_at(checkpoints: Path) -> None:
    CheckpointStore(checkpoints).finish_interrupted()
    with Checkpointer(checkpoints, read_only=True) as saves:
        saves.latest()


def test_a_link_inside_a_checkpoint_is_damage(folder: Path, mine: Path) -> None:
    step = folder / "checkpoints" / "00000001"
    (step / "SHA256SUMS").write_text("00  array\n")
    (step / "array").symlink_to(mine)
    with (
        Checkpointer(folder / "checkpoints", read_only=True) as saves,
        pytest.raises(ResumeError, match="checkpoint 1 is damaged: array is a link, or no file"),
    ):
        saves.restore(1)


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("recipe.yaml", lambda run: write_report(run.parent / "page.html", [run])),
    ("metrics.jsonl", lambda run: write_report(run.parent / "page.html", [run])),
    ("samples.jsonl", lambda run: write_report(run.parent / "page.html", [run])),
    ("tokens.jsonl", lambda run: write_report(run.parent / "page.html", [run])),
    ("before.jsonl", lambda run: write_report(run.parent / "page.html", [run])),
    (SUMMARY, lambda run: write_report(run.parent / "page.html", [run])),
    (SUMMARY, lambda run: read_summary(run / SUMMARY)),
    ("recipe.yaml", lambda run: watch(run, once=True)),
    (HEARTBEAT, lambda run: watch(run, once=True)),
    ("metrics.jsonl", lambda run: watch(run, once=True)),
    ("samples.jsonl", lambda run: watch(run, once=True)),
    ("checkpoints/lock", lambda run: is_locked(run / "checkpoints")),
]


@pytest.mark.parametrize(("name", "read"), READERS)
def test_no_file_is_read_through_a_link(folder: Path, mine: Path, name: str, read: Callable[[Path], object]) -> None:
    if name == "recipe.yaml":
        shutil.copy(folder / name, mine)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    with pytest.raises(ResumeError, match="a link is in the way") as error:
        read(folder)
    assert error.value.where == str(folder / name)


@pytest.mark.parametrize(("name", "read"), READERS[1:6] + READERS[8:])
def test_no_reader_waits_for_a_pipe(folder: Path, name: str, read: Callable[[Path], object]) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ResumeError, match="a pipe or device is in the way"):
        read(folder)


@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "a+b", "r+b", "xb"])
def test_no_mode_follows_a_link_or_waits_for_a_pipe(folder: Path, mine: Path, mode: str) -> None:
    (folder / "link").symlink_to(mine)
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises((ResumeError, FileExistsError), match=f"{name}: a .* is in the way"):
            open_below(folder, name, mode)
    assert mine.read_text() == SECRET


def test_a_run_folder_that_is_a_link_is_followed(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """The user chose it: runs may lie on another disk."""
    (tmp_path / "link").symlink_to(folder)
    replace_file(tmp_path / "link" / SUMMARY, b"{}")
    with MetricsWriter(tmp_path / "link", resume_at=1) as writer:
        writer.rows("metrics.jsonl", [{"step": 2}])
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    with take_lock(tmp_path / "link" / "checkpoints"):
        assert is_locked(folder / "checkpoints")
    assert watch(tmp_path / "link", once=True) == 75
    assert write_report(tmp_path / "link" / "report.html", [tmp_path / "link"]) > 0
