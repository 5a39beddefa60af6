"""`RLCluster`: the models by role, the mesh of each, and the tokenizer that they share.

Roles on one mesh share arrays. With LoRA, actor, rollout and reference use one base; the reference costs at most a copy
of the adapters. A role on another mesh gets its own copy there, and `sync_weights` moves the actor's weights to the
rollout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from covey.config.algorithms import algorithm_of
from covey.config.base import Keywords, check_keywords, suggest
from covey.config.schema import GRPOConfig, LoRAConfig, RolloutConfig
from covey.errors import RecipeError
from covey.losses.policy import Surrogate
from covey.models.decoder import Decoder, DecoderOptions, num_parameters
from covey.models.layer_stack import stack_models, unstack_layers
from covey.models.lora import check_rank, has_dropout, split_trainable, with_lora, without_lora
from covey.models.value_model import ValueModel, make_value_model
from covey.packing.bins import compile_cost
from covey.packing.rows import Rows
from covey.parallel import processes
from covey.parallel.arrays import reshard
from covey.parallel.shapes import abstract
from covey.registry import offered
from covey.rl.batches import RowSizes, TrainBatch, policy_loss_fn, put_micro_batches, value_loss_fn
from covey.rl.roles import ClusterConfig, Role, load_models
from covey.rl.rollout_worker import RolloutWorker, StackLoan
from covey.rl.scorers import InferenceWorker, RowScorer, copy_donated_arrays, make_reference, polyak_update
from covey.sampling.logits import SamplingParams
from covey.sampling.responder import ResponderFactory
from covey.text.tokenizer import Tokenizer
from covey.train.optimizers import make_optimizer
from covey.train.trainer import Gradients, Metrics, MicroBatch, Trainer
from covey.types import Group

if TYPE_CHECKING:
    from covey_formats.files import Difference


class RLCluster(Keywords):
    """The models of a run.

    Args:
        actor: the model to train; with LoRA adapters, only those are trained. The cluster takes ownership of its
            trainable arrays; read the result from `cluster.actor`.
        reference: the frozen model of the KL. When not given it is the initial actor, or its base, as
            `GRPOConfig.reference` sets, made only if β is not 0: with LoRA it shares the base, and copies the
            adapters unless they are new and change nothing yet; otherwise it is a copy of the initial weights.
        critic: the value model. When not given and the algorithm has a critic, it is a copy of the actor's base with a
            new head.
        reward: a frozen model that scores completions; its score is one more reward function.
        tokenizer: shared by all roles.
        cluster_config: meshes, training, sampling.
        environments: runs the environment in which the model acts (`covey.EnvironmentRunner`), whose reward is one more
            reward function; None for completions of one turn.

    A cluster of models of shapes (`abstract_decoder`) makes programs and runs nothing.

    A source in place of a model is loaded as by `RLCluster.load`. On accelerators the cluster copies the layers of the
    models given into stacks (`models.layer_stack`): drop other references to them, or their memory stays in use.

    Attributes:
        trainer, critic_trainer: trainers of actor and critic; None before `prepare`, and without a critic.
        row_sizes: sizes of rows and micro-batches.
        shares_weights: whether the rollout samples with the actor's own arrays; see `ClusterConfig`.
        lends_stacks: whether the rollout takes the stacks of layers apart while it samples; see `rollout_worker`.
        measures_agreement: whether updates count the tokens that the trainer's logits would have drawn too.
        rollout: samples with the weights of the last `sync_weights`.
        inference: hosts reference, critic and reward model.
        source, lora: where the actor was loaded from, and its adapters, for the record of a run; "" for a model given.
        scorer, token_scorer: compute the actor's log-probs, and log-probs with entropies.
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
        environments: ResponderFactory | None = None,
    ):
        self.config = cluster_config or ClusterConfig()
        sources = {Role.ACTOR: actor, Role.REFERENCE: reference, Role.CRITIC: critic, Role.REWARD: reward}
        models, tokenizer_of_source, self.source = load_models(sources, self.config)
        self.lora: LoRAConfig | None = None
        if (tokenizer := tokenizer or tokenizer_of_source) is None:
            raise RecipeError("RLCluster got a model but no tokenizer", fix="pass tokenizer=", where="RLCluster")
        on_devices = {role: self.config.place(model, role) for role, model in models.items() if model is not None}
        placed = dict(zip(on_devices, stack_models(list(on_devices.values())), strict=True))
        temperature = self.config.rollout_config.temperature
        self.tokenizer, self._actor = tokenizer, placed.pop(Role.ACTOR)
        self.row_sizes = RowSizes(self.config, self._actor)
        self.shares_weights = self.config.shares_weights
        self.lends_stacks = bool(self._actor.stacked) and self.shares_weights and not self.config.runs_ahead
        # Under dropout the logits of an update do not follow from the weights alone.
        self.measures_agreement = self.config.training_config.token_agreement and not has_dropout(self._actor)
        rollout = self.config.place(self._actor, Role.ROLLOUT)
        if environments is not None and self.config.training_config.off_policy_steps:
            environments.keep_order()
        self.rollout = RolloutWorker(
            rollout, tokenizer, self.config.rollout_config, environments, fixed_shapes=self._actor.fixed_shapes
        )
        self.inference = InferenceWorker(placed, temperature)
        self.scorer = RowScorer.of_logps(self._actor, temperature)
        self.token_scorer = RowScorer.of_token_values(self._actor, temperature)
        self.trainer: Trainer | None = None
        self.critic_trainer: Trainer | None = None
        self._prepared_for: tuple[GRPOConfig, int] | None = None
        self._reference_moves = False

    @classmethod
    def load(
        cls,
        *,
        actor: str,
        reference: Decoder | str | None = None,
        critic: ValueModel | str | None = None,
        reward: ValueModel | str | None = None,
        tokenizer: Tokenizer | None = None,
        cluster_config: ClusterConfig | None = None,
        environments: ResponderFactory | None = None,
        lora: LoRAConfig | None = None,
        **options: Unpack[DecoderOptions],
    ) -> "RLCluster":
        """Load the models of a run.

        Args:
            actor, reference, critic, reward: sources that `models.loading.weights.load` accepts, such as a folder or
                `smollm2-135m`; all but the actor may be models, or None, as for the constructor.
            tokenizer: replaces the tokenizer of the actor's source.
            cluster_config: meshes, training, sampling.
            environments: runs the environment in which the model acts, as for the constructor.
            lora: adapters to train on the actor, in place of all of its weights; their seed is the rollout's.
            options: dtypes and rematerialisation of the models that are loaded; see `models.loading.weights.load`.

        Raises:
            WeightsError: a source is unavailable, incomplete, or not a supported model.
            RecipeError: a keyword is unknown, or the adapters have no rank or a target that the actor lacks.
        """
        _check_load_keywords({"lora": lora, **options})
        config = cluster_config or ClusterConfig()
        sources = {Role.ACTOR: actor, Role.REFERENCE: reference, Role.CRITIC: critic, Role.REWARD: reward}
        models, tokenizer_of_source, source = load_models(sources, config, **options)
        tokenizer = tokenizer or tokenizer_of_source
        if lora is not None:
            models[Role.ACTOR] = with_lora(models[Role.ACTOR], lora, seed=config.rollout_config.seed)
        cluster = cls(**models, tokenizer=tokenizer, cluster_config=config, environments=environments)
        cluster.source, cluster.lora = source, lora
        return cluster

    def prepare(self, config: GRPOConfig, total_steps: int, surrogate: Surrogate | None = None) -> None:
        """Make the trainers, whose learning rates depend on the length of the run, and the models that the algorithm
        needs and that were not given.

        Args:
            config: the algorithm.
            total_steps: optimizer updates of the whole run.
            surrogate: replaces the algorithm's surrogate.

        Raises:
            RecipeError: the cluster was already prepared for another algorithm or length.
        """
        if self._prepared_for == (config, total_steps):
            return
        if self._prepared_for is not None:
            raise RecipeError(
                "this cluster has been prepared already, with another loss or schedule",
                want="one learner a cluster",
                fix="RLCluster(actor=cluster.actor, ...) goes on from its weights",
            )
        self._prepared_for = config, total_steps
        self.row_sizes.compile_cost = compile_cost(
            num_parameters(self._actor), total_steps, self.row_sizes.fixed_shapes
        )
        algorithm = algorithm_of(config)
        if algorithm.needs_reference:
            self._host_reference(config)
        else:
            self.inference.release(Role.REFERENCE)
        self.trainer = self.make_trainer(config, total_steps, surrogate)
        if algorithm.needs_critic:
            if not self.inference.has(Role.CRITIC):
                new = self.config.place(make_value_model(without_lora(self._actor)), Role.CRITIC)
                self.inference.host(Role.CRITIC, new)
            optimizer = make_optimizer(self.config.training_config.critic_optimizer, total_steps)
            loss, critic = value_loss_fn(algorithm.value_clip), self.inference.model(Role.CRITIC)
            self.critic_trainer = Trainer(critic, optimizer, loss, "critic")
        else:
            self.inference.release(Role.CRITIC)
        self.sync_weights()
        if self.lends_stacks:
            self._lend_stacks()

    def make_trainer(self, config: GRPOConfig, total_steps: int, surrogate: Surrogate | None = None) -> Trainer:
        """Make the trainer of the actor; arguments as for `prepare`."""
        optimizer = make_optimizer(self.config.training_config.actor_optimizer, total_steps)
        sampling_params = SamplingParams.from_config(self.config.rollout_config)
        loss = policy_loss_fn(algorithm_of(config), sampling_params, surrogate)
        return Trainer(self._actor, optimizer, loss)

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
        return self.inference.scores(Role.REFERENCE, rows, lengths, self.row_sizes.rows_at_a_time(rows, Role.REFERENCE))

    def get_old_per_token_logps(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray]:
        """Compute the actor's log-probs before the step's first update, one array per completion."""
        return self.scorer(self._trainer(Role.ACTOR).params, rows, lengths, self.row_sizes.rows_at_a_time(rows))[0]

    def get_token_values(self, rows: Rows, lengths: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Compute log-probs and entropies under the actor's current weights: one array of each per completion."""
        params = self._trainer(Role.ACTOR).params
        logps, entropies = self.token_scorer(params, rows, lengths, self.row_sizes.rows_at_a_time(rows))
        return logps, entropies

    def get_values(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray]:
        """Compute the critic's value of the state before each token, one array per completion."""
        return self.inference.scores(Role.CRITIC, rows, lengths, self.row_sizes.rows_at_a_time(rows, Role.CRITIC))

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
        return self._trainer(Role.ACTOR).update(self._micro_batches(Role.ACTOR, batches))

    def update_critic(self, batches: Iterable[TrainBatch]) -> Metrics:
        """Make one optimizer step of the critic on all of `batches`; the inference worker gets the new weights.

        Raises:
            RecipeError: there is no critic.
        """
        return self.apply(Role.CRITIC, self.gradients(Role.CRITIC, batches))

    def gradients(self, role: Role, batches: Iterable[TrainBatch]) -> Gradients:
        """Compute the gradients of `update_actor` or `update_critic` without applying them.

        Raises:
            RecipeError: there is no critic.
            NumbersError: the loss or the gradient is not finite.
        """
        return self._trainer(role).gradients(self._micro_batches(role, batches))

    def apply(self, role: Role, gradients: Gradients) -> Metrics:
        """Make one optimizer step of the actor or the critic with these gradients."""
        trainer = self._trainer(role)
        metrics = trainer.apply(gradients)
        if role == Role.CRITIC:
            self.inference.update_params(role, trainer.params)
        return metrics

    def skip_update(self) -> None:
        """Count a skipped update of actor and critic as a step; see `Trainer.skip`."""
        self._trainer(Role.ACTOR).skip()
        if self.critic_trainer is not None:
            self.critic_trainer.skip()

    def update_reference(self, mixing: float) -> None:
        """Set reference ← α·actor + (1 − α)·reference; see `scorers.polyak_update`."""
        reference = self.inference.params[Role.REFERENCE]
        self.inference.update_params(Role.REFERENCE, polyak_update(reference, self.program_actor, mixing))

    def sync_weights(self) -> None:
        """Give the rollout the actor's weights: the same arrays on one mesh, copies otherwise (with LoRA, of the
        adapters alone).
        """
        if self.shares_weights:
            self.rollout.update_params(self._trainer(Role.ACTOR).params)
        else:
            self.rollout.update_params(self.copy_weights())

    def copy_weights(self) -> Any:
        """Return the actor's trainable weights where the rollout has them, for `RolloutWorker.update_params`: copies,
        which no later update changes.
        """
        trainer = self._trainer(Role.ACTOR)
        if self.shares_weights:
            return jax.tree.map(jnp.copy, trainer.trainable)
        _, held, _ = split_trainable(nnx.merge(trainer.graph, self.rollout.params))
        # A copy even where the meshes overlap: the trainer donates its own buffers at its next update. In several
        # processes a thread samples only on other devices, and no copy is needed.
        return reshard(trainer.trainable, held, copy=processes.here().count == 1)

    def state(self) -> dict[str, Any]:
        """Return the arrays of a checkpoint as nested dicts: the actor's part has the names of `Trainer.state`."""
        return self._collect(Trainer.state, lambda params: params)

    def state_shapes(self) -> dict[str, Any]:
        """Return the shapes of `state()` with their shardings."""
        return self._collect(Trainer.state_shapes, abstract)

    def _collect(
        self, of_trainer: Callable[[Trainer], dict[str, Any]], of_params: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Return the arrays of a checkpoint, or their shapes, by the functions for a trainer and for parameters."""
        state = of_trainer(self._trainer(Role.ACTOR))
        if self.critic_trainer is not None:
            state["critic"] = of_trainer(self.critic_trainer)
        if self._reference_moves:
            state["reference"] = self.inference.state(Role.REFERENCE, of_params)
        return state

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Restore a checkpoint's `state()` at update `step`."""
        self._trainer(Role.ACTOR).load_state(state, step)
        if self.critic_trainer is not None:
            self.critic_trainer.load_state(state["critic"], step)
            self.inference.update_params(Role.CRITIC, self.critic_trainer.params)
        if self._reference_moves:
            self.inference.load_state(Role.REFERENCE, state["reference"])
        self.sync_weights()

    @property
    def actor(self) -> Decoder:
        """Actor with its current weights, its layers a list; on accelerators their arrays are copies."""
        return unstack_layers(self.program_actor)

    @property
    def program_actor(self) -> Decoder:
        """Actor with its current weights as programs take it: on accelerators with stacks of layers."""
        actor: Decoder = self._actor
        if self.trainer is not None:
            actor = nnx.merge(self.trainer.graph, self.trainer.params)
        return actor

    def save(self, folder: str | Path) -> "Difference":
        """Write the actor with its tokenizer as a Hugging Face folder, adapters merged into the base.

        The model is read back and compared before the folder is put in place.

        Args:
            folder: a new or an empty folder.

        Returns:
            The difference between the logits of the written model and of the actor.

        Raises:
            CoveyError: `folder` is in use, or cannot be written.
            WeightsError: the actor's family cannot be written, or the written model differs from the actor.
        """
        write_hf, sampling = offered("covey.exports", "hf"), self.config.rollout_config
        return write_hf(self.actor, self.tokenizer, Path(folder), sampling=sampling)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release all arrays; the cluster cannot be used afterwards."""
        self.trainer = self.critic_trainer = None
        for name in ("rollout", "_actor", "scorer", "token_scorer", "inference"):
            self.__dict__.pop(name, None)

    def _trainer(self, role: Role) -> Trainer:
        if role == Role.CRITIC and self.critic_trainer is None:
            raise RecipeError("this cluster has no critic to update", fix="RLCluster(critic=...) and PPOLearner")
        trainer = self.critic_trainer if role == Role.CRITIC else self.trainer
        assert trainer is not None, "RLCluster.prepare comes before training"
        return trainer

    def _micro_batches(self, role: Role, batches: Iterable[TrainBatch]) -> Iterator[MicroBatch]:
        """Yield the inputs of the loss of actor or critic, in pieces of `max_tokens_per_micro_batch`."""
        for batch in batches:
            loss_batch, denominator = batch.loss_batch(role)
            size = self.row_sizes.rows_at_a_time(batch.rows, role)
            yield from put_micro_batches(loss_batch, denominator, self._trainer(role).trainable, size)

    def _host_reference(self, config: GRPOConfig) -> None:
        """Host the reference that was given or the actor's initial weights, apart from the arrays that are trained."""
        reference = (
            self.inference.model(Role.REFERENCE)
            if self.inference.has(Role.REFERENCE)
            else self.config.place(make_reference(self._actor, config), Role.REFERENCE)
        )
        self._reference_moves = bool(config.reference_every_n_updates)
        self.inference.host(Role.REFERENCE, copy_donated_arrays(reference, self._actor, self._reference_moves))

    def _lend_stacks(self) -> None:
        """Let the rollout take the stacks of all models apart while it samples; it may share them with any."""
        trainers = [trainer for trainer in (self.trainer, self.critic_trainer) if trainer is not None]
        states = [(trainer, name) for trainer in trainers for name in ("trainable", "frozen")]
        holders = [*states, (self.rollout, "params"), (self.inference, "params")]
        self.rollout.loan = StackLoan(self.rollout.weights.stacks, holders)
        graph, params = nnx.split(self._actor)
        self._actor = nnx.merge(graph, abstract(params))  # the trainer has the arrays


def _check_load_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that `RLCluster.load` lacks, before anything is loaded."""
    known = {**get_type_hints(DecoderOptions), "lora": LoRAConfig | None}
    check_keywords("RLCluster.load", keywords, known, partial(suggest, RLCluster, more=known))
    if (lora := keywords["lora"]) is not None:
        check_rank(lora)
