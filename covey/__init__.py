"""Covey: group-relative reinforcement learning for language models, in JAX.

The public names, each imported when it is first asked for, so that `import covey` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.configs import (
        DataConfig,
        EvalConfig,
        GRPOConfig,
        LoRAConfig,
        ModelOptions,
        OptimizerConfig,
        PPOConfig,
        RLTrainingConfig,
        RolloutConfig,
        SFTConfig,
    )
    from covey.errors import CoveyError
    from covey.recipe import Recipe, SFTRecipe
    from covey.rl.cluster import RLCluster
    from covey.rl.grpo import GRPOLearner
    from covey.rl.ppo import PPOLearner
    from covey.rl.roles import ClusterConfig, Role
    from covey.train.sft import SFTLearner

__version__ = "0.1.0"

__all__ = [
    "ClusterConfig",
    "CoveyError",
    "DataConfig",
    "EvalConfig",
    "GRPOConfig",
    "GRPOLearner",
    "LoRAConfig",
    "ModelOptions",
    "OptimizerConfig",
    "PPOConfig",
    "PPOLearner",
    "RLCluster",
    "RLTrainingConfig",
    "Recipe",
    "Role",
    "RolloutConfig",
    "SFTConfig",
    "SFTLearner",
    "SFTRecipe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


_HOMES = {
    "ClusterConfig": "covey.rl.roles",
    "CoveyError": "covey.errors",
    "DataConfig": "covey.configs",
    "EvalConfig": "covey.configs",
    "GRPOConfig": "covey.configs",
    "GRPOLearner": "covey.rl.grpo",
    "LoRAConfig": "covey.configs",
    "ModelOptions": "covey.configs",
    "OptimizerConfig": "covey.configs",
    "PPOConfig": "covey.configs",
    "PPOLearner": "covey.rl.ppo",
    "RLCluster": "covey.rl.cluster",
    "RLTrainingConfig": "covey.configs",
    "Recipe": "covey.recipe",
    "Role": "covey.rl.roles",
    "RolloutConfig": "covey.configs",
    "SFTConfig": "covey.configs",
    "SFTLearner": "covey.train.sft",
    "SFTRecipe": "covey.recipe",
}
"""Public name → the module it lives in."""
