"""Roles of the models in a run, the mesh of each, and the settings that they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jax.sharding import Mesh

from covey.config.keywords import Config
from covey.config.schema import OptimizerConfig, RLTrainingConfig, RolloutConfig
from covey.packing.rows import Rows, rows_at_a_time
from covey.parallel import distributed
from covey.parallel.placement import Model, place_model


class Role(StrEnum):
    """Role of a model."""

    ACTOR = "actor"
    """The policy that is trained."""
    ROLLOUT = "rollout"
    """The policy that samples: the actor's weights, possibly on other devices."""
    REFERENCE = "reference"
    """The frozen policy of the KL."""
    CRITIC = "critic"
    """The model that estimates values, trained beside the actor (PPO)."""
    REWARD = "reward"
    """A frozen model that scores completions."""


@dataclass(frozen=True)
class ClusterConfig(Config):
    """Meshes of the roles, and settings of training and sampling.

    Attributes:
        role_to_mesh: mesh of each role; a role that is not named uses the actor's, and an empty table means one
            device. Explicit axes, which `jax.make_mesh` makes, are treated as automatic ones.
        training_config: steps, batch, optimizers, micro-batches of the stages.
        rollout_config: sampling settings.
    """

    role_to_mesh: Mapping[Role, Mesh] = field(default_factory=dict)
    training_config: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)

    def mesh(self, role: Role) -> Mesh | None:
        """Return the mesh of `role`; None means one device."""
        return self.role_to_mesh.get(role, self.role_to_mesh.get(Role.ACTOR))

    def place(self, model: Model, role: Role) -> Model:
        """Put `model` on the mesh of `role`.

        Raises:
            RecipeError: a device of the mesh belongs to another process.
        """
        distributed.refuse_foreign(self.mesh(role), role)
        return place_model(model, self.mesh(role))

    def rows_at_a_time(self, rows: Rows, role: Role = Role.ACTOR) -> int:
        """Return how many rows `role` computes together."""
        return rows_at_a_time(rows, self.mesh(role), self.training_config.max_tokens_per_micro_batch)


@dataclass(frozen=True)
class Settings:
    """Parts of a recipe that a cluster uses, under the names that `recipe.validate` expects."""

    rollout: RolloutConfig
    training: RLTrainingConfig

    @classmethod
    def of(cls, config: ClusterConfig) -> "Settings":
        """Return the settings of `config`; an optax transformation is left out, as it has no ranges to check."""
        training, standard = config.training_config, RLTrainingConfig()
        if not isinstance(training.actor_optimizer, OptimizerConfig):
            training = replace(training, actor_optimizer=standard.actor_optimizer)
        if not isinstance(training.critic_optimizer, OptimizerConfig):
            training = replace(training, critic_optimizer=standard.critic_optimizer)
        return cls(config.rollout_config, training)
