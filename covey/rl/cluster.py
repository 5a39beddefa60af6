"""`RLCluster`: the models by role, the mesh each lives on, and the one tokenizer they share.

Roles on one mesh share arrays: with LoRA, actor, rollout and reference use one base, and the reference costs no memory.
A role on another mesh gets its own copy there, and `sync_weights` moves the actor's weights to the rollout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from covey.configs import GRPOConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig
from covey.errors import RecipeError
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, without_lora
from covey.models.weights import load
from covey.parallel.placement import put_rows, row_ways
from covey.parallel.reshard import reshard
from covey.parallel.sharding import shardings
from covey.recipe import validate
from covey.rl.inference import RowScorer
from covey.rl.losses import LossInputs
from covey.rl.rollout import RolloutWorker
from covey.rl.rows import Rows, micro_batches, rows_together
from covey.rl.trainer import MicroBatch, RLTrainer
from covey.tokenizer import Tokenizer
from covey.train.optimizers import learning_rate, make_optimizer
from covey.types import Group


class Role(StrEnum):
    """What a model is for."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REFERENCE = "reference"


@dataclass(frozen=True)
class ClusterConfig:
    """Where the roles live and how they work.

    Attributes:
        role_to_mesh: a mesh for each role; a role that is not named lives with the actor, and an empty table is one
            device.
        training_config: steps, batch, optimizer.
        rollout_config: sampling.
    """

    role_to_mesh: Mapping[Role, Mesh] = field(default_factory=dict)
    training_config: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True)
class _Settings:
    """The parts of a recipe that a cluster gets, under the names that `recipe.validate` knows."""

    rollout: RolloutConfig
    training: RLTrainingConfig

    @classmethod
    def of(cls, config: ClusterConfig) -> "_Settings":
        training = config.training_config
        if not isinstance(training.actor_optimizer, OptimizerConfig):  # an optax transformation has no ranges
            training = replace(training, actor_optimizer=OptimizerConfig())
        return cls(config.rollout_config, training)


class RLCluster:
    """The models of a run.

    Args:
        actor: the model to train (with LoRA adapters, only those are trained), or a source that `models.weights.load`
            knows. The cluster takes over its trainable arrays; read the result from `cluster.actor`.
        reference: the frozen model of the KL term, or a source. When not given it is the actor's base: shared with
            LoRA, a copy of the initial weights otherwise, made only if β asks for it.
        tokenizer: shared by all roles; may be left out when `actor` is a source.
        cluster_config: meshes, training, sampling.
    """

    def __init__(
        self,
        *,
        actor: Decoder | str,
        reference: Decoder | str | None = None,
        tokenizer: Tokenizer | None = None,
        cluster_config: ClusterConfig | None = None,
    ):
        self.config = cluster_config or ClusterConfig()
        validate(_Settings.of(self.config))
        if isinstance(actor, str):
            loaded = load(actor)
            actor, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        if tokenizer is None:
            raise RecipeError("RLCluster got a model but no tokenizer", fix="pass tokenizer=", where="RLCluster")
        reference = load(reference).model if isinstance(reference, str) else reference
        self.tokenizer = tokenizer
        self._actor = self._on_mesh(actor, Role.ACTOR)
        self._reference = None if reference is None else self._on_mesh(reference, Role.REFERENCE)
        self.trainer: RLTrainer | None = None
        self._reference_scorer: tuple[RowScorer, Any] | None = None
        rollout = self._on_mesh(self._actor, Role.ROLLOUT)
        self.rollout = RolloutWorker(rollout, tokenizer, self.config.rollout_config)

    def prepare(self, grpo: GRPOConfig, total_steps: int) -> None:
        """Builds the trainer and, when β asks for it, the reference, for a run of `total_steps` updates."""
        if self.trainer is not None:
            raise RecipeError(
                "this cluster has been trained already, with its own loss and schedule",
                want="one learner a cluster",
                fix="RLCluster(actor=cluster.actor, ...) goes on from its weights",
            )
        training, temperature = self.config.training_config, self.config.rollout_config.temperature
        if grpo.beta and self._reference is None:
            self._reference = self._on_mesh(without_lora(self._actor), Role.REFERENCE)
        if self._reference is not None:
            self._reference = _apart_from(self._reference, self._actor)
        optimizer = make_optimizer(training.actor_optimizer, total_steps)
        self.trainer = RLTrainer(self._actor, optimizer, grpo, temperature)
        self._total_steps = total_steps
        self._actor_scorer = RowScorer(self.trainer.graph, temperature)
        if grpo.beta and self._reference is not None:
            graph, params = nnx.split(self._reference)
            self._reference_scorer = RowScorer(graph, temperature), params
        self.sync_weights()

    def generate(
        self,
        examples: Sequence[Mapping[str, Any]],
        samples: int,
        *,
        step: int = 0,
        config: RolloutConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """Samples each example's prompt `samples` times with the rollout's weights; see `RolloutWorker.generate`."""
        return self.rollout.generate(examples, samples, step=step, config=config, progress=progress)

    def get_ref_per_token_logps(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray] | None:
        """The reference's log-probs, one array a completion; None when β is 0 and nothing needs them."""
        if self._reference_scorer is None:
            return None
        scorer, params = self._reference_scorer
        return scorer(params, rows, lengths, self._micro_batch(rows, Role.REFERENCE))

    def get_old_per_token_logps(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray]:
        """The actor's log-probs before the step's first update, one array a completion."""
        return self._actor_scorer(self._trained.params, rows, lengths, self._micro_batch(rows, Role.ACTOR))

    def update_actor(self, rows: Rows, inputs: LossInputs) -> dict[str, float]:
        """One optimizer step on `rows`, in micro-batches of about `tokens_per_micro_batch`."""
        trainer = self._trained
        parts = micro_batches(MicroBatch(rows, inputs), self._micro_batch(rows, Role.ACTOR))
        return trainer.update(put_rows(part, trainer.trainable) for part in parts)

    def sync_weights(self) -> None:
        """Gives the rollout the actor's weights: the same arrays on one mesh, moved otherwise (the adapters alone with
        LoRA).
        """
        trainer = self._trained
        if self._mesh(Role.ROLLOUT) == self._mesh(Role.ACTOR):
            self.rollout.update_params(trainer.params)
            return
        _, held, rest = split_trainable(nnx.merge(trainer.graph, self.rollout.params))
        # A copy even where the meshes overlap: the trainer's own buffers are given up at its next update.
        moved = reshard(trainer.trainable, held, copy=True)
        self.rollout.update_params(nnx.merge_state(moved, rest))

    def learning_rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0; NaN for an optimizer that is not ours."""
        optimizer = self.config.training_config.actor_optimizer
        if not isinstance(optimizer, OptimizerConfig):
            return float("nan")
        return float(learning_rate(optimizer, self._total_steps)(step))

    @property
    def actor(self) -> Decoder:
        """The actor with its weights as they are now."""
        return self._actor if self.trainer is None else nnx.merge(self.trainer.graph, self.trainer.params)

    def close(self) -> None:
        """Lets go of every array; the cluster cannot be used any more."""
        self.trainer = self._reference = self._reference_scorer = None
        for name in ("rollout", "_actor", "_actor_scorer"):
            self.__dict__.pop(name, None)

    @property
    def _trained(self) -> RLTrainer:
        assert self.trainer is not None, "RLCluster.prepare comes before training"
        return self.trainer

    def _mesh(self, role: Role) -> Mesh | None:
        return self.config.role_to_mesh.get(role, self.config.role_to_mesh.get(Role.ACTOR))

    def _micro_batch(self, rows: Rows, role: Role) -> int:
        """Rows computed at a time: about `tokens_per_micro_batch`, and a share for each device of the role's mesh."""
        tokens = self.config.training_config.tokens_per_micro_batch
        return rows_together(rows.tokens.shape[1], tokens, row_ways(self._mesh(role)))

    def _on_mesh(self, model: Decoder, role: Role) -> Decoder:
        """`model` where the role lives. Arrays are put there even if they are there already: a program is compiled anew
        for arguments whose place was chosen and not defaulted, so all of them are, from the start.
        """
        mesh, (graph, params) = self._mesh(role), nnx.split(model)
        target = jax.tree.map(lambda x: x.sharding, params) if mesh is None else shardings(params, mesh)
        return nnx.merge(graph, reshard(params, target))


def _apart_from(reference: Decoder, actor: Decoder) -> Decoder:
    """`reference` with its own copy of the arrays that training `actor` will overwrite."""
    graph, params = nnx.split(reference)
    taken = set().union(*map(_buffers, jax.tree.leaves(split_trainable(actor)[1])))
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.copy(x) if _buffers(x) & taken else x, params))


def _buffers(x: jax.Array) -> set[int]:
    """Where the pieces of `x` lie in memory: two arrays may share them without being one object."""
    return {piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards}
