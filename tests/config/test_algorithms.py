"""The table of algorithms: what a config makes of a preset, and settings that would do nothing without a word."""

from dataclasses import replace
from typing import Any

import pytest

from covey.config import recipe
from covey.config.algorithms import PRESETS, USED_WHEN, algorithm_of
from covey.config.base import Problem, UsedWhen
from covey.config.schema import GRPOConfig, PPOConfig
from covey.errors import RecipeError

SMALL = "name: small\nrewards: [first_letter]\n"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_had_by_its_name_and_agrees_with_itself(name: str) -> None:
    made = algorithm_of(GRPOConfig(name))
    assert made.name == name
    assert {key: getattr(made, key) for key in PRESETS[name].settings} == PRESETS[name].settings
    assert replace(made) == made, "every value lies in its range"
    assert PRESETS[name].paper
    assert PRESETS[name].when


def test_one_setting_moves_one_coordinate() -> None:
    moved = algorithm_of(GRPOConfig("dapo", beta=0.02, epsilon=0.1))
    assert (moved.beta, moved.epsilon, moved.high, moved.aggregate) == (0.02, 0.1, 0.28, "token_mean")


def test_the_upper_clip_range_follows_the_lower_where_it_is_not_set() -> None:
    assert algorithm_of(GRPOConfig(epsilon=0.1)).high == 0.1
    assert algorithm_of(GRPOConfig(epsilon=0.1, epsilon_high=0.3)).high == 0.3


def test_an_off_switch_is_a_setting_too() -> None:
    """False and 0 are not None: a preset's extra can be taken away."""
    bare = algorithm_of(GRPOConfig("dapo", max_sampling_rounds=1, overlong_buffer=0.0))
    assert (bare.max_sampling_rounds, bare.overlong_buffer) == (1, 0.0)
    assert not algorithm_of(PPOConfig(whiten=False)).whiten


def test_ppo_has_a_config_of_its_own() -> None:
    assert PPOConfig().num_generations == 1
    assert algorithm_of(PPOConfig()).needs_critic
    assert PPOConfig.kinds.keys() - GRPOConfig.kinds.keys() == {"gamma", "gae_lambda", "value_clip", "whiten"}


@pytest.mark.parametrize(
    ("settings", "name", "part"),
    [
        ({"num_generations": 1}, "num_generations", "needs others to be compared with"),
        ({"kl": "k1"}, "kl", "expected gradient is 0"),
        ({"cap": 3.0}, "cap", "grpo with these settings has no use for it"),
        ({"algorithm": "cispo", "epsilon": 0.2}, "epsilon", "no use"),
        ({"algorithm": "reinforce", "ratio": "sequence"}, "ratio", "no use"),
        ({"whiten": True}, "whiten", "no use"),
        ({"algorithm": "dapo", "kl": "k2"}, "kl", "dapo with these settings has no use for it"),
        ({"beta": 0.0, "kl_in": "reward"}, "kl_in", "no use"),
        ({"beta": 0.0, "reference_every_n_updates": 5}, "reference_every_n_updates", "no use"),
        ({"algorithm": "ppo", "num_generations": 1, "credit": "turn"}, "credit", "no use"),
        ({"algorithm": "ppo", "num_generations": 1, "max_sampling_rounds": 2}, "max_sampling_rounds", "always equal"),
        ({"correction": "token_mask", "correction_cap": 0.5}, "correction_floor", "2, and grpo.correction_cap 0.5"),
        ({"surrogate": "reinforce", "num_iterations": 2, "correction": "token_mask"}, "num_iterations", "has no ratio"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused_with_what_would_use_it(
    settings: dict[str, Any], name: str, part: str
) -> None:
    """No feature quietly switches off because another is on."""
    found = {problem.key: problem for problem in problems(settings)}
    assert part in found[name].what
    assert found[name].want
    words = [f"--grpo.{key}={value}" for key, value in settings.items()]
    with pytest.raises(RecipeError, match=f"grpo.{name}"):
        recipe.parse(SMALL, words)


ALWAYS_USED = {
    "algorithm", "num_generations", "num_iterations", "reward_weights", "advantage", "surrogate", "aggregate", "beta",
    "entropy_bonus", "correction", "mask_truncated", "overlong_buffer", "max_sampling_rounds",
}  # fmt: skip


def test_every_setting_is_used_always_or_under_a_named_condition() -> None:
    conditional = [name for condition in USED_WHEN for name in condition.names]
    assert sorted([*ALWAYS_USED, *conditional]) == sorted(PPOConfig.kinds)


@pytest.mark.parametrize("condition", USED_WHEN, ids=lambda condition: condition.names[0])
def test_a_condition_holds_for_some_algorithm_and_not_for_another(condition: UsedWhen) -> None:
    configs = [GRPOConfig(name) for name in PRESETS if name != "ppo"] + [
        PPOConfig(), GRPOConfig(surrogate="dual_clip"), GRPOConfig(credit="turn"), GRPOConfig(kl_target=0.1),
        GRPOConfig(reference_every_n_updates=1), GRPOConfig(correction="token_mask"),
    ]  # fmt: skip
    assert {bool(condition.holds(algorithm_of(config))) for config in configs} == {False, True}


def test_an_off_switch_that_nothing_reads_is_no_mistake() -> None:
    """`whiten: false` beside another advantage than gae says what is true."""
    assert problems({"algorithm": "ppo", "advantage": "centred", "num_generations": 2, "whiten": False}) == []


def problems(settings: dict[str, Any]) -> list[Problem]:
    """What is wrong with settings of any algorithm, as in a recipe."""
    return list(PPOConfig.from_checked(vars(GRPOConfig()) | settings).contradictions())


def test_a_second_update_without_a_ratio_is_refused_with_what_has_one() -> None:
    """Every other algorithm weighs it by a ratio; a correction compares sampler and trainer before any update."""
    (found,) = problems({"algorithm": "reinforce", "num_iterations": 4})
    others = [name for name in PRESETS if name != "reinforce"]
    assert found.want == f"1, or an algorithm with a ratio: {', '.join(others)}"
    assert all(problems({"algorithm": name, "num_iterations": 4}) == [] for name in others)
    assert problems({"algorithm": "reinforce", "surrogate": "clip", "num_iterations": 4}) == []


def test_reward_weights_that_are_all_zero_are_refused() -> None:
    (found,) = problems({"reward_weights": (0.0, 0.0)})
    assert found[:2] == ("reward_weights", "grpo.reward_weights are all 0: no answer would be scored")
    assert problems({"reward_weights": (0.0, -1.0)}) == []


def test_an_algorithm_has_a_value_where_a_config_has_none() -> None:
    """Those that stay None are off, or follow another setting."""
    made = vars(algorithm_of(GRPOConfig()))
    assert {name for name, value in made.items() if value is None} == {
        "reward_weights", "epsilon_high", "delta", "kl_target", "correction_floor"
    }  # fmt: skip
    assert made.keys() == vars(PPOConfig()).keys()
