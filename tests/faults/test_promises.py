"""tests/PROMISES.md names tests that exist, and leaves none of the faults out."""

import ast
import re
from functools import cache
from pathlib import Path

from covey.errors import STOPPED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "PROMISES.md").read_text()
CODES = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.findall(r"`((?:plugins/\w+/)?tests/[\w/]+\.py)::(\w+)`", PAGE)


@cache
def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_named_is_there() -> None:
    assert len(NAMED) > 50
    assert [f"{file}::{name}" for file, name in NAMED if name not in names_in(ROOT / file)] == []


def test_every_promise_has_a_test() -> None:
    """Tables that end in a column of tests have one in every row."""
    tables = re.findall(r"^\| promise .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 35
    assert [row for row in rows if "::test_" not in row.rpartition(" | ")[2]] == []


def test_every_fault_is_on_the_page() -> None:
    """Each file of faults, fuzzing apart, is named by most of its tests' promises."""
    for file in Path(__file__).parent.glob("test_*_faults.py"):
        mine = {name for path, name in NAMED if path.endswith(file.name)}
        assert len(mine) >= 5, file.name


def test_the_exit_codes_are_those_of_the_command() -> None:
    assert f"| {STOPPED} | stopped by SIGTERM or SIGINT" in CODES
