"""Settings of environments: what they replace, and what contradicts them."""

import pytest

from covey.config import recipe
from covey.config.schema import EnvsConfig
from covey.config.schema.envs import USED_WHEN
from covey.errors import RecipeError


def test_an_environment_is_reward_enough() -> None:
    settings = recipe.load("guess-tiny")
    assert settings.rewards == ()
    assert settings.envs.environment == "guess"
    with pytest.raises(RecipeError, match=r"rewards is empty(.|\n)*or an environment"):
        recipe.load("guess-tiny", ["--envs.environment", "null", "--envs.max-turns", "8", "--max-turn-tokens", "null"])


def test_its_reward_has_the_first_weight_and_its_name_in_the_metrics() -> None:
    weighed = ["--rewards", "[number_only]", "--grpo.reward-weights", "[1.0, 0.5]"]
    shown = ["--training.show", "[rewards/guess/mean, env/turns]"]
    assert recipe.load("guess-tiny", [*weighed, *shown]).grpo.reward_weights == (1.0, 0.5)
    with pytest.raises(RecipeError, match=r"1 numbers for 2 reward functions(.|\n)*the environment's first"):
        recipe.load("guess-tiny", [*weighed[:2], "--grpo.reward-weights", "[1.0]"])


def test_a_tool_beside_an_environment_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.tool is calculator, and envs\.environment is guess"):
        recipe.load("guess-tiny", ["--rollout.tool", "calculator"])


def test_settings_without_what_they_are_for_are_a_mistake() -> None:
    for settings, what in (
        (
            ["--envs.max-turns", "3"],
            r"envs\.max_turns is set, and a run with these settings has no use for it\n  wanted: 8, or an envs\.env",
        ),
        (["--envs.tool-format", "llama"], r"envs\.tool_format is set(.|\n)*auto, or envs\.tools"),
        (["--envs.python-engine", "wasm"], r"envs\.python_engine is set(.|\n)*auto, or python in envs\.tools"),
        (["--envs.timeout", "3"], r"envs\.timeout is set"),
        (["--envs.environment", "guess", "--envs.action-field", "x"], r"envs\.action_field is set(.|\n)*openenv:"),
    ):
        with pytest.raises(RecipeError, match=what):
            recipe.load("quickstart", settings)
    assert EnvsConfig(environment="trl:module:Class", tool_format="llama").tool_format == "llama"
    assert EnvsConfig(max_turns=3).max_turns == 3  # a script gives its environment to the runner


def test_every_setting_of_an_environment_has_its_condition() -> None:
    conditional = [name for condition in USED_WHEN for name in condition.names]
    assert sorted([*conditional, "environment", "tools"]) == sorted(EnvsConfig.kinds)
