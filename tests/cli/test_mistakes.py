"""Each row of docs/mistakes.md: the command is run, and its answer has the line that the table shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.cli.commands import COMMANDS
from covey.config import recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]+ \| `\$ (covey [^`]+)` \| `([^`]+)` \|$", PAGE, re.M)
FILES = re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page describes."""
    made = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES:
        (made / name).write_text(text)
    (made / "empty.jsonl").touch()
    for wide, name in (("wide.yaml", "mine.yaml"), ("wide.jsonl", "rows.jsonl")):
        (made / wide).write_text((made / name).read_text(), encoding="utf-16")
    (made / "weights").mkdir()
    for run, checkpoints in (("done", ["00000008"]), ("begun", [])):
        (made / "runs" / run / "checkpoints").mkdir(parents=True)
        (made / "runs" / run / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart")))
        for step in checkpoints:
            (made / "runs" / run / "checkpoints" / step).mkdir()
    return made


def test_the_page_has_its_rows_and_files() -> None:
    assert len(ROWS) == PAGE.count("| `$ covey ") >= 40
    assert len(FILES) == PAGE.count("\n```") // 2 == 15


@pytest.mark.parametrize(("command", "line"), ROWS, ids=[command for command, _ in ROWS])
def test_a_mistake_is_answered(
    command: str, line: str, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = files_in(folder)
    assert cli.main(shlex.split(command)[1:]) == 2
    assert line in [text.strip() for text in capsys.readouterr().err.splitlines()]
    assert files_in(folder) == before


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.slow
def test_no_mistake_needs_jax_or_numpy(folder: Path) -> None:
    """All rows in one process of its own, since that of the tests may have imported them."""
    code = "import sys, shlex; from covey.cli.main import main\n"
    code += f"for command in {[command for command, _ in ROWS]!r}: main(shlex.split(command)[1:])\n"
    code += f"for command in {list(COMMANDS)!r}: main([command, '--help'])\n"
    code += "print('', {'jax', 'numpy'} & sys.modules.keys(), sep='\\n')"
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment, check=True
    )
    assert (done.stdout.splitlines()[-1], "Traceback" in done.stderr) == ("set()", False)
