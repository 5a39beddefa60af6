"""What rewards go with, and their noise, worked by hand."""

import numpy as np
import pytest

from covey.rl.step_data import table_of
from covey_report.step_metrics import reward_metrics
from tests.rl.test_metrics import NAN, group


def test_the_noise_of_rewards_is_that_of_completions_of_equal_tokens() -> None:
    """The rewards of equal tokens have 8 free differences, and those within groups 9."""
    groups = [group([1.0, 1.0, -1.0, -1.0], [3, 3, 3, 3])] * 2 + [group([0.0] * 4, [2, 3, 2, 2])]
    assert reward_metrics(table_of(groups))["reward_noise"] == pytest.approx((8 / 8) / (8 / 9))


def test_repetition_goes_with_a_reward() -> None:
    groups = [
        group([1.0, 0.0], [4, 8], right=[1.0, 0.0], tidy=[0.0, NAN]),
        group([3.0, 3.0], [2, 6], right=[1.0, 1.0], tidy=[2.0, 2.0]),
    ]
    assert reward_metrics(table_of(groups)) == pytest.approx(
        {
            "completions/rewarded_empty_ratio": 1.0,
            "reward_correlation/repetition": -0.4 / np.sqrt(0.5 * (0.32 + 2 / 9)),
        }
    )


def test_what_a_reward_goes_with() -> None:
    """Within groups: the second group has longer completions and higher rewards, which says nothing. The third counts
    for no pair with a function that scored one of its completions alone, and rewards that are equal to rounding differ
    from nothing.
    """
    groups = [
        group([1.0, 0.0, 0.0], [1] * 3, texts=" |ab|cd", a=[1, 0, 0], b=[0.0, 1, 1], c=[0.1] * 3),
        group([5.0, 5.0, 8.0], [1] * 3, texts="abcdef|abcdef|\n", a=[0, 0, 1], b=[1.0, 1, 0], c=[0.1] * 3),
        group([0.7] * 3, [1] * 3, texts="a|b|", a=[1, NAN, NAN], b=[0.0, 1, 2], c=[0.1] * 3),
    ]
    got = reward_metrics(table_of(groups))
    rewards, lengths = np.array([2, -1, -1, -3, -3, 6, 0, 0, 0]) / 3, np.array([-2, 1, 1, 5, 5, -10, 1, 1, -2]) / 3
    wanted = rewards @ lengths / np.sqrt((rewards @ rewards) * (lengths @ lengths))
    assert got["reward_correlation/length"] == pytest.approx(wanted)
    assert got["rewards/a/correlation/b"] == pytest.approx(-1)
    assert got["completions/rewarded_empty_ratio"] == 1
    assert not {"rewards/a/correlation/c", "reward_correlation/repetition"} & got.keys()
    single = reward_metrics(table_of([group([float(n)], [1], texts="x" * n) for n in range(4)]))
    assert single["reward_correlation/length"] == pytest.approx(1)
