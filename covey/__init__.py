"""Covey: group-relative reinforcement learning for language models, in JAX.

Each public name is imported at its first use, so that `import covey` costs nothing.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.config.recipe import Recipe, SFTRecipe
    from covey.config.schema import (
        DataConfig,
        EnvsConfig,
        EvalConfig,
        GRPOConfig,
        LoRAConfig,
        MeshConfig,
        ModelOptions,
        OptimizerConfig,
        PPOConfig,
        RewardSafetyConfig,
        RLTrainingConfig,
        RolloutConfig,
        SFTConfig,
    )
    from covey.envs.protocol import Step
    from covey.envs.runner import EnvironmentRunner
    from covey.errors import CoveyError
    from covey.models.export import write_hf, write_peft
    from covey.models.lora import with_lora
    from covey.monitor.record import History
    from covey.monitor.trackers import Tracked, Trackers
    from covey.parallel import make_mesh
    from covey.rewards import RewardRunner
    from covey.rl.cluster import RLCluster
    from covey.rl.helpers import (
        build_positions_from_mask,
        compute_advantages,
        get_per_token_logps,
        make_causal_attn_mask,
        make_completion_mask,
        pad_to_length,
        selective_log_softmax,
    )
    from covey.rl.learner import Learner
    from covey.rl.roles import ClusterConfig, Role
    from covey.run import open_model
    from covey.run.learners import GRPOLearner, PPOLearner, SFTLearner
    from covey.train.checkpoint import Checkpointer

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "ClusterConfig",
    "CoveyError",
    "DataConfig",
    "EnvironmentRunner",
    "EnvsConfig",
    "EvalConfig",
    "GRPOConfig",
    "GRPOLearner",
    "History",
    "Learner",
    "LoRAConfig",
    "MeshConfig",
    "ModelOptions",
    "OptimizerConfig",
    "PPOConfig",
    "PPOLearner",
    "RLCluster",
    "RLTrainingConfig",
    "Recipe",
    "RewardRunner",
    "RewardSafetyConfig",
    "Role",
    "RolloutConfig",
    "SFTConfig",
    "SFTLearner",
    "SFTRecipe",
    "Step",
    "Tracked",
    "Trackers",
    "build_positions_from_mask",
    "compute_advantages",
    "get_per_token_logps",
    "make_causal_attn_mask",
    "make_completion_mask",
    "make_mesh",
    "open_model",
    "pad_to_length",
    "selective_log_softmax",
    "with_lora",
    "write_hf",
    "write_peft",
]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        old, name = name, _RENAMED[name]
        warnings.warn(f"covey.{old} is now covey.{name}", DeprecationWarning, stacklevel=2)
    if name not in _HOMES:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


_HOMES = {
    "Checkpointer": "covey.train.checkpoint",
    "ClusterConfig": "covey.rl.roles",
    "CoveyError": "covey.errors",
    "DataConfig": "covey.config.schema",
    "EnvironmentRunner": "covey.envs.runner",
    "EnvsConfig": "covey.config.schema",
    "EvalConfig": "covey.config.schema",
    "GRPOConfig": "covey.config.schema",
    "GRPOLearner": "covey.run.learners",
    "History": "covey.monitor.record",
    "Learner": "covey.rl.learner",
    "LoRAConfig": "covey.config.schema",
    "MeshConfig": "covey.config.schema",
    "ModelOptions": "covey.config.schema",
    "OptimizerConfig": "covey.config.schema",
    "PPOConfig": "covey.config.schema",
    "PPOLearner": "covey.run.learners",
    "RLCluster": "covey.rl.cluster",
    "RLTrainingConfig": "covey.config.schema",
    "Recipe": "covey.config.recipe",
    "RewardRunner": "covey.rewards",
    "RewardSafetyConfig": "covey.config.schema",
    "Role": "covey.rl.roles",
    "RolloutConfig": "covey.config.schema",
    "SFTConfig": "covey.config.schema",
    "SFTLearner": "covey.run.learners",
    "SFTRecipe": "covey.config.recipe",
    "Step": "covey.envs.protocol",
    "Tracked": "covey.monitor.trackers",
    "Trackers": "covey.monitor.trackers",
    "build_positions_from_mask": "covey.rl.helpers",
    "compute_advantages": "covey.rl.helpers",
    "get_per_token_logps": "covey.rl.helpers",
    "make_causal_attn_mask": "covey.rl.helpers",
    "make_completion_mask": "covey.rl.helpers",
    "make_mesh": "covey.parallel",
    "open_model": "covey.run",
    "pad_to_length": "covey.rl.helpers",
    "selective_log_softmax": "covey.rl.helpers",
    "with_lora": "covey.models.lora",
    "write_hf": "covey.models.export",
    "write_peft": "covey.models.export",
}
"""Map from public name to the module that defines it."""

_RENAMED: dict[str, str] = {}
"""Map from the former name of a public name to the present one; none has been renamed since the first release."""
