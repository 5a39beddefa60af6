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
        RLTrainingConfig,
        RolloutConfig,
    )
    from covey.errors import CoveyError
    from covey.recipe import Recipe
    from covey.rl.cluster import ClusterConfig, RLCluster, Role
    from covey.rl.grpo import GRPOLearner

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
    "RLCluster",
    "RLTrainingConfig",
    "Recipe",
    "Role",
    "RolloutConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


_HOMES = {
    "ClusterConfig": "covey.rl.cluster",
    "CoveyError": "covey.errors",
    "DataConfig": "covey.configs",
    "EvalConfig": "covey.configs",
    "GRPOConfig": "covey.configs",
    "GRPOLearner": "covey.rl.grpo",
    "LoRAConfig": "covey.configs",
    "ModelOptions": "covey.configs",
    "OptimizerConfig": "covey.configs",
    "RLCluster": "covey.rl.cluster",
    "RLTrainingConfig": "covey.configs",
    "Recipe": "covey.recipe",
    "Role": "covey.rl.cluster",
    "RolloutConfig": "covey.configs",
}
"""Public name → the module it lives in."""
