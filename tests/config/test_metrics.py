"""One table of metrics: recipes are checked against it, and the page has its names."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from covey.config import recipe
from covey.config.metrics import RL, SFT, TABLE, is_logged, metric, names
from covey.config.recipe import SFTRecipe
from covey.config.schema import EvalConfig
from covey.errors import RecipeError
from covey.rl.evaluate import evaluate_groups
from covey.types import Completion, FinishReason, Group

LOSSES = ("loss", "value_loss", "perplexity", "kl")
"""Ends of the names of metrics whose best value is the lowest."""
ROOT = Path(__file__).parents[2]
RL_TEXT = "rewards: [first_letter, sentence]\n"
SFT_TEXT = "method: sft\ndata: {task: sums}\n"


@pytest.mark.parametrize(
    ("text", "setting", "name", "near"),
    [
        (RL_TEXT, "show", "klll", "did you mean 'kl'?"),
        (RL_TEXT, "show", "mean_length", "wanted: completions/mean_length or eval/mean_length"),
        (RL_TEXT, "show", "rewards/sentense/mean", "did you mean 'rewards/sentence/mean'?"),
        (RL_TEXT, "show", "rewards/format_exact/mean", "rewards/"),
        (RL_TEXT, "keep_best", "eval/acuracy", "did you mean 'eval/accuracy'?"),
        (SFT_TEXT, "show", "kl", "one of: "),
    ],
)
def test_an_unknown_metric_is_refused_with_the_nearest(text: str, setting: str, name: str, near: str) -> None:
    kind = SFTRecipe if text is SFT_TEXT else recipe.Recipe
    value = f"[{name}]" if setting == "show" else name
    with pytest.raises(
        RecipeError, match=rf"r\.yaml:\d: training\.{setting} names {name!r}, which is no metric"
    ) as caught:
        recipe.parse(f"{text}training: {{{setting}: {value}}}", (), "r.yaml", kind)
    assert near in str(caught.value)


def test_what_a_run_logs_may_be_shown() -> None:
    """Those of every reward of the recipe, too, and of functions whose own names are not known yet."""
    for text, kind, functions in ((RL_TEXT, recipe.Recipe, ["first_letter", "sentence"]), (SFT_TEXT, SFTRecipe, [])):
        every = ", ".join(name.replace("<k>", "4").replace("<name>", "won") for name in names(kind.method, functions))
        assert recipe.parse(f"{text}training: {{show: [{every}]}}", (), "r.yaml", kind).training.show
    mine = "rewards: ['mine:letters']\ntraining: {show: [rewards/spelt/mean, rewards/spelt_2/failed]}"
    assert recipe.parse(mine).training.show
    scored = "reward_model: there\ntraining: {show: [rewards/reward_model/mean]}"
    assert recipe.parse(scored).training.show


def test_an_own_number_of_an_environment_is_shown_and_keeps_no_best() -> None:
    assert recipe.parse(f"{RL_TEXT}training: {{show: [env/won]}}").training.show == ("env/won",)
    with pytest.raises(RecipeError, match=r"keep_best names 'env/won', which is no metric"):
        recipe.parse(f"{RL_TEXT}training: {{keep_best: env/won}}")
    with pytest.raises(RecipeError, match="is no metric"):
        recipe.parse(f"{RL_TEXT}training: {{show: [env/Won]}}")


def test_a_name_has_one_row() -> None:
    written = [row.name for row in TABLE]
    assert len(set(written)) == len(written)
    assert all(metric(re.sub("<[a-z]+>", "12", name).replace("env/12", "env/won")) in TABLE for name in written)
    assert metric("rewards/a/b/mean") is metric("eval/pass@0") is metric("kll") is None
    assert {method for row in TABLE for method in row.methods} == {RL, SFT}


def test_the_best_of_a_loss_is_the_lowest() -> None:
    lowest = {row.name for row in TABLE if row.lower_is_better}
    assert lowest == {row.name for row in TABLE if row.name.rpartition("/")[2] in LOSSES}
    assert {row.name for row in TABLE if "loss" in row.name} - lowest == {"loss_tokens"}


def test_what_an_evaluation_finds_is_in_the_table() -> None:
    none = np.zeros(0, np.float32)
    completion = Completion(np.zeros(1, np.int32), none, none, FinishReason.STOP, "a")
    config = EvalConfig(samples=2, pass_k=2, accuracy="number_only", partial="number_only", format="number_only")
    found = evaluate_groups([Group("", np.zeros(1, np.int32), (completion,) * 2)], config).summary()
    assert len(found) == 12
    assert [name for name in found if not is_logged(f"eval/{name}", RL, ())] == []


def test_the_table_of_the_page_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "metrics_table.py"))
    assert tool["FILE"].read_text("utf-8") == tool["text"](), "make schema writes it again"
