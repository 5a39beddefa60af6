"""Work of a step by phase: flops, bytes read and written, and how often each program runs.

Flops and bytes are those that every implementation must do, counted from the model's shape and the expected lengths;
rows are packed as the run packs them, and what moves between devices is read from the programs.

A multiplication with its addition is two flops, and only products are counted: norms, softmax, rotations and the
optimizer are not. Every real token goes through every layer, a prompt once for its group; attention counts the pairs
that may see each other; the head counts where a token is scored. Padding, prompts fed again and layers computed again
in the backward pass are no work here: they are what a percentage of the peak is to show.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe, SFTRecipe
from covey.losses.logprobs import chunk_columns
from covey.models.config import ModelConfig
from covey.packing.bins import Piece, choose_row_length, rows_per_micro_batch
from covey.sampling.scheduler import Scheduler
from covey.types import Completion, FinishReason, Group

COMPLETION_SHARE = 0.35
"""Assumed mean length of a completion, as a fraction of the longest; that of the benchmarks' recipes too."""
BLOCKS_VISITED = 2.0
"""Pairs in the blocks that attention kernels visit over pairs that see each other: 1.1 to 2.2 for blocks of 128."""
KERNEL_SHARE = 0.6
"""Share of the peak that the schedules of the attention kernels for TPUs reach: 57 to 72 per cent of their bundles."""


class Lengths(NamedTuple):
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
    most = recipe.rollout.max_new_tokens
    return Lengths(recipe.rollout.max_prompt_length, max(1, round(COMPLETION_SHARE * most)))


def step_phases(
    recipe: Recipe | SFTRecipe,
    config: ModelConfig,
    lengths: Lengths,
    sizes: Sizes,
    shards: int,
    fixed_shapes: bool = False,
    processes: int = 1,
) -> list[Phase]:
    """Return the phases of a step.

    Args:
        recipe: the run's.
        config: the model's shape.
        lengths: expected ones.
        sizes: bytes of the run's arrays.
        shards: number of parts into which rows are divided.
        fixed_shapes: see `Decoder.fixed_shapes`.
        processes: number of processes, each of which samples its share of the prompts with its own weights.
    """
    rank = recipe.model.lora.rank
    if isinstance(recipe, SFTRecipe):
        groups, updates = _groups(recipe.training.batch_size, 1, lengths), 1
    else:
        groups = _groups(recipe.training.prompts_per_step, recipe.grpo.num_generations, lengths)
        updates = recipe.grpo.num_iterations
    batches, chunks = _micro_batches(groups, recipe, shards, fixed_shapes)
    once = forward(config, groups, rank)
    phases = []
    if isinstance(recipe, Recipe):
        phases.append(_rollout(recipe, config, lengths, sizes, fixed_shapes, processes))
        algorithm = algorithm_of(recipe.grpo)
        if passes := algorithm.needs_old_logps + algorithm.needs_reference:
            calls = {"score": Call(passes * batches, passes * batches * chunks)}
            read = passes * batches * sizes.weights
            phases.append(Phase("logps", passes * sum(once), read, calls, passes * once.attention))
    # Forward, forward again and backward each read the weights. Of attention the backward pass costs 3.5 times the
    # forward: the kernels compute the scores again for the gradients of queries and of keys.
    calls = {"gradients": Call(updates * batches, updates * batches * chunks), "apply": Call(updates)}
    flops = updates * training(config, groups, rank)
    moved = updates * (3 * batches * sizes.weights + sizes.optimizer_pass)
    return [*phases, Phase("update", flops, moved, calls, updates * 4.5 * once.attention)]


def _rollout(
    recipe: Recipe, config: ModelConfig, lengths: Lengths, sizes: Sizes, fixed_shapes: bool, processes: int
) -> Phase:
    prompts, samples = math.ceil(recipe.training.prompts_per_step / processes), recipe.grpo.num_generations
    requests = [lengths.prompt] * prompts, [samples] * prompts
    scheduler = Scheduler.fitted(*requests, recipe.rollout, fixed_shapes=fixed_shapes)
    slots, rank = min(len(scheduler.slots), prompts * samples), recipe.model.lora.rank
    fed = [(lengths.prompt, max(lengths.completion - 1, 0))] * (prompts * samples)
    flops, read = decoding(config, fed, slots / sizes.copies, rank, sizes.cache_itemsize)
    prefills = math.ceil(prompts / scheduler.prefill_shape[0])
    turns = math.ceil(prompts * samples / slots) * max(lengths.completion - 1, 0)
    calls = {"prefill": Call(prefills), "decode": Call(math.ceil(turns / recipe.rollout.decode_chunk), turns)}
    flops += prefill(config, [lengths.prompt] * prompts, rank)
    weights = sizes.weights if sizes.sampled is None else sizes.sampled
    return Phase("rollout", processes * flops, processes * (read + prefills * weights), calls)


def _groups(prompts: int, samples: int, lengths: Lengths) -> list[Group]:
    tokens, none = np.zeros(lengths.prompt, np.int32), np.zeros(lengths.completion)
    one = Completion(np.zeros(lengths.completion, np.int32), none, none, FinishReason.STOP)
    return [Group("", tokens, (one,) * samples)] * prompts


def _micro_batches(groups: list[Group], recipe: Recipe | SFTRecipe, shards: int, fixed_shapes: bool) -> tuple[int, int]:
    """Return the number of micro-batches, with rows packed as a run packs them, and of each one's chunks in the head,
    where the devices that share a vocabulary compute each other's rows.
    """
    row_length, max_tokens = recipe.training.row_length, recipe.training.max_tokens_per_micro_batch
    lengths = [tuple(len(c.tokens) for c in group.completions) for group in groups]
    pieces = [
        Piece(len(group.prompt_tokens), of_group, tuple(range(len(of_group))))
        for group, of_group in zip(groups, lengths, strict=True)
    ]
    length, rows = choose_row_length(pieces, row_length, max_tokens, math.inf if fixed_shapes else 0.0)
    at_once = rows_per_micro_batch(len(rows), length, max_tokens, shards, fixed_shapes)
    columns = chunk_columns(at_once // recipe.model.mesh.data, length)
    longest = max(sum(piece.num_scored for piece in row) for row in rows)
    return math.ceil(len(rows) / at_once), math.ceil(longest / columns)


Span = tuple[int, int]
"""Consecutive tokens that are fed: the position of the first, and their number."""


class Flops(NamedTuple):
    """Flops of a forward pass."""

    projections: float
    adapters: float
    attention: float
    head: float


def spans(groups: Iterable[Group]) -> Iterator[Span]:
    """Return the tokens that must be fed to score all completions of `groups`: each prompt once, and each completion
    but its last token.
    """
    for group in groups:
        prompt = len(group.prompt_tokens)
        yield 0, prompt
        yield from ((prompt, max(len(c.tokens) - 1, 0)) for c in group.completions)


def forward(c: ModelConfig, groups: Sequence[Group], rank: int = 0) -> Flops:
    """Return the flops of the log-probs of every completion, with adapters of `rank` on all projections, if any."""
    tokens = sum(count for _, count in spans(groups))
    scored = sum(len(completion.tokens) for group in groups for completion in group.completions)
    return _flops(c, list(spans(groups)), tokens, scored, rank)


def prefill(c: ModelConfig, prompts: Iterable[int], rank: int = 0) -> float:
    """Return the flops of feeding prompts of these lengths, and of the logits after each."""
    fed = [(0, length) for length in prompts]
    return sum(_flops(c, fed, sum(length for _, length in fed), len(fed), rank))


def training(c: ModelConfig, groups: Sequence[Group], rank: int = 0) -> float:
    """Return the flops of the forward and the backward pass.

    A product whose both operands want a gradient costs twice as much backward. The base under adapters wants none:
    its kernels cost once, and of the first layer's inputs nobody asks the gradient.
    """
    work = forward(c, groups, rank)
    if not rank:
        return 3 * sum(work)
    tokens = sum(count for _, count in spans(groups))
    from_stream = [c.projection_shapes()[name] for name in ("q_proj", "k_proj", "v_proj")]
    unasked = 2 * tokens * sum(n_in * n_out + n_in * rank for n_in, n_out in from_stream)
    return 2 * (work.projections + work.head) + 3 * (work.adapters + work.attention) - unasked


def decoding(
    c: ModelConfig, fed: Sequence[Span], batch: float, rank: int = 0, itemsize: int = 4
) -> tuple[float, float]:
    """Return the flops and the bytes read to decode token after token, `batch` at a time with a copy of the weights.

    A step reads all weights once, and of the cache what its tokens may see.
    """
    tokens = sum(count for _, count in fed)
    flops = sum(_flops(c, fed, tokens, tokens, rank))
    read = tokens / batch * weights_in_products(c, rank) + 2 * c.num_kv_heads * c.head_dim * _pairs(c, fed)
    return flops, itemsize * read


def weights_in_products(c: ModelConfig, rank: int = 0) -> int:
    """Return the number of weights that one token is multiplied with: kernels, adapters and head."""
    return c.num_layers * (_in_kernels(c) + _in_adapters(c, rank)) + c.vocab_size * c.hidden_size


def _flops(c: ModelConfig, fed: Sequence[Span], tokens: int, scored: int, rank: int) -> Flops:
    return Flops(
        projections=2.0 * tokens * c.num_layers * _in_kernels(c),
        adapters=2.0 * tokens * c.num_layers * _in_adapters(c, rank),
        attention=4.0 * c.num_heads * c.head_dim * _pairs(c, fed),
        head=2.0 * scored * c.vocab_size * c.hidden_size,
    )


def _in_kernels(c: ModelConfig) -> int:
    return sum(n_in * n_out for n_in, n_out in c.projection_shapes().values())


def _in_adapters(c: ModelConfig, rank: int) -> int:
    return rank * sum(n_in + n_out for n_in, n_out in c.projection_shapes().values())


def _pairs(c: ModelConfig, fed: Iterable[Span]) -> int:
    """Return the number of pairs of query and key that attend to each other, over all layers."""
    seen = np.concatenate([np.arange(start + 1, start + count + 1) for start, count in fed] or [np.zeros(0, int)])
    windows = [c.window(layer) for layer in range(c.num_layers)]
    return sum(int((seen if window is None else np.minimum(seen, window)).sum()) for window in windows)
