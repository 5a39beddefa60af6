"""The draw on a mesh: each device races the tokens of its own part of the vocabulary.

Where `tp` divides the head, a device has the logits of V / tp adjacent tokens. Two exchanges take the place of one of
whole rows of logits. First the devices gather each part's sums of the blocks of `logits.BLOCKS`, with its maximum: all
know which block wins. Then each races its own tokens of that block, and they gather the best of each part. Min-p, whose
threshold is a share of the largest mass, gathers the maxima before; greedy gathers the best of each part alone. Tokens
are those of one device, but for near-ties within the rounding of sums.

Top-k and top-p search for their thresholds in whole rows: for them the devices exchange logits, so that each draws for
some of the slots. Settings that are numbers (`TracedSamplingParams`) may be any, and do so too.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from covey.parallel.sharding import sharding_of
from covey.sampling.logits import (
    BLOCKS,
    LOWEST,
    Draw,
    SamplingParams,
    TracedSamplingParams,
    draw,
    gather,
    masses,
    split_blocks,
)
from covey.sampling.noise import exponential_noise, place_noise


def draw_sharded(
    logits: Float[Array, "S V"], keys: UInt32[Array, "S 2"], sampling_params: SamplingParams | TracedSamplingParams
) -> Draw:
    """Draw one token per row, as `draw` does, of logits that the devices of a mesh may divide."""
    mesh = jax.typeof(logits).sharding.mesh
    if mesh.empty:
        return draw(logits, keys, sampling_params)
    of_head = sharding_of(("rows", "vocab"), logits.shape, mesh)
    whole = of_head.shard_shape(logits.shape)[1] == logits.shape[1]
    if whole or isinstance(sampling_params, TracedSamplingParams) or _needs_whole_rows(sampling_params):
        return draw(_by_slot(logits, mesh), keys, sampling_params)
    rows, axis = of_head.spec
    of_rows = PartitionSpec(rows)
    part = partial(_draw_part, axis, sampling_params)
    part = jax.shard_map(part, mesh=mesh, in_specs=(of_head.spec, of_rows), out_specs=(of_rows,) * 3, check_vma=False)
    return part(logits, keys)


def _needs_whole_rows(sampling_params: SamplingParams) -> bool:
    truncates = sampling_params.top_k > 0 or sampling_params.top_p < 1
    return truncates and sampling_params.temperature > 0


def _by_slot(logits: Float[Array, "S V"], mesh: AbstractMesh) -> Float[Array, "S V"]:
    """Constrain logits, of which devices computed parts of the vocabulary, to be divided by slots: each device draws
    for its slots. Otherwise the logits of all slots would be gathered on every device, in each step.
    """
    for axes in (("rows", "vocab"), ("slots", None)):  # without the first, the head itself would be gathered
        logits = jax.lax.with_sharding_constraint(logits, sharding_of(axes, logits.shape, mesh))
    return logits


def _draw_part(
    axis: Any, sampling_params: SamplingParams, logits: Float[Array, "S part"], keys: UInt32[Array, "S 2"]
) -> Draw:
    """Draw with a device's part of the vocabulary; `axis` is the mesh axis of the parts."""
    scaled = logits.astype(jnp.float32) / sampling_params.scale
    first = jax.lax.axis_index(axis) * scaled.shape[1]
    top = scaled.max(-1, initial=LOWEST)
    if sampling_params.temperature == 0:
        return _largest(axis, first, scaled, top)
    kept = scaled
    if sampling_params.min_p > 0:
        top = jax.lax.pmax(top, axis)
        kept = jnp.where(scaled >= top[:, None] + math.log(sampling_params.min_p), scaled, LOWEST)
    sums = _sum_blocks(first, kept, top)
    if kept is not scaled:
        sums = jnp.append(sums, masses(scaled, top[:, None]).sum(-1, keepdims=True), axis=1)
    best, sums = _gather_sums(axis, top, sums)
    token, chosen = _race_part(axis, first, kept, best, sums[:, :BLOCKS], keys)
    kept_total = best + jnp.log(sums[:, :BLOCKS].sum(-1))
    total = kept_total if kept is scaled else best + jnp.log(sums[:, BLOCKS])
    return token, chosen - total, chosen - kept_total


def _largest(axis: Any, first: Int[Array, ""], scaled: Float[Array, "S part"], top: Float[Array, "S"]) -> Draw:
    """Return the tokens with the largest logits; of equal ones the first, as `argmax` does."""
    token = first + jnp.argmax(scaled, axis=-1)
    tops, sums, tokens = _gather(axis, top, masses(scaled, top[:, None]).sum(-1), token)
    logp = -jnp.log((sums * jnp.exp(tops - tops.max(0))).sum(0))
    (token,) = _take(tops, tokens)
    return token.astype(jnp.int32), logp, jnp.zeros_like(logp)


def _sum_blocks(
    first: Int[Array, ""], kept: Float[Array, "S part"], top: Float[Array, "S"]
) -> Float[Array, "S blocks"]:
    """Sum exp(logit - top) of a device's part by block: ids that are equal modulo BLOCKS, counted from that of token 0
    and not from the `first` of the part.
    """
    sums = masses(split_blocks(kept, LOWEST), top[:, None, None]).sum(1)
    return jnp.roll(sums, first % BLOCKS, axis=1)


def _gather_sums(
    axis: Any, top: Float[Array, "S"], sums: Float[Array, "S n"]
) -> tuple[Float[Array, "S"], Float[Array, "S n"]]:
    """Exchange sums of exp(logit - top); return the largest `top` of all parts, and the sums over all of them of
    exp(logit - largest).
    """
    gathered = jax.lax.all_gather(jnp.append(sums, top[:, None], axis=1), axis)  # [parts, S, n + 1]
    tops = gathered[..., -1]
    best = tops.max(0)
    return best, (gathered[..., :-1] * jnp.exp(tops - best)[..., None]).sum(0)


def _race_part(
    axis: Any,
    first: Int[Array, ""],
    kept: Float[Array, "S part"],
    best: Float[Array, "S"],
    sums: Float[Array, "S blocks"],
    keys: UInt32[Array, "S 2"],
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Return the tokens that win the race of `logits.race` in the block that wins, and their logits."""
    of_block, _ = exponential_noise(keys, BLOCKS, 0)
    block = jnp.argmax(sums / of_block, axis=-1)
    ids = (block - first)[:, None] % BLOCKS + BLOCKS * jnp.arange(-(-kept.shape[1] // BLOCKS))
    inner = jnp.take_along_axis(kept, ids, axis=-1, mode="fill", fill_value=LOWEST)
    scores = masses(inner, best[:, None]) / place_noise(keys, (first + ids) // BLOCKS)
    at = jnp.argmax(scores, axis=-1)
    scores, logits, tokens = _gather(axis, *(gather(x, at) for x in (scores, inner, first + ids)))
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
