"""The settings of a run: one module for each section of a recipe, which the Python API takes too.

No JAX here: the command answers `--help` and typos before it is imported.
"""

from covey.config.algorithms import GRPOConfig, PPOConfig
from covey.config.schema.data import HUBS, DataConfig, SFTDataConfig
from covey.config.schema.envs import EnvsConfig
from covey.config.schema.model import LORA_TARGETS, LoRAConfig, MeshConfig, ModelOptions, RoleMeshConfig, RoleMeshes
from covey.config.schema.rewards import RewardSafetyConfig
from covey.config.schema.rollout import CALCULATOR_MARKERS, EvalConfig, RolloutConfig, SamplingConfig, SFTEvalConfig
from covey.config.schema.training import OptimizerConfig, RLTrainingConfig, SFTConfig

__all__ = [
    "CALCULATOR_MARKERS",
    "HUBS",
    "LORA_TARGETS",
    "DataConfig",
    "EnvsConfig",
    "EvalConfig",
    "GRPOConfig",
    "LoRAConfig",
    "MeshConfig",
    "ModelOptions",
    "OptimizerConfig",
    "PPOConfig",
    "RLTrainingConfig",
    "RewardSafetyConfig",
    "RoleMeshConfig",
    "RoleMeshes",
    "RolloutConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTEvalConfig",
    "SamplingConfig",
]
