"""Every setting is read somewhere: one that nothing reads would be accepted and recorded, and would change nothing."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from covey.config.base import Config, leaves
from covey.config.recipe import Recipe, SFTRecipe

ROOT = Path(__file__).parents[2]
BY_COMPUTED_NAME = {
    "rollout_micro_batch_size": "getattr in covey/rl/stage_sizes.py",
    "ref_logps_micro_batch_size": "getattr in covey/rl/stage_sizes.py",
    "old_logps_micro_batch_size": "getattr in covey/rl/stage_sizes.py",
    "train_micro_batch_size": "getattr in covey/rl/stage_sizes.py",
    "embedding_learning_rate": "_for_group in covey/train/optimizers.py",
    "unembedding_learning_rate": "_for_group in covey/train/optimizers.py",
    "vector_learning_rate": "_for_group in covey/train/optimizers.py",
    "embedding_weight_decay": "_for_group in covey/train/optimizers.py",
    "unembedding_weight_decay": "_for_group in covey/train/optimizers.py",
    "expect": "getattr with ABOUT in covey_shell/recipes.py",
}
"""Settings whose names are computed where they are read, and where that is."""


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk `tree`, but not the functions that only compare settings with each other: a check uses no setting."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.FunctionDef) and node.name == "contradictions"):
            yield node
            yield from nodes_of(node)


def attributes_read(code: str) -> set[str]:
    nodes = nodes_of(ast.parse(code))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@cache
def unread(cls: type[Config]) -> set[str]:
    """Return the names of settings that no source of Covey and its plugins reads as an attribute."""
    left = {name.split(".")[-1] for name in leaves(cls)}
    for file in (*ROOT.glob("covey/**/*.py"), *ROOT.glob("plugins/covey_*/**/*.py")):
        code = "" if "tests" in file.parts else file.read_text(encoding="utf-8")
        if any(f".{name}" in code for name in left):  # most files read no other setting than those before them
            left -= attributes_read(code)
    return left


@pytest.mark.parametrize("cls", [Recipe, SFTRecipe])
def test_every_setting_is_read(cls: type[Config]) -> None:
    """The limit of the test: another attribute with the name of a setting counts as its reader."""
    assert unread(cls) - set(BY_COMPUTED_NAME) == set(), "nothing reads this setting"


def test_the_list_of_computed_names_is_short_as_it_can_be() -> None:
    assert set(BY_COMPUTED_NAME) == unread(Recipe) | unread(SFTRecipe)


def test_a_setting_that_nothing_reads_is_found() -> None:
    class WithOneMore(Recipe):
        presence_penalty: float = 0.0

    assert "presence_penalty" in unread(WithOneMore)
