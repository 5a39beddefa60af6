"""Work of a step by phase: flops, bytes read and written, and how often each program runs.

Flops and bytes are counted from the model's shape and the expected lengths (`counting`), rows are packed as the run
packs them, and what moves between devices is read from the programs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe, SFTRecipe
from covey.losses.logprobs import chunk_columns
from covey.models.config import ModelConfig
from covey.packing.bins import Piece, choose_row_length, rows_per_micro_batch
from covey.plan import counting
from covey.sampling.scheduler import Scheduler
from covey.types import Completion, FinishReason, Group

COMPLETION_SHARE = 0.35
"""Assumed mean length of a completion, as a fraction of the longest; that of the benchmarks' recipes too."""
BLOCKS_VISITED = 2.0
"""Pairs in the blocks that attention kernels visit over pairs that see each other: 1.1 to 2.2 for blocks of 128."""
KERNEL_SHARE = 0.6
"""Share of the peak that the schedules of the attention kernels for TPUs reach: 57 to 72 per cent of their bundles."""


@dataclass(frozen=True)
class Lengths:
    """Expected lengths in tokens.

    Attributes:
        prompt: of a prompt.
        completion: of a completion.
    """

    prompt: int
    completion: int


@dataclass(frozen=True)
class Call:
    """Calls of a program in a phase.

    Attributes:
        count: number of calls.
        turns: turns of its loop of unknown length, over all calls; 0 if it has none. It is the loop over decode steps,
            or that over the chunks of scored tokens in the head.
    """

    count: int
    turns: int = 0


@dataclass(frozen=True)
class Phase:
    """Work of one phase of a step, over all devices.

    Attributes:
        name: the phase's, as in `time/...` of a run's metrics.
        flops: products alone, each a multiplication and an addition per weight.
        bytes: weights, optimizer's state and cache that are read or written.
        calls: program → calls.
        kernel_flops: flops of attention within rows, which runs in kernels on accelerators.
    """

    name: str
    flops: float
    bytes: float
    calls: Mapping[str, Call]
    kernel_flops: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes.

    Attributes:
        weights: what a pass reads of the weights on all devices.
        optimizer_pass: what the optimizer reads and writes there.
        cache_itemsize: bytes of a number in the KV cache.
        sampled: what a prefill reads of the weights on the devices with which one process samples; `weights` if not
            set.
        copies: number of copies of the weights there, each for an equal part of the slots.
    """

    weights: float
    optimizer_pass: float
    cache_itemsize: int
    sampled: float | None = None
    copies: int = 1


def expected_lengths(recipe: Recipe | SFTRecipe) -> Lengths:
    """Return prompts as long as they may be, and completions of `COMPLETION_SHARE` of their maximum."""
    prompt, most = recipe.rollout.max_prompt_length, recipe.rollout.max_new_tokens
    return Lengths(prompt, max(1, round(COMPLETION_SHARE * most)))


def step_phases(
    recipe: Recipe | SFTRecipe,
    config: ModelConfig,
    lengths: Lengths,
    sizes: Sizes,
    shards: int,
    compile_cost: float = 0.0,
    processes: int = 1,
) -> list[Phase]:
    """Return the phases of a step.

    Args:
        recipe: the run's.
        config: the model's shape.
        lengths: expected ones.
        sizes: bytes of the run's arrays.
        shards: number of parts into which rows are divided.
        compile_cost: cost of another row length than the default, in tokens; see `packing.bins.compile_cost`. Where it
            is infinite, shapes do not follow the lengths; see `Decoder.fixed_shapes`.
        processes: number of processes, each of which samples its share of the prompts with its own weights.
    """
    rank = recipe.model.lora.rank
    if isinstance(recipe, SFTRecipe):
        groups, updates = _groups(recipe.training.batch_size, 1, lengths), 1
    else:
        groups = _groups(recipe.training.prompts_per_step, recipe.grpo.num_generations, lengths)
        updates = recipe.grpo.num_iterations
    batches, chunks = _micro_batches(groups, recipe, shards, compile_cost)
    forward = counting.forward(config, groups, rank)
    phases = []
    if isinstance(recipe, Recipe):
        phases.append(_rollout(recipe, config, lengths, sizes, math.isinf(compile_cost), processes))
        algorithm = algorithm_of(recipe.grpo)
        if passes := algorithm.needs_old_logps + algorithm.needs_reference:
            calls = {"score": Call(passes * batches, passes * batches * chunks)}
            read = passes * batches * sizes.weights
            phases.append(Phase("logps", passes * sum(forward), read, calls, passes * forward.attention))
    # Forward, forward again and backward each read the weights. Of attention the backward pass costs 3.5 times the
    # forward: the kernels compute the scores again for the gradients of queries and of keys.
    calls = {"gradients": Call(updates * batches, updates * batches * chunks), "apply": Call(updates)}
    flops = updates * counting.training(config, groups, rank)
    moved = updates * (3 * batches * sizes.weights + sizes.optimizer_pass)
    return [*phases, Phase("update", flops, moved, calls, updates * 4.5 * forward.attention)]


def _rollout(
    recipe: Recipe, config: ModelConfig, lengths: Lengths, sizes: Sizes, fixed_shapes: bool, processes: int
) -> Phase:
    prompts, samples = math.ceil(recipe.training.prompts_per_step / processes), recipe.grpo.num_generations
    scheduler = Scheduler([lengths.prompt] * prompts, [samples] * prompts, recipe.rollout, fixed_shapes=fixed_shapes)
    slots, rank = min(len(scheduler.slots), prompts * samples), recipe.model.lora.rank
    fed = [(lengths.prompt, max(lengths.completion - 1, 0))] * (prompts * samples)
    flops, read = counting.decoding(config, fed, slots / sizes.copies, rank, sizes.cache_itemsize)
    prefills = math.ceil(prompts / scheduler.prefill_shape[0])
    turns = math.ceil(prompts * samples / slots) * max(lengths.completion - 1, 0)
    calls = {"prefill": Call(prefills), "decode": Call(math.ceil(turns / recipe.rollout.decode_chunk), turns)}
    flops += counting.prefill(config, [lengths.prompt] * prompts, rank)
    weights = sizes.weights if sizes.sampled is None else sizes.sampled
    return Phase("rollout", processes * flops, processes * (read + prefills * weights), calls)


def _groups(prompts: int, samples: int, lengths: Lengths) -> list[Group]:
    tokens, none = np.zeros(lengths.prompt, np.int32), np.zeros(lengths.completion)
    one = Completion(np.zeros(lengths.completion, np.int32), none, none, FinishReason.STOP)
    return [Group("", tokens, (one,) * samples)] * prompts


def _micro_batches(
    groups: list[Group], recipe: Recipe | SFTRecipe, shards: int, compile_cost: float
) -> tuple[int, int]:
    """Return the number of micro-batches, with rows packed as a run packs them, and of each one's chunks in the head,
    where the devices that share a vocabulary compute each other's rows.
    """
    row_length, max_tokens = recipe.training.row_length, recipe.training.max_tokens_per_micro_batch
    pieces = [
        Piece(group.prompt_tokens, tuple(c.tokens for c in group.completions), tuple(range(len(group.completions))))
        for group in groups
    ]
    length, rows = choose_row_length(pieces, row_length, max_tokens, compile_cost)
    at_once = rows_per_micro_batch(len(rows), length, max_tokens, shards, fixed_shapes=math.isinf(compile_cost))
    columns = chunk_columns(at_once // recipe.model.mesh.data, length)
    return math.ceil(len(rows) / at_once), math.ceil(max(row.num_scored for row in rows) / columns)
