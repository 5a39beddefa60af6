"""The draw on a mesh: each device races the tokens of its own part of the vocabulary.

Where `tp` divides the head, a device has the logits of V / tp adjacent tokens. Three small exchanges take the place of
one of whole rows of logits. First the devices agree on the largest logit, then on the sums of the blocks of
`logits.BLOCKS`: all know which block wins. Then each races its own tokens of that block, and they gather the best of
each part. One device would draw the same tokens, but for near-ties within the rounding of sums.

Top-k and top-p search for their thresholds in whole rows: if a slot needs one, the devices exchange logits, so that
each draws for some of the slots.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from covey.parallel.arrays import sharding_of
from covey.sampling.logits import (
    BLOCKS,
    LOWEST,
    Draw,
    SamplingParams,
    TracedSamplingParams,
    draw,
    exponential_noise,
    gather,
    masses,
    place_noise,
    split_blocks,
)


def draw_sharded(
    logits: Float[Array, "S V"], keys: UInt32[Array, "S 2"], sampling_params: SamplingParams | TracedSamplingParams
) -> Draw:
    """Draw one token per row, as `draw` does, of logits that the devices of a mesh may divide."""
    mesh, numbers = jax.typeof(logits).sharding.mesh, sampling_params.of_rows(len(logits))
    if mesh.empty:
        return draw(logits, keys, numbers)
    of_head = sharding_of(("rows", "vocab"), logits.shape, mesh)
    if numbers.searches or of_head.shard_shape(logits.shape)[1] == logits.shape[1]:
        return draw(_by_slot(logits, mesh), keys, numbers)
    rows, axis = of_head.spec
    of_rows = PartitionSpec(rows)
    part = partial(_draw_part, axis)
    part = jax.shard_map(
        part, mesh=mesh, in_specs=(of_head.spec, of_rows, of_rows), out_specs=(of_rows,) * 3, check_vma=False
    )
    return part(logits, keys, numbers)


def _by_slot(logits: Float[Array, "S V"], mesh: AbstractMesh) -> Float[Array, "S V"]:
    """Constrain logits, of which devices computed parts of the vocabulary, to be divided by slots: each device draws
    for its slots. Otherwise the logits of all slots would be gathered on every device, in each step.
    """
    for axes in (("rows", "vocab"), ("slots", None)):  # without the first, the head itself would be gathered
        logits = jax.lax.with_sharding_constraint(logits, sharding_of(axes, logits.shape, mesh))
    return logits


def _draw_part(
    axis: Any, logits: Float[Array, "S part"], keys: UInt32[Array, "S 2"], numbers: TracedSamplingParams
) -> Draw:
    """Draw with a device's part of the vocabulary, greedily or by min-p; `axis` is the mesh axis of the parts."""
    scaled = numbers.scale(logits)
    first = jax.lax.axis_index(axis) * scaled.shape[1]
    top = jax.lax.pmax(scaled.max(-1, initial=LOWEST), axis)
    kept = scaled
    if numbers.min_p is not None:
        kept = jnp.where(scaled < (top + jnp.log(numbers.min_p))[:, None], LOWEST, scaled)
    sums = jax.lax.psum(_sum_blocks(first, kept, top), axis)
    token, chosen = _race_part(axis, first, kept, top, sums, keys, numbers.is_greedy)
    kept_total = top + jnp.log(sums.sum(-1))
    total = numbers.total(kept_total, lambda: top + jnp.log(jax.lax.psum(masses(scaled, top[:, None]).sum(-1), axis)))
    return token, chosen - total, numbers.sampler_logp(chosen - kept_total)


def _sum_blocks(
    first: Int[Array, ""], kept: Float[Array, "S part"], top: Float[Array, "S"]
) -> Float[Array, "S blocks"]:
    """Sum exp(logit - top) of a device's part by block: ids that are equal modulo BLOCKS, counted from token 0 and not
    from the `first` of the part.
    """
    sums = masses(split_blocks(kept, LOWEST), top[:, None, None]).sum(1)
    return jnp.roll(sums, first % BLOCKS, axis=1)


def _race_part(
    axis: Any,
    first: Int[Array, ""],
    kept: Float[Array, "S part"],
    best: Float[Array, "S"],
    sums: Float[Array, "S blocks"],
    keys: UInt32[Array, "S 2"],
    is_greedy: Bool[Array, "S"] | None,
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Return the tokens that win the race of `logits.race` in the block that wins, and their logits; greedily the
    tokens with the largest logits, of equal logits the first, as `argmax` does.
    """
    of_block, _ = exponential_noise(keys, BLOCKS, 0)
    block = jnp.argmax(sums / of_block, axis=-1)
    ids = (block - first)[:, None] % BLOCKS + BLOCKS * jnp.arange(-(-kept.shape[1] // BLOCKS))
    inner = jnp.take_along_axis(kept, ids, axis=-1, mode="fill", fill_value=LOWEST)
    scores = masses(inner, best[:, None]) / place_noise(keys, (first + ids) // BLOCKS)
    at, largest = jnp.argmax(scores, axis=-1), kept.max(-1, initial=LOWEST)
    found = [gather(x, at) for x in (scores, inner, first + ids)]
    if is_greedy is not None:
        greedy = largest, largest, first + jnp.argmax(kept, axis=-1)
        found = [jnp.where(is_greedy, *pair) for pair in zip(greedy, found, strict=True)]
    scores, logits, tokens = _gather(axis, *found)
    token, chosen = _take(scores, tokens, logits)
    return token.astype(jnp.int32), chosen


def _gather(axis: Any, *numbers: Array) -> list[Float[Array, "parts S"]]:
    """Gather some numbers of each slot from all parts, in one exchange; ids below 2**24 are exact in float32."""
    gathered = jax.lax.all_gather(jnp.stack([x.astype(jnp.float32) for x in numbers], -1), axis)
    return list(jnp.moveaxis(gathered, -1, 0))


def _take(scores: Float[Array, "parts S"], *numbers: Float[Array, "parts S"]) -> list[Float[Array, "S"]]:
    """Select the part with the largest score; return its entry of each of `numbers`."""
    winner = jnp.argmax(scores, axis=0)
    return [jnp.take_along_axis(x, winner[None], axis=0)[0] for x in numbers]
