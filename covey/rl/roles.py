"""Roles of the models in a run, how each is loaded, its mesh, and the settings that they share."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from pkgutil import resolve_name
from typing import Annotated, Any, Unpack

import jax
from jax.sharding import Mesh
from pydantic import Strict

from covey.config.base import Config, Problem
from covey.config.schema import RLTrainingConfig, RolloutConfig
from covey.models.decoder import DecoderOptions
from covey.parallel import processes
from covey.parallel.arrays import Model, place_model
from covey.parallel.mesh import (
    MESH_AXES,
    default_mesh,
    local_mesh,
    spans_processes,
)
from covey.text.tokenizer import Tokenizer


class Role(StrEnum):
    """Role of a model."""

    ACTOR = "actor"
    """The policy that is trained."""
    ROLLOUT = "rollout"
    """The policy that samples: the actor's weights, possibly on other devices."""
    REFERENCE = "reference"
    """The frozen policy of the KL."""
    CRITIC = "critic"
    """The model that estimates values, trained with the actor (PPO)."""
    REWARD = "reward"
    """A frozen model that scores completions."""


PER_PROCESS_ROLES = (Role.ROLLOUT, Role.REWARD)
"""Roles that each process plays for its own share of the prompts, on its own part of their mesh."""


class ClusterConfig(Config):
    """Meshes of the roles, and settings of training and sampling.

    Attributes:
        role_to_mesh: mesh of each role; a role that is not named uses the actor's, and an empty table means one
            device. Explicit axes, which `jax.make_mesh` makes, are treated as automatic ones. In several processes
            these meshes have devices of all of them (by default the first of each), and rollout and reward model are
            on each process's own part; the reward model is where the rollout is, unless it is named.
        training_config: steps, batch, optimizers, micro-batches of the stages.
        rollout_config: sampling settings.
    """

    role_to_mesh: Annotated[Mapping[Role, Mesh], Strict(False)] = field(default_factory=dict)
    training_config: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)

    def mesh(self, role: Role) -> Mesh | None:
        """Return the mesh of `role`, or this process's part if each process plays the role; None means one device."""
        mesh = self._named(role) or self.role_to_mesh.get(Role.ACTOR) or default_mesh()
        return local_mesh(mesh) if role in PER_PROCESS_ROLES and mesh and spans_processes(mesh) else mesh

    def _named(self, role: Role) -> Mesh | None:
        if (named := self.role_to_mesh.get(role)) is None and role == Role.REWARD and jax.process_count() > 1:
            return self.role_to_mesh.get(Role.ROLLOUT)
        return named

    @property
    def shares_weights(self) -> bool:
        """Whether the rollout samples with the actor's own arrays, because both have one mesh."""
        return self.mesh(Role.ROLLOUT) == self.mesh(Role.ACTOR)

    @property
    def has_disjoint_rollout(self) -> bool:
        """Whether the roles that each process plays share no device with the others, so that a thread may sample while
        another one trains. In one process it is enough that actor and rollout have different meshes.
        """
        if jax.process_count() == 1:
            return not self.shares_weights
        used = {role: _devices(self.mesh(role)) for role in Role}
        local = set().union(*(used[role] for role in PER_PROCESS_ROLES))
        return all(local.isdisjoint(devices) for role, devices in used.items() if role not in PER_PROCESS_ROLES)

    @property
    def runs_ahead(self) -> bool:
        """Whether a thread samples while another one trains: the next steps with `off_policy_steps`, and without the
        next groups of a step where the rollout has devices of its own. On common devices of several processes it would
        launch programs in another order on each, which wait for each other: there sampling and training take turns.
        """
        return self.has_disjoint_rollout or (self.training_config.off_policy_steps > 0 and jax.process_count() == 1)

    def place(self, model: Model, role: Role) -> Model:
        """Put `model` on the mesh of `role`.

        Raises:
            RecipeError: the processes do not have equal parts of the mesh; or that of a role that each process plays
                does not let it, see `Processes.check_per_process_mesh`.
        """
        self._check_mesh(role)
        return place_model(model, self.mesh(role))

    def _check_mesh(self, role: Role) -> None:
        if role in PER_PROCESS_ROLES:
            if (named := self._named(role)) is not None:
                processes.here().check_per_process_mesh(named, self.mesh(Role.ACTOR), role)
        elif (mesh := self.mesh(role)) is not None:
            processes.here().check_even_mesh(mesh)

    def contradictions(self) -> Iterator[Problem]:
        """Yield a problem for each mesh with an axis along which nothing is split."""
        for role, mesh in self.role_to_mesh.items():
            if unknown := set(mesh.axis_names) - set(MESH_AXES):
                what = f"the mesh of {role} has the axis {sorted(map(str, unknown))[0]!r}, along which nothing is split"
                yield Problem("role_to_mesh", what, "axes out of " + ", ".join(MESH_AXES))


def _devices(mesh: Mesh | None) -> set[jax.Device]:
    return set() if mesh is None else set(mesh.devices.flat)


def load_models(
    models: Mapping[Role, Any], config: ClusterConfig, **options: Unpack[DecoderOptions]
) -> tuple[dict[Role, Any], Tokenizer | None, str]:
    """Replace each source among `models` by the model that it names, on the mesh of its role.

    Args:
        models: model or source by role; models and None stay as they are.
        config: meshes.
        options: see `models.loading.weights.load`.

    Returns:
        the models, and tokenizer and origin of the actor's source; None and "" when the actor was given as a model.

    Raises:
        WeightsError: a source is unavailable, incomplete, or not a supported model.
    """
    loaded: dict[Role, Any] = {
        role: resolve_name(LOADERS[role])(source, mesh=config.mesh(role), **options)
        for role, source in models.items()
        if isinstance(source, str)
    }
    tokenizer, origin = (
        (loaded[Role.ACTOR].tokenizer, loaded[Role.ACTOR].origin) if Role.ACTOR in loaded else (None, "")
    )
    return {**models, **{role: each.model for role, each in loaded.items()}}, tokenizer, origin


LOADERS = {
    Role.ACTOR: "covey.models.loading.weights:load",
    Role.REFERENCE: "covey.models.loading.weights:load",
    Role.CRITIC: "covey.models.loading.weights:load_critic",
    Role.REWARD: "covey.models.loading.weights:load_value_model",
}
"""Loader of each role by name: a cluster of ready models imports none of them."""
