"""Programs of policy and critic in a run of reinforcement learning, built from the run's configs without an array.

The devices need not be there: a mesh may be made of the devices of a description (`jax.experimental.topologies`). Each
program is built where the run builds it (`RowScorer`, `train.programs`, `sampling.device`), and so is the run's own.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.policy import Surrogate
from covey.models.decoder import Decoder
from covey.models.dtypes import round_for_sampling, sampling_type, with_rounded_head
from covey.models.layer_stack import stack_layers, unstack_layers
from covey.models.lora import split_trainable
from covey.models.value_model import ValueModel
from covey.packing.bins import micro_batch_sizes, most_rows, row_length_bucket
from covey.packing.rows import abstract_rows
from covey.parallel.programs import Program
from covey.parallel.sharding import num_row_shards, place_abstract, rows_placement
from covey.rl.inference import RowScorer, TokenValueScorer, ValueScorer
from covey.rl.micro_batches import abstract_policy_batch, abstract_value_batch, policy_loss_fn, value_loss_fn
from covey.rl.roles import ClusterConfig, Role
from covey.rl.stage_sizes import stage_sizes
from covey.rl.token_values import longest_shown
from covey.sampling.device import Programs
from covey.sampling.logits import SamplingParams
from covey.sampling.scheduler import Scheduler
from covey.train.optimizers import make_optimizer
from covey.train.programs import LossFn, UpdatePrograms


def policy_training(
    config: ClusterConfig, grpo: GRPOConfig, total_steps: int, surrogate: Surrogate | None = None
) -> tuple[optax.GradientTransformation, LossFn]:
    """Return the optimizer and the loss of the policy.

    Args:
        config: training and sampling.
        grpo: the algorithm.
        total_steps: optimizer updates of the whole run.
        surrogate: replaces the algorithm's surrogate.
    """
    optimizer = make_optimizer(config.training_config.actor_optimizer, total_steps)
    return optimizer, policy_loss_fn(algorithm_of(grpo), config.rollout_config.temperature, surrogate)


def value_training(
    config: ClusterConfig, grpo: GRPOConfig, total_steps: int
) -> tuple[optax.GradientTransformation, LossFn]:
    """Return the optimizer and the loss of the critic; arguments as for `policy_training`."""
    optimizer = make_optimizer(config.training_config.critic_optimizer, total_steps)
    return optimizer, value_loss_fn(algorithm_of(grpo).value_clip)


class CriticPrograms:
    """Programs of the critic, by what they do; see `Program`.

    Args:
        critic: with shapes in place of arrays, not yet on its devices.
        config: meshes, training.
        grpo: the algorithm.
        total_steps: optimizer updates of the whole run.
        device: the device of a critic that has no mesh.
    """

    def __init__(
        self,
        critic: ValueModel,
        config: ClusterConfig,
        grpo: GRPOConfig,
        *,
        total_steps: int,
        device: jax.Device | None = None,
    ):
        placed = stack_layers(place_abstract(critic, place_of(Role.CRITIC, config, device)))
        graph, self._params = nnx.split(placed)
        self._scorer = ValueScorer(graph)
        self._update = UpdatePrograms(placed, *value_training(config, grpo, total_steps))

    def score(self, count: int, length: int) -> Program:
        """Return the program of the values of `count` rows of `length` tokens."""
        return self._scorer.program(self._params, count, length)

    def gradients(self, count: int, length: int) -> Program:
        """Return the program of the gradients of a micro-batch of `count` rows of `length` tokens."""
        return self._update.gradients_program(
            abstract_value_batch(abstract_rows(count, length, rows_placement(self._params)))
        )

    def apply(self) -> Program:
        """Return the program of the optimizer's update."""
        return self._update.apply_program()


def place_of(role: Role, config: ClusterConfig, device: jax.Device | None) -> Mesh | jax.Device:
    """Return the mesh of `role`, or `device` if it has none."""
    place = config.mesh(role) or device
    assert place is not None, f"the {role} has neither a mesh nor a device"
    return place


class RLPrograms:
    """Programs of the policy, by what they do; see `Program`.

    Args:
        actor: the policy, with shapes in place of arrays (`abstract_decoder`) and not yet on its devices.
        config: meshes of actor and rollout, training, sampling.
        grpo: the algorithm.
        total_steps: optimizer updates of the whole run.
        stop_ids: tokens that end a completion.
        pause_id: token that ends a call of the tool; None without a tool.
        waits: whether samples wait for an environment, so that the batch keeps its size.
        device: the device of a role that has no mesh.
        platform: the platform for which programs are built, if it is not that of the devices.

    Attributes:
        model: the actor in shapes, on its devices.
        rollout: shapes of the rollout's weights, on its devices.
        synced: shapes of those that it gets after each update, if its devices are not the actor's.
        fixed_shapes: see `Decoder.fixed_shapes`.
        rounds: whether a rollout first makes copies of weights: in another type, or out of stacks of layers.
    """

    def __init__(
        self,
        actor: Decoder,
        config: ClusterConfig,
        grpo: GRPOConfig,
        *,
        total_steps: int,
        stop_ids: Sequence[int],
        pause_id: int | None = None,
        waits: bool = False,
        device: jax.Device | None = None,
        platform: str | None = None,
    ):
        self.config, self.grpo, self.pause_id, self.waits = config, grpo, pause_id, waits

        def placed(role: Role) -> Decoder:
            return stack_layers(place_abstract(actor, place_of(role, config, device), platform))

        self.model = placed(Role.ACTOR)
        graph, self._actor = nnx.split(self.model)
        self._scorer = RowScorer(graph, config.rollout_config.temperature)
        self._token_scorer = TokenValueScorer(graph, config.rollout_config.temperature)
        self._update = UpdatePrograms(self.model, *policy_training(config, grpo, total_steps))
        rollout, self.fixed_shapes = placed(Role.ROLLOUT), self.model.fixed_shapes
        self.rollout = nnx.state(rollout)
        apart = config.mesh(Role.ROLLOUT) != config.mesh(Role.ACTOR)
        self.synced = split_trainable(rollout)[1] if apart else None
        graph, params = nnx.split(unstack_layers(with_rounded_head(rollout)))
        self._rollout = round_for_sampling(params, sampling_type(rollout))
        both = zip(jax.tree.leaves(params), jax.tree.leaves(self._rollout), strict=True)
        self.rounds = bool(rollout.stacked) or any(old.dtype != new.dtype for old, new in both)
        own = SamplingParams.from_config(config.rollout_config) if self.fixed_shapes else None
        self._sampler = Programs(graph, tuple(sorted(stop_ids)), own)

    def score(self, count: int, length: int) -> Program:
        """Return the program of the actor's log-probs of `count` rows of `length` tokens."""
        return self._scorer.program(self._actor, count, length)

    def token_values(self, count: int, length: int) -> Program:
        """Return the program of the log-probs and entropies of `count` rows of `length` tokens."""
        return replace(self._token_scorer.program(self._actor, count, length), name="token values")

    def gradients(self, count: int, length: int) -> Program:
        """Return the program of the gradients of a micro-batch of `count` rows of `length` tokens."""
        rows = abstract_rows(count, length, rows_placement(self._actor))
        a = algorithm_of(self.grpo)
        batch = abstract_policy_batch(rows, old_logps=a.needs_old_logps, ref_logps=a.needs_reference)
        return self._update.gradients_program(batch)

    def apply(self) -> Program:
        """Return the program of the optimizer's update."""
        return self._update.apply_program()

    def prefill(self, prompts: int, length: int) -> Program:
        """Return the program that prefills so many prompts of `length` tokens."""
        return self._sampler.prefill_program(self._rollout, prompts, length)

    def insert(self, slots: int, cache_length: int, prompts: int, prompt_length: int) -> list[Program]:
        """Return the programs that insert such prompts into slots; see `Programs.insert_programs`."""
        return self._sampler.insert_programs(self._rollout, slots, cache_length, prompts, prompt_length)

    def decode(self, slots: int, cache_length: int) -> Program:
        """Return the program of a chunk of decode steps for slots with room for `cache_length` tokens each."""
        config = self.config.rollout_config
        return self._sampler.decode_program(self._rollout, slots, cache_length, config, self.pause_id)

    def scheduler(self) -> Scheduler:
        """Return the scheduler of a rollout whose prompts are as long as they may be."""
        config, samples = self.config, self.grpo.num_generations
        share = -(-config.training_config.prompts_per_step // self.num_processes)
        prompts = min(stage_sizes(config.training_config, samples).rollout, share)
        resizes = self._sampler.cache_layout(self._rollout).divided and not self.waits
        lengths = [config.rollout_config.max_prompt_length] * prompts
        return Scheduler(lengths, [samples] * prompts, config.rollout_config, resizes=resizes, fixed=self.fixed_shapes)

    @property
    def num_processes(self) -> int:
        """Number of processes that have devices of the actor; each samples its share of the prompts on its own."""
        mesh = self.config.mesh(Role.ACTOR)
        return len({device.process_index for device in mesh.devices.flat}) if mesh else 1

    def row_sizes(self) -> list[tuple[int, int]]:
        """Return the numbers of rows of a micro-batch and their length, the largest first: all of them where few
        programs are wanted, else the largest.
        """
        training = self.config.training_config
        length, tokens = row_length_bucket(training.row_length), training.max_tokens_per_micro_batch
        shards = num_row_shards(self.config.mesh(Role.ACTOR))
        sizes = micro_batch_sizes(length, tokens, shards) if self.fixed_shapes else [most_rows(length, tokens, shards)]
        return [(size, length) for size in sizes]

    def shown_size(self) -> tuple[int, int]:
        """Return the most rows of a micro-batch of completions with token values, and their length."""
        if self.fixed_shapes:
            return self.row_sizes()[0]
        config, training = self.config, self.config.training_config
        rows = longest_shown(config.rollout_config, self.grpo.num_generations, training.row_length)
        return config.rows_at_a_time(rows), rows.tokens.shape[1]

    def largest(self) -> list[Program]:
        """Return the programs of the largest shapes that the configs provide for."""
        rows, scheduler = self.row_sizes()[0], self.scheduler()
        slots = len(scheduler.slots), scheduler.longest_cache
        return [
            self.score(*rows),
            self.token_values(*self.shown_size()),
            self.gradients(*rows),
            self.apply(),
            self.prefill(*scheduler.prefill_shape),
            *self.insert(*slots, *scheduler.prefill_shape),
            self.decode(*slots),
        ]
