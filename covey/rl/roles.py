"""Roles of the models in a run, the mesh of each, and the settings that they share."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Annotated

import jax
from jax.sharding import Mesh
from pydantic import Strict

from covey.config.base import Config, Problem
from covey.config.schema import RLTrainingConfig, RolloutConfig
from covey.packing.rows import Rows, rows_at_a_time
from covey.parallel.mesh import MESH_AXES, default_mesh, own_part, refuse_uneven_mesh, spans_processes
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


OF_EACH_PROCESS = (Role.ROLLOUT, Role.REWARD)
"""Roles that each process plays for its own share of the prompts, on its own devices."""


class ClusterConfig(Config):
    """Meshes of the roles, and settings of training and sampling.

    Attributes:
        role_to_mesh: mesh of each role; a role that is not named uses the actor's, and an empty table means one
            device. Explicit axes, which `jax.make_mesh` makes, are treated as automatic ones. In several processes
            these meshes have devices of all of them (by default the first of each), and rollout and reward model are
            on each process's own part.
        training_config: steps, batch, optimizers, micro-batches of the stages.
        rollout_config: sampling settings.
    """

    role_to_mesh: Annotated[Mapping[Role, Mesh], Strict(False)] = field(default_factory=dict)
    training_config: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)

    def mesh(self, role: Role) -> Mesh | None:
        """Return the mesh of `role`; None means one device."""
        if (named := self.role_to_mesh.get(role)) is not None:
            return named
        mesh = self.role_to_mesh.get(Role.ACTOR) or default_mesh()
        return own_part(mesh) if role in OF_EACH_PROCESS and mesh and spans_processes(mesh) else mesh

    def place(self, model: Model, role: Role) -> Model:
        """Put `model` on the mesh of `role`.

        Raises:
            RecipeError: the processes do not have equal parts of the mesh; or the mesh of a role that each process
                plays has devices of another.
        """
        if (mesh := self.mesh(role)) is not None and jax.process_count() > 1:
            refuse_uneven_mesh(mesh, role, within=role in OF_EACH_PROCESS)
        return place_model(model, mesh)

    def rows_at_a_time(self, rows: Rows, role: Role = Role.ACTOR, few: bool = False) -> int:
        """Return how many rows `role` computes together; for `few` see `packing.bins.rows_per_micro_batch`."""
        return rows_at_a_time(rows, self.mesh(role), self.training_config.max_tokens_per_micro_batch, few)

    def contradictions(self) -> Iterator[Problem]:
        """Yield a problem for each mesh with an axis along which nothing is split."""
        for role, mesh in self.role_to_mesh.items():
            if unknown := set(mesh.axis_names) - set(MESH_AXES):
                what = f"the mesh of {role} has the axis {sorted(map(str, unknown))[0]!r}, along which nothing is split"
                yield Problem("role_to_mesh", what, "axes out of " + ", ".join(MESH_AXES))
