"""Programs of a run, by what they do, and the sizes in which a run calls them.

A cluster or a supervised learner makes them: the run's own, or one of models of shapes. Then no array is made, and the
devices need not be there: a mesh may be made of the devices of a description (`jax.experimental.topologies`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from covey.config.algorithms import algorithm_of, with_correction
from covey.config.schema import GRPOConfig
from covey.losses.policy import LossInputs
from covey.models.decoder import Decoder
from covey.models.lora import has_lora
from covey.packing.bins import micro_batch_sizes, most_rows, row_length_bucket
from covey.packing.rows import Rows
from covey.parallel.arrays import num_row_shards, rows_placement
from covey.parallel.shapes import abstract
from covey.rl.batches import RowBatch
from covey.rl.cluster import RLCluster
from covey.rl.roles import Role
from covey.rl.stage_sizes import stage_sizes
from covey.sampling.scheduler import BatchRequirements, Scheduler
from covey_plan.program import Program
from covey_plan.sampler_programs import SamplerPrograms
from covey_plan.schedule import fitted
from covey_plan.update_programs import (
    abstract_rows,
    apply_program,
    gradients_program,
    reduce_programs,
    score_program,
)
from covey_report.token_values import longest_shown, token_values_interval
from covey_sft.learner import SFTLearner


class RLPrograms:
    """Programs of the policy; see `Program`.

    Args:
        cluster: the models, of arrays or of shapes.
        grpo: the algorithm.
        total_steps: optimizer updates of the whole run.
        is_async: whether samples wait for an environment, so that the batch keeps its size.

    Attributes:
        trainer: the actor's.
        rollout_params: weights that a rollout samples with.
    """

    def __init__(self, cluster: RLCluster, grpo: GRPOConfig, *, total_steps: int, is_async: bool = False):
        grpo = with_correction(grpo, cluster.config.training_config.off_policy_steps)
        self.cluster, self.config, self.grpo, self.is_async = cluster, cluster.config, grpo, is_async
        self.trainer = cluster.trainer or cluster.make_trainer(grpo, total_steps)
        self.rollout_params = cluster.rollout.sampling_params()
        self._engine, self._algorithm = cluster.rollout.engine, algorithm_of(grpo)
        self._sampler = SamplerPrograms(self._engine.programs, self.rollout_params)

    def score(self, count: int, length: int) -> Program:
        """Return the program of the actor's log-probs of `count` rows of `length` tokens."""
        return score_program(self.cluster.scorer, self.trainer.params, count, length)

    def token_values(self, count: int, length: int) -> Program:
        """Return the program of the log-probs and entropies of `count` rows of `length` tokens."""
        return score_program(self.cluster.token_scorer, self.trainer.params, count, length)

    def gradients(self, count: int, length: int) -> Program:
        """Return the program of the gradients of a micro-batch of `count` rows of `length` tokens."""
        rows, a = abstract_rows(count, length, rows_placement(self.trainer.params)), self._algorithm
        keys = self.cluster.measures_agreement
        batch = abstract_policy_batch(rows, old_logps=a.needs_old_logps, ref_logps=a.needs_reference, keys=keys)
        return gradients_program(self.trainer.programs, batch)

    def apply(self) -> Program:
        """Return the program of the optimizer's update."""
        return apply_program(self.trainer.programs)

    def prefill(self, prompts: int, length: int) -> Program:
        """Return the program that prefills `prompts` prompts of `length` tokens."""
        return self._sampler.prefill(prompts, length)

    def admit(self, slots: int, cache_length: int, prompts: int, prompt_length: int) -> Program:
        """Return the program that inserts such prompts into slots and draws their first tokens."""
        sizes, config = (slots, cache_length, prompts, prompt_length), self.config.rollout_config
        return self._sampler.admit(*sizes, config)

    def decode(self, slots: int, cache_length: int) -> Program:
        """Return the program of a chunk of decode steps for slots with room for `cache_length` tokens each."""
        config, tool = self.config.rollout_config, self.cluster.rollout.tool
        pause_id = None if tool is None else tool.pause_id
        return self._sampler.decode(slots, cache_length, config, pause_id)

    def scheduler(self) -> Scheduler:
        """Return the scheduler of a rollout of prompts of the largest length."""
        config, samples = self.config.rollout_config, self.grpo.num_generations
        fraction = -(-self.config.training_config.prompts_per_step // self.num_processes)
        prompts = min(stage_sizes(self.config.training_config, samples).rollout, fraction)
        return fitted(
            [config.max_prompt_length] * prompts,
            [samples] * prompts,
            config,
            may_resize=self._engine.scheduler.may_resize,
            fixed_shapes=self._engine.scheduler.fixed_shapes,
            requirements=BatchRequirements(is_async=self.is_async),
        )

    @property
    def model(self) -> Decoder:
        """The policy, on accelerators with stacks of layers."""
        return self.cluster.program_actor

    @property
    def has_reference(self) -> bool:
        """Whether a copy of all weights is held as reference; under adapters it shares the base."""
        return self._algorithm.needs_reference and not has_lora(self.model)

    @property
    def has_token_values(self) -> bool:
        """Whether the run comes to a step with token values."""
        training = self.config.training_config
        every = token_values_interval(training, self.grpo.num_generations, training.max_steps or 1)
        return every > 0 and (training.max_steps is None or every <= training.max_steps)

    @property
    def num_processes(self) -> int:
        """Number of processes that have devices of the actor; each samples its share of the prompts on its own."""
        mesh = self.config.mesh(Role.ACTOR)
        return len({device.process_index for device in mesh.devices.flat}) if mesh else 1

    def row_sizes(self) -> list[tuple[int, int]]:
        """Return the numbers of rows of a micro-batch and their length, the largest first: all of them with fixed
        shapes, else the largest.
        """
        training = self.config.training_config
        length, tokens = row_length_bucket(training.row_length), training.max_tokens_per_micro_batch
        size = length, tokens, num_row_shards(self.config.mesh(Role.ACTOR))
        counts = micro_batch_sizes(*size) if self.cluster.row_sizes.fixed_shapes else [most_rows(*size)]
        return [(count, length) for count in counts]

    def token_value_size(self) -> tuple[int, int]:
        """Return the most rows of a micro-batch of completions with token values, and their length."""
        if self.cluster.row_sizes.fixed_shapes:
            return self.row_sizes()[0]
        row_length = self.config.training_config.row_length
        rows = longest_shown(self.config.rollout_config, self.grpo.num_generations, row_length)
        return self.cluster.row_sizes.rows_at_a_time(rows), rows.tokens.shape[1]

    def largest(self) -> list[Program]:
        """Return the programs of the largest shapes that the configs provide for."""
        rows, scheduler = self.row_sizes()[0], self.scheduler()
        slots = len(scheduler.slots), scheduler.longest_cache
        return [
            self.score(*rows),
            self.token_values(*self.token_value_size()),
            self.gradients(*rows),
            *reduce_programs(self.trainer.programs),
            self.apply(),
            self.prefill(*scheduler.prefill_shape),
            self.admit(*slots, *scheduler.prefill_shape),
            self.decode(*slots),
        ]

    def called(self) -> list[Program]:
        """Return the programs of `largest` that a run calls: log-probs only where the algorithm needs them, and
        token values only where they are asked for.
        """
        called = {
            "score": self._algorithm.needs_old_logps or self._algorithm.needs_reference,
            "token values": self.has_token_values,
        }
        return [program for program in self.largest() if called.get(program.name, True)]


def abstract_policy_batch(rows: Rows, *, old_logps: bool, ref_logps: bool, keys: bool) -> RowBatch:
    """Return the shapes of `rows`, which are shapes too, with the other inputs of the policy's loss.

    Args:
        old_logps: whether a batch is used for several updates.
        ref_logps: whether there is a reference.
        keys: whether the agreement with the sampler is measured.
    """

    def shape(sizes: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=rows.tokens.sharding)

    per_token = shape(rows.tokens.shape)
    inputs = LossInputs(
        advantage=per_token,
        weight=per_token,
        rollout_logps=per_token,
        beta=shape((rows.tokens.shape[0], 1)),
        old_logps=per_token if old_logps else None,
        ref_logps=per_token if ref_logps else None,
        keys=shape((*rows.tokens.shape, 2), jnp.uint32) if keys else None,
    )
    return RowBatch(rows, inputs)


class SFTPrograms:
    """Programs of supervised training, by what they do.

    Args:
        learner: holds the model, of arrays or of shapes.
        total_steps: optimizer updates of the whole run.
    """

    def __init__(self, learner: SFTLearner, total_steps: int):
        self.learner, self.trainer = learner, learner.prepare(total_steps)
        self.model = learner.program_model
        self.called = self.largest  # a run calls all of them

    def loss(self, count: int, length: int) -> Program:
        """Return the program of the held-out loss of `count` rows of `length` tokens."""
        params = self.trainer.params
        rows = abstract_rows(count, length, rows_placement(params))
        return Program("loss", self.learner.held_out.program, (abstract(params), rows))

    def gradients(self, count: int, length: int) -> Program:
        """Return the program of the gradients of a micro-batch of `count` rows of `length` tokens."""
        rows = abstract_rows(count, length, rows_placement(self.trainer.params))
        return gradients_program(self.trainer.programs, rows)

    def apply(self) -> Program:
        """Return the program of the optimizer's update."""
        return apply_program(self.trainer.programs)

    def largest(self) -> list[Program]:
        """Return the programs of the largest shapes that the settings provide for."""
        config, length = self.learner.config, row_length_bucket(self.learner.config.row_length)
        rows = most_rows(length, config.max_tokens_per_micro_batch, num_row_shards(self.learner.mesh)), length
        return [self.loss(*rows), self.gradients(*rows), *reduce_programs(self.trainer.programs), self.apply()]
