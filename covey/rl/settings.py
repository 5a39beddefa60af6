"""Settings of a script's run as a recipe: they have the same checks, and a run folder records them."""

from collections.abc import Sequence
from typing import Any

from covey.config.recipe import Recipe
from covey.config.schema import DataConfig, EnvsConfig, EvalConfig, GRPOConfig, RewardSafetyConfig
from covey.config.schema.data import FROM_PYTHON
from covey.rewards.call import RewardFn, function_names
from covey.rewards.scoring import RewardRunner
from covey.rl.roles import ClusterConfig
from covey.sampling.responder import ResponderFactory


def settings_of(
    config: ClusterConfig,
    algorithm: GRPOConfig | None,
    functions: Sequence[RewardFn],
    environments: ResponderFactory | None,
    runner: RewardRunner | None,
    evaluation: EvalConfig | None,
    **more: Any,
) -> Recipe:
    """Return the settings of a script's run as a recipe; `more` are further settings."""
    own = getattr(environments, "config", None)
    named = EnvsConfig(environment=environments.name if environments else None)
    return Recipe(
        seed=config.rollout_config.seed,
        data=DataConfig(task=FROM_PYTHON),
        rewards=tuple(function_names(functions)),
        envs=own if isinstance(own, EnvsConfig) else named,
        reward_safety=runner.safety if runner else RewardSafetyConfig(),
        rollout=config.rollout_config,
        grpo=algorithm or GRPOConfig(),
        training=config.training_config,
        evaluation=evaluation or EvalConfig(),
        **more,
    )
