"""The choices of a setting are those that the code has: a name without its function would pass the check of a recipe
and fail in its run.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import pytest

from covey.config.algorithms import PRESETS
from covey.config.base import Config
from covey.config.kinds import without_none
from covey.config.recipe import METHODS, AnyRecipe
from covey.config.schema import DataConfig, EnvsConfig, EvalConfig, GRPOConfig, OptimizerConfig, RolloutConfig
from covey.data.sources import TASKS
from covey.losses.advantages import ADVANTAGES
from covey.losses.policy import AGGREGATES, KLS, RATIOS, SURROGATES
from covey.rl.evaluate import PRESETS as SAMPLING_PRESETS
from covey.train.optimizers import OPTIMIZERS, SCHEDULES


def choices(cls: type[Config], name: str) -> set[str]:
    kind = without_none(cls.kinds[name])[0]
    kind = kind if get_origin(kind) is Literal else get_args(kind)[0]
    return set(get_args(kind))


@pytest.mark.parametrize(
    ("cls", "name", "table", "more"),
    [
        (AnyRecipe, "method", METHODS, set()),
        (AnyRecipe, "tracking", "covey_trackers.trackers:TRACKERS", set()),
        (DataConfig, "task", TASKS, {"python", "gsm8k", "guess", "long-sums", "wordle"}),
        (GRPOConfig, "algorithm", PRESETS, set()),
        (GRPOConfig, "advantage", ADVANTAGES, {"gae"}),
        (GRPOConfig, "ratio", RATIOS, set()),
        (GRPOConfig, "surrogate", SURROGATES, set()),
        (GRPOConfig, "aggregate", AGGREGATES, set()),
        (GRPOConfig, "kl", KLS, set()),
        (EnvsConfig, "tool_format", "covey_envs.tool_calls:FORMATS", {"auto"}),
        (EvalConfig, "preset", SAMPLING_PRESETS, {"all"}),
        (OptimizerConfig, "kind", OPTIMIZERS, set()),
        (OptimizerConfig, "schedule", SCHEDULES, set()),
        (RolloutConfig, "tool", "covey_envs.calculator:TOOLS", {"none"}),
    ],
)
def test_a_choice_has_its_entry_in_the_table(
    cls: type[Config], name: str, table: Mapping[str, Any] | str, more: set[str]
) -> None:
    if isinstance(table, str):
        module, _, member = table.partition(":")
        table = getattr(pytest.importorskip(module), member)
    assert choices(cls, name) == {*table, *more}
