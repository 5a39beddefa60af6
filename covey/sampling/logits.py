"""Draw tokens from logits: temperature, top-k, top-p, min-p, then Gumbel-max in two levels.

Nothing sorts the vocabulary. Top-k searches only the blocks that can hold the k largest logits, top-p finds its
threshold by bisection, and min-p compares with the largest logit. The order is temperature, then top-k, then top-p over
what top-k left, then min-p, as in Hugging Face generation. Tokens tied with the last one kept are also kept.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from covey.config.schema import SamplingConfig
from covey.sampling.noise import exponential_noise

BLOCKS = 128
"""Number of blocks in the first level of a draw, and of tokens in a block that top-k searches."""
LOWEST = jnp.finfo(jnp.float32).min


@jax.tree_util.register_static
class SamplingParams(SamplingConfig):
    """Settings of the sampling distribution; as an argument of a program they are part of it, so there is one compiled
    program for each. Temperature 0 is greedy.
    """

    @classmethod
    def from_config(cls, config: SamplingConfig) -> "SamplingParams":
        """Return the settings of the distribution that `config` has among others."""
        return cls(**{setting.name: getattr(config, setting.name) for setting in fields(cls)})

    @property
    def scale(self) -> float:
        """Temperature at which log-probs are reported: 1 when greedy, since dividing by 0 is undefined."""
        return self.temperature if self.temperature > 0 else 1.0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the whole distribution: neither truncated nor greedy."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1 and self.min_p == 0


class TracedSamplingParams(NamedTuple):
    """`SamplingParams` as arguments of a program, which then serves all of them: see `Decoder.fixed_shapes`. Each is a
    number for all rows, or an array [S] with that of each row.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any

    @classmethod
    def of(cls, params: SamplingParams) -> "TracedSamplingParams":
        """Return the numbers of `params`."""
        of_type = {"top_k": np.int32}
        return cls(*(of_type.get(name, np.float32)(getattr(params, name)) for name in cls._fields))

    @classmethod
    def stack(cls, rows: Sequence[SamplingParams]) -> "TracedSamplingParams":
        """Return the numbers of each row."""
        return cls(*map(np.stack, zip(*map(cls.of, rows), strict=True)))


Draw = tuple[Int[Array, "S"], Float[Array, "S"], Float[Array, "S"]]
"""Tokens; log-softmax(logits / temperature) at them; their log-probability under the truncated distribution."""


def draw(
    logits: Float[Array, "S V"], keys: UInt32[Array, "S 2"], sampling_params: SamplingParams | TracedSamplingParams
) -> Draw:
    """Draw one token per row. `keys`, those of `noise.token_keys`, are the only randomness."""
    if isinstance(sampling_params, TracedSamplingParams):
        return _draw_traced(logits, keys, sampling_params)
    scaled = logits.astype(jnp.float32) / sampling_params.scale
    if sampling_params.temperature == 0:
        token = jnp.argmax(scaled, axis=-1).astype(jnp.int32)
        total = jax.nn.logsumexp(scaled, axis=-1)
        return token, gather(scaled, token) - total, jnp.zeros_like(total)
    kept = truncate(scaled, sampling_params)
    token, kept_total = race(kept, keys)
    total = kept_total if kept is scaled else jax.nn.logsumexp(scaled, axis=-1)
    chosen = gather(scaled, token)
    return token, chosen - total, chosen - kept_total


def _draw_traced(logits: Float[Array, "S V"], keys: UInt32[Array, "S 2"], numbers: TracedSamplingParams) -> Draw:
    greedy = numbers.temperature == 0
    scaled = logits.astype(jnp.float32) / _column(jnp.where(greedy, 1.0, numbers.temperature))
    token, kept_total = race(_truncate_traced(scaled, numbers), keys)
    token = jnp.where(greedy, jnp.argmax(scaled, axis=-1).astype(jnp.int32), token)
    chosen = gather(scaled, token)
    return token, chosen - jax.nn.logsumexp(scaled, axis=-1), jnp.where(greedy, 0.0, chosen - kept_total)


def race(logits: Float[Array, "S V"], keys: UInt32[Array, "S 2"]) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Draw one token per row by its softmax; return the tokens and the logsumexps of the rows.

    With masses m = exp(logit − max) and independent exponential numbers E and F, the block that wins is the argmax of
    mass / E over `BLOCKS` blocks, of the tokens of equal id modulo `BLOCKS`, and the token that wins is the argmax of
    m / F within that block. Each is Gumbel-max without its logarithms, so the draw is exact. When the logits change a
    little, few tokens do: two distributions p and q with the same keys draw different tokens with a probability of at
    most twice the total variation of their blocks plus twice that of their tokens.
    """
    top = logits.max(-1, keepdims=True)
    mass = masses(logits, top)
    blocks = min(BLOCKS, logits.shape[-1])
    of_block, of_place = exponential_noise(keys, blocks, -(-logits.shape[-1] // BLOCKS))
    sums = split_blocks(mass, 0.0).sum(1)[:, :blocks]
    block = jnp.argmax(sums / of_block, axis=-1)
    ids = block[:, None] + BLOCKS * jnp.arange(of_place.shape[-1])
    inner = jnp.take_along_axis(mass, ids, axis=-1, mode="fill", fill_value=0.0)
    place = jnp.argmax(inner / of_place, axis=-1)
    return (place * BLOCKS + block).astype(jnp.int32), top[:, 0] + jnp.log(sums.sum(-1))


def masses(logits: Float[Array, "*n"], top: Float[Array, "*#n"]) -> Float[Array, "*n"]:
    """Return exp(logit - top); 0 for a token that was cut."""
    return jnp.where(logits > LOWEST, jnp.exp(logits - top), 0.0)


def _truncate_traced(scaled: Float[Array, "S V"], numbers: TracedSamplingParams) -> Float[Array, "S V"]:
    """Truncate as `truncate` does, with numbers that are arguments of the program. The k-th largest logit is the
    largest that k logits reach.
    """

    def keep(on: Array, threshold: Any, values: Array) -> Array:
        def truncated(values: Array) -> Array:
            kept = jnp.where(values >= threshold(values)[:, None], values, LOWEST)
            return jnp.where(on[:, None], kept, values) if on.ndim else kept

        kept: Array = jax.lax.cond(on.any() if on.ndim else on, truncated, lambda values: values, values)
        return kept

    def kth_largest(values: Array) -> Array:
        return _threshold(values, jnp.ones_like(values), numbers.top_k)

    top_k_on = (numbers.top_k > 0) & (numbers.top_k < scaled.shape[-1])
    kept = keep(top_k_on, kth_largest, scaled)
    kept = keep(numbers.top_p < 1, lambda values: nucleus_threshold(values, numbers.top_p), kept)
    return keep(numbers.min_p > 0, lambda values: values.max(-1) + jnp.log(numbers.min_p), kept)


def _column(numbers: Array) -> Array:
    """Return numbers of rows as a column beside arrays [S, V]; one number as it is."""
    return numbers[:, None] if numbers.ndim else numbers


def truncate(scaled: Float[Array, "S V"], sampling_params: SamplingParams) -> Float[Array, "S V"]:
    """Set logits outside top-k, then top-p, then min-p to the lowest float; return the same array when all are off."""
    if 0 < sampling_params.top_k < scaled.shape[-1]:
        scaled = jnp.where(scaled >= kth_largest(scaled, sampling_params.top_k)[:, None], scaled, LOWEST)
    if sampling_params.top_p < 1:
        scaled = jnp.where(scaled >= nucleus_threshold(scaled, sampling_params.top_p)[:, None], scaled, LOWEST)
    if sampling_params.min_p > 0:
        least = scaled.max(-1, keepdims=True) + math.log(sampling_params.min_p)
        scaled = jnp.where(scaled >= least, scaled, LOWEST)
    return scaled


def kth_largest(values: Float[Array, "S V"], k: int) -> Float[Array, "S"]:
    """Return the exact k-th largest value of each row.

    The k largest lie in the k blocks with the largest maxima, so only those are searched.
    """
    blocks = split_blocks(values, LOWEST)
    if k < blocks.shape[1]:
        _, best = jax.lax.top_k(blocks.max(-1), k)
        blocks = jnp.take_along_axis(blocks, best[:, :, None], axis=1)
    return jax.lax.top_k(blocks.reshape(values.shape[0], -1), k)[0][:, -1]


def nucleus_threshold(logits: Float[Array, "S V"], top_p: Any) -> Float[Array, "S"]:
    """Return the largest t such that the softmax mass of {logits ≥ t} is at least `top_p` (Holtzman et al., 2020)."""
    return _threshold(logits, jax.nn.softmax(logits, axis=-1), top_p)


def _threshold(logits: Float[Array, "S V"], mass: Float[Array, "S V"], least: Any) -> Float[Array, "S"]:
    """Return the largest t such that the mass of {logits ≥ t} is at least `least`.

    It bisects over the float32 bit patterns: 32 halvings end on the exact boundary.
    """
    ordered = _ordered_bits(logits)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.where(ordered >= middle[:, None], mass, 0.0).sum(-1) >= least
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    top = ordered.max(-1)
    # Masses sum to 1 only up to rounding: the lowest bound keeps everything, whatever that sum is.
    low, _ = jax.lax.fori_loop(0, 32, halve, (ordered.min(-1), top + 1))
    return jnp.min(jnp.where(ordered >= low[:, None], logits, jnp.inf), axis=-1)


def _ordered_bits(values: Float[Array, "S V"]) -> Array:
    """Map floats to unsigned integers of the same order."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def split_blocks(values: Float[Array, "*n V"], fill: Any) -> Float[Array, "*n rows columns"]:
    """Divide entries into rows of `BLOCKS`, the last one padded with `fill`. A row is a block of top-k; a column, of
    equal ids modulo `BLOCKS`, is one of a race.
    """
    *outer, size = values.shape
    widths = [(0, 0)] * len(outer) + [(0, -size % BLOCKS)]
    return jnp.pad(values, widths, constant_values=fill).reshape(*outer, -1, BLOCKS)


def gather(values: Float[Array, "S n"], index: Int[Array, "S"]) -> Float[Array, "S"]:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]
