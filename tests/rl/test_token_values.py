"""Which steps and completions have token values; their numbers are tested in `tests/run/test_learners.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covey.config.schema import RLTrainingConfig
from covey.rl.token_values import COMPLETIONS, TOKENS, _choose, interval


@pytest.mark.parametrize(
    ("prompts", "samples", "total", "every"), [(8, 8, 16, 7), (8, 8, 2000, 40), (64, 8, 60, 2), (1, 4, 20, 50)]
)
def test_the_interval_bounds_the_cost_and_the_number_of_steps(
    prompts: int, samples: int, total: int, every: int
) -> None:
    """Two passes of the scored completions, as much padding again, are below 1 % of six passes of all others."""
    config = RLTrainingConfig(prompts_per_step=prompts)
    assert interval(config, samples, total) == every
    assert 2 * 1.5 * min(samples, COMPLETIONS) <= 0.01 * 6 * prompts * samples * every
    assert total // every <= 50


def test_the_setting_is_the_interval() -> None:
    assert [interval(RLTrainingConfig(token_values_every_n_steps=n), 8, 16) for n in (0, 3)] == [0, 3]


def test_completions_with_large_advantages_are_shown_and_long_ones_cut(groups_of: Callable[..., Any]) -> None:
    (group,) = groups_of([(5, [3] * 11 + [2 * TOKENS])])
    advantages = np.zeros(12, np.float32)
    advantages[[2, 11]] = 0.5, -3.0
    shown = _choose(replace(group, advantages=advantages), 768)
    assert shown.group.advantages is advantages
    assert shown.numbers == [0, 1, 2, 3, 4, 5, 6, 11]
    assert shown.lengths == [3] * 7 + [TOKENS]
    assert shown.rows.scored.sum() == 7 * 3 + TOKENS
    assert shown.rows.tokens.shape == (1, 768)
    assert np.array_equal(shown.scored.completions[-1].tokens, group.completions[11].tokens[:TOKENS])
