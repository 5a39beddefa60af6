"""The table of the files in a run folder is the one that commands and documents follow."""

import re
from pathlib import Path

import pytest

from covey.config.recipe import RUN_RECIPE
from covey.monitor import run_files
from covey.monitor.run_files import RECIPE, RUN_FILES

ROOT = Path(__file__).parents[2]


def test_every_name_stands_in_the_table_once() -> None:
    names = [file.name for file in RUN_FILES]
    assert len(set(names)) == len(names)
    constants = {value for name, value in vars(run_files).items() if name.isupper() and isinstance(value, str)}
    assert constants <= set(names)
    assert RUN_RECIPE == RECIPE  # the config imports nothing of training


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.name)
def test_every_file_is_on_the_page_of_the_run_folder(file: run_files.RunFile) -> None:
    section = (ROOT / "docs" / "reliability.md").read_text().partition("## The run folder")[2].partition("\n## ")[0]
    table = "".join(re.findall(r"^\| .*\n", section, re.M))
    assert re.search(rf"`{re.escape(file.name)}[/`]", table), f"add {file.name} to the table of docs/reliability.md"
