"""Public names of Covey, each with the module that defines it."""

from covey.config.recipe import Recipe as Recipe
from covey.config.recipe import SFTRecipe as SFTRecipe
from covey.config.schema import DataConfig as DataConfig
from covey.config.schema import EnvsConfig as EnvsConfig
from covey.config.schema import EvalConfig as EvalConfig
from covey.config.schema import GRPOConfig as GRPOConfig
from covey.config.schema import LoRAConfig as LoRAConfig
from covey.config.schema import MeshConfig as MeshConfig
from covey.config.schema import ModelOptions as ModelOptions
from covey.config.schema import OptimizerConfig as OptimizerConfig
from covey.config.schema import PPOConfig as PPOConfig
from covey.config.schema import RewardSafetyConfig as RewardSafetyConfig
from covey.config.schema import RLTrainingConfig as RLTrainingConfig
from covey.config.schema import RolloutConfig as RolloutConfig
from covey.config.schema import SFTConfig as SFTConfig
from covey.envs.protocol import Step as Step
from covey.envs.runner import EnvironmentRunner as EnvironmentRunner
from covey.envs.trl import TrlFactory as TrlFactory
from covey.errors import CoveyError as CoveyError
from covey.models.export import write_hf as write_hf
from covey.models.export import write_peft as write_peft
from covey.models.lora import with_lora as with_lora
from covey.monitor.record import History as History
from covey.monitor.trackers import Tracked as Tracked
from covey.monitor.trackers import Trackers as Trackers
from covey.parallel import make_mesh as make_mesh
from covey.rewards import RewardRunner as RewardRunner
from covey.rl.cluster import RLCluster as RLCluster
from covey.rl.helpers import build_positions_from_mask as build_positions_from_mask
from covey.rl.helpers import compute_advantages as compute_advantages
from covey.rl.helpers import get_per_token_logps as get_per_token_logps
from covey.rl.helpers import make_causal_attn_mask as make_causal_attn_mask
from covey.rl.helpers import make_completion_mask as make_completion_mask
from covey.rl.helpers import pad_to_length as pad_to_length
from covey.rl.helpers import selective_log_softmax as selective_log_softmax
from covey.rl.learner import Learner as Learner
from covey.rl.roles import ClusterConfig as ClusterConfig
from covey.rl.roles import Role as Role
from covey.run import open_model as open_model
from covey.run.learners import GRPOLearner as GRPOLearner
from covey.run.learners import PPOLearner as PPOLearner
from covey.run.learners import SFTLearner as SFTLearner
from covey.run.learners import train_grpo as train_grpo
from covey.train.checkpoint import Checkpointer as Checkpointer

__all__: list[str]
__version__: str
