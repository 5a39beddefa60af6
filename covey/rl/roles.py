"""The roles models play in a run, the mesh each lives on, and the settings they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jax.sharding import Mesh

from covey.config.keywords import Config
from covey.config.schema import OptimizerConfig, RLTrainingConfig, RolloutConfig


class Role(StrEnum):
    """What a model is for."""

    ACTOR = "actor"
    """The policy that is trained."""
    ROLLOUT = "rollout"
    """The policy that samples: the actor's weights, maybe on other devices."""
    REFERENCE = "reference"
    """The frozen policy of the KL."""
    CRITIC = "critic"
    """Estimates values; trained beside the actor (PPO)."""
    REWARD = "reward"
    """A frozen model that scores completions."""


@dataclass(frozen=True)
class ClusterConfig(Config):
    """Where the roles live and how they work.

    Attributes:
        role_to_mesh: a mesh for each role; a role that is not named lives with the actor, and an empty table is one
            device. Explicit axes, which `jax.make_mesh` makes, are taken as automatic ones.
        training_config: steps, batch, optimizers, micro-batches of the stages.
        rollout_config: sampling.
    """

    role_to_mesh: Mapping[Role, Mesh] = field(default_factory=dict)
    training_config: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)

    def mesh(self, role: Role) -> Mesh | None:
        """The mesh that `role` lives on; None is one device."""
        return self.role_to_mesh.get(role, self.role_to_mesh.get(Role.ACTOR))


@dataclass(frozen=True)
class Settings:
    """The parts of a recipe that a cluster gets, under the names that `recipe.validate` knows."""

    rollout: RolloutConfig
    training: RLTrainingConfig

    @classmethod
    def of(cls, config: ClusterConfig) -> "Settings":
        """Those of `config`; an optimizer that is an optax transformation has no ranges to check."""
        training, standard = config.training_config, RLTrainingConfig()
        if not isinstance(training.actor_optimizer, OptimizerConfig):
            training = replace(training, actor_optimizer=standard.actor_optimizer)
        if not isinstance(training.critic_optimizer, OptimizerConfig):
            training = replace(training, critic_optimizer=standard.critic_optimizer)
        return cls(config.rollout_config, training)
