"""Work of a step by phase: flops, bytes read and written, and how often each program runs.

Flops and bytes are the least of any implementation, counted from the model's shape and the expected lengths;
rows are packed as the run packs them, samples enter slots as in a run (`schedule`), and what moves between devices is
read from the programs. Further reads of the kernels of decoding, and the time of the host, are counted apart.

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
from jaxtyping import Int

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe, SFTRecipe
from covey.losses.logprobs import chunk_columns
from covey.models.config import ModelConfig
from covey.models.layer_kinds import find_kind, has_state, layer_shapes
from covey.packing.bins import rows_per_micro_batch
from covey.packing.rows import GroupShape, Layout, make_layout
from covey.rl.stage_sizes import stage_sizes
from covey_plan.lengths import Lengths
from covey_plan.schedule import Timeline, fitted, timeline

BLOCKS_VISITED = 2.0
"""Pairs in the blocks that attention kernels visit over pairs that see each other: 1.1 to 2.2 for blocks of 128."""
KERNEL_SHARE = 0.6
"""Share of the peak that the schedules of the attention kernels for TPUs reach: 57 to 72 per cent of their bundles."""
GRID_STEP = 0.35e-6
"""Seconds that a step of a kernel's grid takes on TPUs, however few bytes it reads: JAX's product of 8,192 in blocks of
128 takes 91.8 ms for 262,144 steps on v5e (docs.jax.dev/en/latest/pallas/tpu/matmul.html).
"""
HOST_TURN, HOST_SLOT = 0.3e-3, 3e-6
"""Seconds of the host between two programs of a rollout, and more for each slot: it reads what was drawn, schedules,
and launches (0.35 ms of Python with 64 slots and 0.9 with 256, measured without a device, and a transfer).
"""


@dataclass(frozen=True)
class Call:
    """Calls of a program in a phase.

    Attributes:
        count: number of calls.
        turns: turns of its loop of unknown length, over all calls; 0 if it has none. It is the loop over decode steps,
            that over the slots that prompts are inserted into, or that over the chunks of scored tokens in the head.
    """

    count: int
    turns: int = 0


class CacheReads(NamedTuple):
    """Bytes of the KV cache over all decode steps and devices: `live` is what tokens may see, and `read` what the
    kernel reads in steps of `grid_step` bytes, or 0 if no kernel does.
    """

    live: float
    read: float
    grid_step: float = 0.0


NO_CACHE = CacheReads(0.0, 0.0)


@dataclass(frozen=True)
class Phase:
    """Work of one phase of a step, over all devices.

    Attributes:
        name: the phase's, as in `time/...` of a run's metrics.
        flops: products alone, each a multiplication and an addition per weight.
        bytes: weights, optimizer's state and cache that are read or written.
        calls: program → calls.
        kernel_flops: flops of attention within rows, which runs in kernels on accelerators.
        cache: bytes of the KV cache, of which `bytes` has the live ones.
        host: seconds of the host for its turns between programs.
        runs_ahead: whether the devices have the next program during a turn, so that they wait only for a longer one.
        timeline: calls of the rollout of one process.
        positions: tokens of the rows of an update, with padding.
    """

    name: str
    flops: float
    bytes: float
    calls: Mapping[str, Call]
    kernel_flops: float = 0.0
    cache: CacheReads = NO_CACHE
    host: float = 0.0
    runs_ahead: bool = False
    timeline: Timeline | None = None
    positions: int = 0


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
        cache_copies: bytes of the KV cache on all devices over those of one cache: more than 1 where an axis of the
            mesh does not divide its heads.
        block: number of positions that the kernel of decoding reads at a time; 0 if there is none.
        block_heads: number of heads of keys in a step of its grid; 0 where steps run side by side.
    """

    weights: float
    optimizer_pass: float
    cache_itemsize: int
    sampled: float | None = None
    copies: int = 1
    cache_copies: float = 1.0
    block: int = 0
    block_heads: int = 0


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
    rank, groups = recipe.model.lora.rank, step_groups(recipe, lengths)
    updates = recipe.grpo.num_iterations if isinstance(recipe, Recipe) else 1
    batches, chunks, positions = _micro_batches(groups, recipe, shards, fixed_shapes)
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
    calls = {"gradients": Call(updates * batches, updates * batches * chunks)}
    calls |= {"reduce": Call(updates), "apply": Call(updates)}
    flops = updates * training(config, groups, rank)
    moved = updates * (3 * batches * sizes.weights + sizes.optimizer_pass)
    kernels = updates * 4.5 * once.attention
    return [*phases, Phase("update", flops, moved, calls, kernels, positions=updates * positions)]


def _rollout(
    recipe: Recipe, config: ModelConfig, lengths: Lengths, sizes: Sizes, fixed_shapes: bool, processes: int
) -> Phase:
    prompts, samples = math.ceil(recipe.training.prompts_per_step / processes), recipe.grpo.num_generations
    completions = lengths.of(prompts * samples).reshape(prompts, samples)
    at_once = math.ceil(stage_sizes(recipe.training, samples).rollout / processes)
    schedule = rollout_timeline(recipe, lengths.prompt, completions, at_once, fixed_shapes)
    rank, slots = recipe.model.lora.rank, recipe.rollout.slots
    fed = [(lengths.prompt, max(n - 1, 0)) for n in completions.ravel().tolist()]
    # Tokens for which the weights are read once.
    batch = max(schedule.drawn, 1) / max(schedule.steps * sizes.copies, 1)
    flops, read = decoding(config, fed, batch, rank, sizes.cache_itemsize)
    cache = cache_reads(config, fed, schedule, sizes)
    prefilled = prefill(config, [lengths.prompt] * prompts, rank)
    calls = {
        "prefill": Call(schedule.prefills),
        "admit": Call(schedule.admissions, schedule.samples),
        "decode": Call(schedule.chunks, schedule.steps),
    }
    weights = sizes.weights if sizes.sampled is None else sizes.sampled
    return Phase(
        "rollout",
        processes * (flops + sum(prefilled)),
        processes * (read + schedule.prefills * weights),
        calls,
        processes * prefilled.attention,
        CacheReads(processes * cache.live, processes * cache.read, cache.grid_step),
        schedule.host_turns * (HOST_TURN + HOST_SLOT * min(slots, completions.size)),
        fixed_shapes,
        schedule,
    )


def rollout_timeline(
    recipe: Recipe, prompt: int, completions: Int[np.ndarray, "prompts samples"], at_once: int, fixed_shapes: bool
) -> Timeline:
    """Return the calls of one process that samples these completions, `at_once` prompts at a time."""
    (prompts, samples), schedule = completions.shape, Timeline()
    for part in np.split(completions, range(at_once, prompts, at_once)):
        requests = [prompt] * len(part), [samples] * len(part)
        scheduler = fitted(*requests, recipe.rollout, fixed_shapes=fixed_shapes)
        schedule += timeline(scheduler, part, unread=0 if scheduler.resizes else 1)
    return schedule


def cache_reads(c: ModelConfig, fed: Sequence["Span"], schedule: Timeline, sizes: Sizes) -> CacheReads:
    """Return the bytes of the KV cache that the decode steps of one process read.

    A kernel reads whole blocks, on average half a block more than a token may see, and one block of a slot in which no
    sample is decoded.
    """
    number, seen, half = 2 * sizes.cache_itemsize, float(_keys_seen(c, fed)), sizes.block / 2
    widths = sum(math.prod(c.heads(layer)) for layer in range(c.num_layers) if not has_state(c, layer))
    beyond = widths * (half * schedule.drawn + sizes.block * (schedule.slot_steps - schedule.drawn))
    grid_step = sizes.block_heads * sizes.block * c.head_dim * number
    return CacheReads(seen * number, (seen + beyond) * number * sizes.cache_copies, grid_step)


def step_groups(recipe: Recipe | SFTRecipe, lengths: Lengths) -> list[GroupShape]:
    """Return the groups of a step, whose completions have the expected lengths."""
    if isinstance(recipe, SFTRecipe):
        prompts, samples = recipe.training.batch_size, 1
    else:
        prompts, samples = recipe.training.prompts_per_step, recipe.grpo.num_generations
    completions = lengths.of(prompts * samples).reshape(prompts, samples).tolist()
    return [GroupShape(lengths.prompt, tuple(of_group), (None,) * samples) for of_group in completions]


def num_rows(recipe: Recipe | SFTRecipe, lengths: Lengths) -> int:
    """Return the number of rows of a step on an accelerator."""
    return len(_layout(step_groups(recipe, lengths), recipe, fixed_shapes=True).rows)


def _layout(groups: list[GroupShape], recipe: Recipe | SFTRecipe, fixed_shapes: bool) -> Layout:
    """Return the rows, packed as a run packs them."""
    row_length, max_tokens = recipe.training.row_length, recipe.training.max_tokens_per_micro_batch
    return make_layout(groups, row_length, max_tokens=max_tokens, compile_cost=math.inf if fixed_shapes else 0.0)


def _micro_batches(
    groups: list[GroupShape], recipe: Recipe | SFTRecipe, shards: int, fixed_shapes: bool
) -> tuple[int, int, int]:
    """Return the number of micro-batches, that of each one's chunks in the head, where the devices that share a
    vocabulary compute each other's rows, and the positions of all rows.
    """
    layout = _layout(groups, recipe, fixed_shapes)
    rows, length, max_tokens = layout.rows, layout.length, recipe.training.max_tokens_per_micro_batch
    at_once = rows_per_micro_batch(len(rows), length, max_tokens, shards, fixed_shapes)
    columns = chunk_columns(at_once // recipe.model.mesh.data, length)
    longest, batches = max(sum(piece.num_scored for piece in row) for row in rows), math.ceil(len(rows) / at_once)
    return batches, math.ceil(longest / columns), batches * at_once * length


Span = tuple[int, int]
"""Consecutive tokens that are fed: the position of the first, and their number."""


class Flops(NamedTuple):
    """Flops of a forward pass."""

    projections: float
    adapters: float
    attention: float
    head: float


def spans(groups: Iterable[GroupShape]) -> Iterator[Span]:
    """Return the tokens that must be fed to score all completions of `groups`: each prompt once, and each completion
    but its last token.
    """
    for group in groups:
        yield 0, group.prompt
        yield from ((group.prompt, max(length - 1, 0)) for length in group.lengths)


def forward(c: ModelConfig, groups: Sequence[GroupShape], rank: int = 0) -> Flops:
    """Return the flops of the log-probs of every completion, with adapters of `rank` on all projections, if any."""
    tokens = sum(count for _, count in spans(groups))
    scored = sum(sum(group.lengths) for group in groups)
    return _flops(c, list(spans(groups)), tokens, scored, rank)


def prefill(c: ModelConfig, prompts: Sequence[int], rank: int = 0) -> Flops:
    """Return the flops of feeding prompts of these lengths, and of the logits after each."""
    return _flops(c, [(0, length) for length in prompts], sum(prompts), len(prompts), rank)


def training(c: ModelConfig, groups: Sequence[GroupShape], rank: int = 0) -> float:
    """Return the flops of the forward and the backward pass.

    A product whose both operands want a gradient costs twice as much backward. The base under adapters wants none:
    its kernels cost once, and of the first layer's inputs nobody asks the gradient.
    """
    work = forward(c, groups, rank)
    if not rank:
        return 3 * sum(work)
    tokens = sum(count for _, count in spans(groups))
    mixer = find_kind(c.parts(0)[0]).part
    of_mixer = [path for path in projection_shapes(c, 0) if path.startswith(mixer) and not path.endswith("o_proj")]
    from_stream = [projection_shapes(c, 0)[path] for path in of_mixer]
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
    read = tokens / batch * weights_in_products(c, rank) + 2 * _keys_seen(c, fed)
    return flops, itemsize * read


def weights_in_products(c: ModelConfig, rank: int = 0) -> int:
    """Return the number of weights that one token is multiplied with: kernels, adapters and head."""
    return _in_kernels(c) + _in_adapters(c, rank) + c.vocab_size * c.hidden_size


def _flops(c: ModelConfig, fed: Sequence[Span], tokens: int, scored: int, rank: int) -> Flops:
    return Flops(
        projections=2.0 * tokens * _in_kernels(c),
        adapters=2.0 * tokens * _in_adapters(c, rank),
        attention=4.0 * c.num_heads * _pairs(c, fed, [c.heads(layer)[1] for layer in range(c.num_layers)]),
        head=2.0 * scored * c.vocab_size * c.hidden_size,
    )


def projection_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the number of inputs and outputs of each projection of a layer, by its path in the layer."""
    kernels = {path: shape for path, shape in layer_shapes(config, layer).items() if path.endswith(".kernel")}
    return {path.removesuffix(".kernel"): (n_in, n_out) for path, (n_in, n_out) in kernels.items()}


def _in_kernels(c: ModelConfig) -> int:
    return sum(n_in * n_out for n_in, n_out in _projections(c))


def _in_adapters(c: ModelConfig, rank: int) -> int:
    return rank * sum(n_in + n_out for n_in, n_out in _projections(c))


def _projections(c: ModelConfig) -> list[tuple[int, int]]:
    return [shape for layer in range(c.num_layers) for shape in projection_shapes(c, layer).values()]


def _keys_seen(c: ModelConfig, fed: Iterable[Span]) -> int:
    """Return the number of elements of keys that queries attend to, over all layers; of values it is the same."""
    return _pairs(c, fed, [math.prod(c.heads(layer)) for layer in range(c.num_layers)])


def _pairs(c: ModelConfig, fed: Iterable[Span], weights: Sequence[int]) -> int:
    """Return the number of pairs of query and key that attend to each other, each times the weight of its layer."""
    start, count = np.array(list(fed) or [(0, 0)], np.int64).T
    windows = {c.window(layer) for layer in range(c.num_layers)}
    pairs = {window: int((_seen(start + count, window) - _seen(start, window)).sum()) for window in windows}
    return sum(weights[i] * pairs[c.window(i)] for i in range(c.num_layers) if not has_state(c, i))


def _seen(count: Int[np.ndarray, "n"], window: int | None) -> Int[np.ndarray, "n"]:
    """Return the number of pairs of the first `count` positions."""
    near = count if window is None else np.minimum(count, window)
    pairs: np.ndarray = near * (near + 1) // 2 + (count - near) * near
    return pairs
