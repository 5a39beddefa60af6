"""`RLCluster`: the models by role, the mesh of each, and the tokenizer that they share.

Roles on one mesh share arrays: with LoRA, actor, rollout and reference use one base, and the reference costs no memory,
or that of the adapters that a run began with. A role on another mesh gets its own copy there, and
`sync_weights` moves the actor's weights to the rollout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from covey.config.algorithms import Algorithm, algorithm_of
from covey.config.keywords import Keywords
from covey.config.recipe import validate
from covey.config.schema import GRPOConfig, OptimizerConfig, RolloutConfig
from covey.errors import RecipeError
from covey.losses.policy import Surrogate
from covey.models.decoder import Decoder
from covey.models.loading.weights import load
from covey.models.lora import changes_base, merged, split_trainable, without_lora
from covey.models.value_model import ValueModel, load_value_model, value_model
from covey.packing.rows import Rows, rows_at_a_time
from covey.parallel import distributed
from covey.parallel.placement import weight_shardings
from covey.parallel.reshard import reshard
from covey.rl.batch import TrainBatch, policy_loss_fn, policy_micro_batches, value_loss_fn, value_micro_batches
from covey.rl.inference import InferenceWorker, RowScorer
from covey.rl.roles import ClusterConfig, Role, Settings
from covey.rl.rollout import RolloutWorker
from covey.text.tokenizer import Tokenizer
from covey.train.optimizers import learning_rate, make_optimizer
from covey.train.trainer import Gradients, Metrics, MicroBatch, Trainer
from covey.types import Group

ModelT = TypeVar("ModelT", Decoder, ValueModel)


class RLCluster(Keywords):
    """The models of a run.

    Args:
        actor: the model to train (with LoRA adapters, only those are trained), or a source that
            `models.loading.weights.load` accepts. The cluster takes ownership of its trainable arrays; read the
            result from `cluster.actor`.
        reference: the frozen model of the KL, or a source. When not given it is the initial actor, or its base,
            as `GRPOConfig.reference` sets, made only if β is not 0: with LoRA it shares the base, and copies the
            adapters unless they are new and change nothing yet; otherwise it is a copy of the initial weights.
        critic: the value model, or a source. When not given and the algorithm has a critic, it is a copy of the
            actor's base with a new head.
        reward: a frozen model that scores completions, or a source; its score is one more reward function.
        tokenizer: shared by all roles; optional when `actor` is a source.
        cluster_config: meshes, training, sampling.
    """

    def __init__(
        self,
        *,
        actor: Decoder | str,
        reference: Decoder | str | None = None,
        critic: ValueModel | str | None = None,
        reward: ValueModel | str | None = None,
        tokenizer: Tokenizer | None = None,
        cluster_config: ClusterConfig | None = None,
    ):
        self.config = cluster_config or ClusterConfig()
        validate(Settings.of(self.config))
        mesh = self.config.mesh
        if isinstance(actor, str):
            loaded = load(actor, mesh=mesh(Role.ACTOR))
            actor, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        if tokenizer is None:
            raise RecipeError("RLCluster got a model but no tokenizer", fix="pass tokenizer=", where="RLCluster")
        self.tokenizer = tokenizer
        self.trainer: Trainer | None = None
        self.critic_trainer: Trainer | None = None
        self._prepared_for: tuple[GRPOConfig, int] | None = None
        self._actor = self._on_mesh(actor, Role.ACTOR)
        if isinstance(reference, str):
            reference = load(reference, mesh=mesh(Role.REFERENCE)).model
        self._reference = None if reference is None else self._on_mesh(reference, Role.REFERENCE)
        if isinstance(critic, str):
            critic = load_value_model(critic, new_head=True, mesh=mesh(Role.CRITIC)).model
        self._critic = None if critic is None else self._on_mesh(critic, Role.CRITIC)
        if isinstance(reward, str):
            reward = load_value_model(reward, mesh=mesh(Role.REWARD)).model
        self._reward = None if reward is None else self._on_mesh(reward, Role.REWARD)
        rollout = self._on_mesh(self._actor, Role.ROLLOUT)
        self.rollout = RolloutWorker(rollout, tokenizer, self.config.rollout_config)
        self.inference = self._hosting(self._reference, self._critic)

    def prepare(self, config: GRPOConfig, total_steps: int, surrogate: Surrogate | None = None) -> None:
        """Build the trainers and the frozen models that the algorithm needs, for a run of `total_steps` updates.

        Raises:
            RecipeError: the cluster was already prepared for another algorithm or length.
        """
        if self._prepared_for is not None:
            self._refuse_another(config, total_steps)
            return
        algorithm, training = algorithm_of(config), self.config.training_config
        temperature = self.config.rollout_config.temperature
        self._prepared_for = config, total_steps
        if algorithm.beta and self._reference is None:
            bare = config.reference == "base" or not changes_base(self._actor)
            self._reference = self._on_mesh(without_lora(self._actor) if bare else self._actor, Role.REFERENCE)
        if self._reference is not None:
            moves = bool(config.reference_every_n_updates)
            self._reference = _apart_from(merged(self._reference) if moves else self._reference, self._actor, all=moves)
        optimizer = make_optimizer(training.actor_optimizer, total_steps)
        self.trainer = Trainer(self._actor, optimizer, policy_loss_fn(algorithm, temperature, surrogate))
        self._old_scorer = RowScorer(self.trainer.graph, temperature)
        if algorithm.has_critic:
            self._prepare_critic(algorithm, total_steps)
        self.inference = self._hosting(
            self._reference if algorithm.beta else None, self._critic if algorithm.has_critic else None
        )
        self.sync_weights()

    def generate(
        self,
        examples: Sequence[Mapping[str, Any]],
        samples: int,
        *,
        step: int = 0,
        first: int = 0,
        config: RolloutConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """Sample each example's prompt `samples` times with the rollout's weights; see `RolloutWorker.generate`."""
        return self.rollout.generate(examples, samples, step=step, first=first, config=config, progress=progress)

    def get_ref_per_token_logps(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray]:
        """Compute the reference's log-probs, one array per completion.

        Raises:
            RecipeError: there is no reference, as when β is 0.
        """
        return self.inference.ref_logps(rows, lengths, self.rows_at_a_time(rows, Role.REFERENCE))

    def get_old_per_token_logps(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray]:
        """Compute the actor's log-probs before the step's first update, one array per completion."""
        return self._old_scorer(self._trained.params, rows, lengths, self.rows_at_a_time(rows, Role.ACTOR))

    def get_values(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray]:
        """Compute the critic's value of the state before each token, one array per completion."""
        return self.inference.values(rows, lengths, self.rows_at_a_time(rows, Role.CRITIC))

    def get_rewards(self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Compute the reward model's score of each completion after its prompt."""
        training = self.config.training_config
        return self.inference.rewards(
            prompt_ids,
            completion_ids,
            row_length=training.row_length,
            max_tokens=training.max_tokens_per_micro_batch,
            mesh=self.config.mesh(Role.REWARD),
        )

    def update_actor(self, batches: Iterable[TrainBatch]) -> Metrics:
        """Make one optimizer step of the actor on all of `batches`, in pieces of `max_tokens_per_micro_batch`."""
        return self._trained.update(self._actor_parts(batches))

    def actor_gradients(self, batches: Iterable[TrainBatch]) -> Gradients:
        """Compute the gradients of `update_actor` without applying them.

        Raises:
            NumbersError: the loss or the gradient is not finite.
        """
        return self._trained.gradients(self._actor_parts(batches))

    def apply_actor(self, gradients: Gradients) -> Metrics:
        """Make one optimizer step of the actor with these gradients."""
        return self._trained.apply(gradients)

    def update_critic(self, batches: Iterable[TrainBatch]) -> Metrics:
        """Make one optimizer step of the critic on all of `batches`; the inference worker gets the new weights.

        Raises:
            RecipeError: there is no critic.
        """
        return self.apply_critic(self.critic_gradients(batches))

    def critic_gradients(self, batches: Iterable[TrainBatch]) -> Gradients:
        """Compute the gradients of `update_critic` without applying them.

        Raises:
            RecipeError: there is no critic.
            NumbersError: the loss or the gradient is not finite.
        """
        trainer, mesh = self.critic_trainer, self.config.mesh(Role.CRITIC)
        if trainer is None:
            raise RecipeError("this cluster has no critic to update", fix="RLCluster(critic=...) and PPOLearner")
        return trainer.gradients(value_micro_batches(batches, trainer.trainable, mesh, self._max_tokens))

    def apply_critic(self, gradients: Gradients) -> Metrics:
        """Make one optimizer step of the critic with these gradients and give the inference worker the new weights."""
        assert self.critic_trainer is not None, "the gradients came from a critic"
        metrics = self.critic_trainer.apply(gradients)
        self.inference.update_params(Role.CRITIC, self.critic_trainer.params)
        return metrics

    def skip_update(self) -> None:
        """Count a skipped update of actor and critic as a step; see `Trainer.skip`."""
        self._trained.skip()
        if self.critic_trainer is not None:
            self.critic_trainer.skip()

    def update_reference(self, mixing: float) -> None:
        """Set reference ← α·actor + (1 − α)·reference, adapters merged (Gorbatovski et al., 2024, TR-DPO, eq. 5)."""
        _, actor = nnx.split(merged(self.actor))
        held = self.inference.params[Role.REFERENCE]
        moved = reshard(actor, jax.tree.map(lambda x: x.sharding, held), copy=True)
        self.inference.update_params(Role.REFERENCE, _mixed(held, moved, mixing))

    def sync_weights(self) -> None:
        """Give the rollout the actor's weights: the same arrays on one mesh, copies otherwise (with LoRA, of the
        adapters alone).
        """
        trainer = self._trained
        if self.config.mesh(Role.ROLLOUT) == self.config.mesh(Role.ACTOR):
            self.rollout.update_params(trainer.params)
            return
        _, held, rest = split_trainable(nnx.merge(trainer.graph, self.rollout.params))
        # A copy even where the meshes overlap: the trainer donates its own buffers at its next update.
        moved = reshard(trainer.trainable, held, copy=True)
        self.rollout.update_params(nnx.merge_state(moved, rest))

    def state(self) -> dict[str, Any]:
        """Return the arrays of a checkpoint as nested dicts: the actor's part has the names of `Trainer.state`."""
        state = self._trained.state()
        if self.critic_trainer is not None:
            state["critic"] = self.critic_trainer.state()
        if self._reference_moves:
            state["reference"] = nnx.to_pure_dict(self.inference.params[Role.REFERENCE])
        return state

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Restore a checkpoint's `state()` at update `step`."""
        self._trained.load_state(state, step)
        if self.critic_trainer is not None:
            self.critic_trainer.load_state(state["critic"], step)
            self.inference.update_params(Role.CRITIC, self.critic_trainer.params)
        if self._reference_moves:
            nnx.replace_by_pure_dict(self.inference.params[Role.REFERENCE], state["reference"])
        self.sync_weights()

    def learning_rate(self) -> float:
        """Return the actor's learning rate in the last step; NaN for a custom optax optimizer."""
        optimizer = self.config.training_config.actor_optimizer
        if not isinstance(optimizer, OptimizerConfig) or self._prepared_for is None:
            return float("nan")
        return float(learning_rate(optimizer, self._prepared_for[1])(self._trained.step - 1))

    @property
    def actor(self) -> Decoder:
        """Actor with its current weights."""
        return self._actor if self.trainer is None else nnx.merge(self.trainer.graph, self.trainer.params)

    @property
    def has_reward_model(self) -> bool:
        """True when a model has the role `reward`."""
        return self._reward is not None

    def close(self) -> None:
        """Release all arrays; the cluster cannot be used afterwards."""
        self.trainer = self.critic_trainer = self._reference = self._critic = self._reward = None
        for name in ("rollout", "_actor", "_old_scorer", "inference"):
            self.__dict__.pop(name, None)

    @property
    def _trained(self) -> Trainer:
        assert self.trainer is not None, "RLCluster.prepare comes before training"
        return self.trainer

    @property
    def _max_tokens(self) -> int:
        return self.config.training_config.max_tokens_per_micro_batch

    @property
    def _reference_moves(self) -> bool:
        config = self._prepared_for and self._prepared_for[0]
        return bool(config and config.reference_every_n_updates and self.inference.has(Role.REFERENCE))

    def _refuse_another(self, config: GRPOConfig, total_steps: int) -> None:
        if self._prepared_for != (config, total_steps):
            raise RecipeError(
                "this cluster has been prepared already, with another loss or schedule",
                want="one learner a cluster",
                fix="RLCluster(actor=cluster.actor, ...) goes on from its weights",
            )

    def _hosting(self, reference: Decoder | None, critic: ValueModel | None) -> InferenceWorker:
        models = {Role.REFERENCE: reference, Role.CRITIC: critic, Role.REWARD: self._reward}
        hosted = {role: model for role, model in models.items() if model is not None}
        return InferenceWorker(hosted, self.config.rollout_config.temperature)

    def _prepare_critic(self, algorithm: Algorithm, total_steps: int) -> None:
        training = self.config.training_config
        if self._critic is None:
            self._critic = self._on_mesh(value_model(without_lora(self._actor)), Role.CRITIC)
        optimizer = make_optimizer(training.critic_optimizer, total_steps)
        self.critic_trainer = Trainer(self._critic, optimizer, value_loss_fn(algorithm.value_clip), "critic")

    def _actor_parts(self, batches: Iterable[TrainBatch]) -> Iterator[MicroBatch]:
        mesh = self.config.mesh(Role.ACTOR)
        return policy_micro_batches(batches, self._trained.trainable, mesh, self._max_tokens)

    def rows_at_a_time(self, rows: Rows, role: Role = Role.ACTOR) -> int:
        """Return how many rows `role` computes together."""
        return rows_at_a_time(rows, self.config.mesh(role), self._max_tokens)

    def _on_mesh(self, model: ModelT, role: Role) -> ModelT:
        """Put `model` on the role's mesh. Arrays already there are put too: JAX recompiles for arguments whose device
        was chosen and not defaulted, so it is chosen for all of them from the start.
        """
        mesh, (graph, params) = self.config.mesh(role), nnx.split(model)
        distributed.refuse_foreign(mesh, role)
        return nnx.merge(graph, reshard(params, weight_shardings(params, mesh)))


def _apart_from(reference: Decoder, actor: Decoder, all: bool = False) -> Decoder:
    """Return `reference` with its own copy of the arrays that training `actor` will overwrite, or of all."""
    graph, params = nnx.split(reference)
    taken = set().union(*map(_buffers, jax.tree.leaves(split_trainable(actor)[1])))
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.copy(x) if all or _buffers(x) & taken else x, params))


def _buffers(x: jax.Array) -> set[int]:
    """Return the memory addresses of the shards of `x`: two arrays may share them without being one object."""
    return {piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards}


@jax.jit
def _mixed(held: Any, moved: Any, mixing: float) -> Any:
    """Compute α·moved + (1 − α)·held in float32, rounded to the dtype of `held`."""
    mix = lambda h, m: (mixing * m.astype(jnp.float32) + (1 - mixing) * h.astype(jnp.float32)).astype(h.dtype)  # noqa: E731
    return jax.tree.map(mix, held, moved)
