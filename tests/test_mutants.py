"""The mutation tool knows the code as it is; its runs take half an hour and are no tests."""

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "mutants.py"))


def test_equivalent_mutants_are_mutants_of_the_modules_that_are_tested() -> None:
    """The trap: a line changes, its entry stays, and `make mutants` refuses to begin."""
    modules = list(TOOL["TESTS"])
    assert set(TOOL["EQUIVALENT"]) <= set(modules)
    assert TOOL["draw"](modules, 0, 0) == []
