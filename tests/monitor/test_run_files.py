"""The table of the files in a run folder is the one that commands and documents follow."""

import re
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.config.recipe import RUN_RECIPE
from covey.monitor import run_files
from covey.monitor.record import StepRecord
from covey.monitor.run_files import RECIPE, RunFile
from covey.monitor.writer import MetricsWriter, read_rows
from covey.run import folder
from covey.types import Completion, FinishReason, Group

ROOT = Path(__file__).parents[2]


def test_every_name_stands_in_the_table_once() -> None:
    names = [file.name for file in run_files.run_files()]
    assert len(set(names)) == len(names)
    constants = {value for name, value in vars(run_files).items() if name.isupper() and isinstance(value, str)}
    assert constants <= set(names)
    assert RUN_RECIPE == RECIPE  # the config imports nothing of training


@pytest.mark.parametrize("file", run_files.run_files(), ids=lambda file: file.name)
def test_every_file_is_on_the_page_of_the_run_folder(file: RunFile) -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text().partition("\n## ")[0]
    table = "".join(re.findall(r"^\| .*\n", page, re.M))
    assert re.search(rf"`{re.escape(file.name)}[/`]", table), f"add {file.name} to the table of docs/run-folder.md"


@pytest.mark.parametrize(
    "file", [file for file in run_files.run_files() if file.group_rows], ids=lambda file: file.name
)
def test_rows_of_a_group_are_made_by_the_function_that_is_named(file: RunFile) -> None:
    numbers = np.zeros(1, np.float32)
    completion = Completion(np.ones(1, np.int32), numbers, numbers, FinishReason.STOP, "Because.")
    group = Group("Why?", np.ones(1, np.int32), (completion,), rewards=np.ones(1), advantages=np.zeros(1))
    rows = [*resolve_name(file.group_rows)(3, 0, group)]
    assert rows
    assert all(row["step"] == 3 for row in rows)


def test_a_file_of_rows_is_one_entry_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are written at each step, cut on resume, and listed."""
    mine = RunFile("prompts.jsonl", "prompts of each step", per_step=True, group_rows=f"{__name__}:prompt_rows")
    monkeypatch.setattr(folder, "resolve_name", lambda name: prompt_rows)  # this module has no name to import
    monkeypatch.setattr(run_files, "all_offered", lambda group: {"mine": lambda: [mine]})
    assert mine in run_files.run_files()
    saves: Any = SimpleNamespace(latest=lambda: 1, holds=lambda: True)
    for resuming, steps in ((False, (1, 2)), (True, (2,))):
        with folder.RunFolder(tmp_path, saves, resuming) as run:
            for step in steps:
                run.write_step(StepRecord(step, 1, 2, {"step": step}, [Group("Why?", np.zeros(1, np.int32), ())], [0]))
    assert list(read_rows(tmp_path / "prompts.jsonl")) == [{"step": step, "prompt": "Why?"} for step in (1, 2)]


def prompt_rows(step: int, number: int, group: Group) -> list[dict[str, Any]]:
    return [{"step": step, "prompt": group.prompt}]


def test_rows_of_a_package_are_cut_on_resume_without_an_entry(tmp_path: Path) -> None:
    """The trap: a resumed run makes its steps behind the checkpoint again, and the rows would be there twice."""
    for resume_at, steps in ((None, (1, 2, 3)), (2, (3,))):
        with MetricsWriter(tmp_path, resume_at=resume_at) as writer:
            for step in steps:
                writer.rows("mine.jsonl", [{"step": step}])
    assert [row["step"] for row in read_rows(tmp_path / "mine.jsonl")] == [1, 2, 3]
