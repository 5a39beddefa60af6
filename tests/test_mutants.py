"""The mutation tool knows the code as it is; its runs take half an hour and are no tests."""

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "mutants.py"))


def test_equivalent_mutants_are_mutants_of_the_modules_that_are_tested() -> None:
    """The trap: a line changes, its entry stays, and `make mutants` refuses to begin."""
    modules = list(TOOL["TESTS"])
    assert set(TOOL["EQUIVALENT"]) <= set(modules)
    assert TOOL["draw"](modules, 0, 0) == []


def test_a_number_left_out_of_a_random_key_is_a_mutant() -> None:
    diffs = [mutant.diff for mutant in TOOL["mutants"]("covey/models/lora.py") if "fold_in" in mutant.diff]
    assert any("number), step) → jax.random.fold_in(jax.random.PRNGKey(seed), number)»" in diff for diff in diffs)
