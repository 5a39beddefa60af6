"""Draw tokens from logits: temperature, top-k, top-p, min-p, then Gumbel-max in two levels.

Nothing sorts the vocabulary. Top-k searches only the blocks that can hold the k largest logits, top-p finds its
threshold by bisection, and min-p compares with the largest logit. The order is temperature, then top-k, then top-p over
what top-k left, then min-p, as in Hugging Face generation. Tokens tied with the last one kept are also kept.

The noise of a draw depends on (seed, step, prompt index, sample index, token index) alone. It comes from Threefry
(Salmon et al., 2011): integers in 32 bits, hence the same on every platform, in every slot, batch, chunk and mesh. The
host computes the key of each completion; the compiled program derives the keys of its tokens, and expands them to the
numbers of a draw. An appended token uses up an index, and the noise of that index is not used.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from covey.config.schema import SamplingConfig

BLOCKS = 128
"""Number of blocks in the first level of a draw, and of tokens in a block that top-k searches."""
LOWEST = jnp.finfo(jnp.float32).min
DRAW_VERSION = 2
"""Version of the map from noise to tokens, recorded in checkpoints: 1 was an inverse CDF, 2 is a race in two levels."""

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


@jax.tree_util.register_static
class SamplingParams(SamplingConfig):
    """Settings of the sampling distribution; as an argument of a program they are part of it. Temperature 0 is
    greedy.
    """

    @classmethod
    def from_config(cls, config: SamplingConfig) -> "SamplingParams":
        """Return the settings of the distribution that `config` has among others."""
        return cls(**{setting.name: getattr(config, setting.name) for setting in fields(cls)})

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the whole distribution: neither truncated nor greedy."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    def of_rows(self, count: int) -> "TracedSamplingParams":
        """Return the numbers of `count` rows with these settings."""
        return TracedSamplingParams.stack([self] * count)


class TracedSamplingParams(NamedTuple):
    """`SamplingParams` of each row as arguments of a program, which then serves all of them. What no row uses is None,
    and no part of the program.

    Attributes:
        temperature: 1 where a row is greedy.
        is_greedy: whether the most likely token is drawn.
        top_k: number of tokens to keep; 0 is off.
        top_p: probability to keep; 1 is off.
        min_p: share of the largest probability; 0 is off.
    """

    temperature: Any
    is_greedy: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None

    @classmethod
    def stack(cls, rows: Sequence[SamplingConfig]) -> "TracedSamplingParams":
        """Return the numbers of each row."""
        drawn = [(row.temperature, False, row.top_k, row.top_p, row.min_p) for row in rows]
        each = [one if one[0] else (1.0, True, 0, 1.0, 0.0) for one in drawn]
        columns = zip(zip(*each, strict=True), (np.float32, np.bool, np.int32, np.float32, np.float32), strict=True)
        temperature, *others = (np.array(*column) for column in columns)
        used = [column if np.any(column != off) else None for column, off in zip(others, (0, 0, 1, 0), strict=True)]
        return cls(temperature, *used)

    def of_rows(self, _: int) -> "TracedSamplingParams":
        """Return these numbers, which rows have already."""
        return self

    @property
    def searches(self) -> bool:
        """Whether a row may need thresholds that whole rows of logits have."""
        return self.top_k is not None or self.top_p is not None

    def scale(self, logits: Float[Array, "S V"]) -> Float[Array, "S V"]:
        """Divide logits by the temperature; as XLA divides by a constant, with its reciprocal."""
        scaled: Array = logits.astype(jnp.float32) * (1.0 / self.temperature)[:, None]
        return scaled

    def sampler_logp(self, logp: Float[Array, "S"]) -> Float[Array, "S"]:
        """Return the log-probs of tokens where they were drawn, which is 0 of a greedy one."""
        return logp if self.is_greedy is None else jnp.where(self.is_greedy, 0.0, logp)

    def total(self, kept: Float[Array, "S"], whole: Callable[[], Float[Array, "S"]]) -> Float[Array, "S"]:
        """Return the logsumexp of each row: `kept`, unless a setting cuts tokens from it or it is greedy."""
        if all(x is None for x in self[1:]):
            return kept
        offs = zip(self[1:], (0, 0, 1, 0), strict=True)
        is_cut = reduce(jnp.logical_or, [x != off for x, off in offs if x is not None])
        return jnp.where(is_cut, whole(), kept)


Draw = tuple[Int[Array, "S"], Float[Array, "S"], Float[Array, "S"]]
"""Tokens; log-softmax(logits / temperature) at them; their log-probability under the truncated distribution."""


def draw(
    logits: Float[Array, "S V"], keys: UInt32[Array, "S 2"], sampling_params: SamplingParams | TracedSamplingParams
) -> Draw:
    """Draw one token per row. `keys`, from `token_keys`, are the only randomness."""
    numbers = sampling_params.of_rows(len(logits))
    scaled = numbers.scale(logits)
    token, kept_total = race(truncate(scaled, numbers), keys)
    if numbers.is_greedy is not None:
        token = jnp.where(numbers.is_greedy, jnp.argmax(scaled, axis=-1).astype(jnp.int32), token)
    chosen, total = gather(scaled, token), numbers.total(kept_total, lambda: jax.nn.logsumexp(scaled, axis=-1))
    return token, chosen - total, numbers.sampler_logp(chosen - kept_total)


def race(logits: Float[Array, "S V"], keys: UInt32[Array, "S 2"]) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Draw one token per row by its softmax; return the tokens and the logsumexps of the rows.

    With masses m = exp(logit − max) and independent exponential numbers E and F, the block that wins is the argmax of
    mass / E over `BLOCKS` blocks, of the tokens of equal id modulo `BLOCKS`, and the token that wins is the argmax of
    m / F within that block. Each is Gumbel-max without its logarithms, so the draw is exact. When the logits change a
    little, few tokens do: two distributions p and q with the same keys draw different tokens with a probability of at
    most twice the total variation of their blocks plus twice the total variation of their tokens.
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


def truncate(scaled: Float[Array, "S V"], numbers: TracedSamplingParams) -> Float[Array, "S V"]:
    """Set logits outside top-k, then top-p, then min-p to the lowest float. The k-th largest logit is the largest that
    k logits reach.
    """
    if (k := numbers.top_k) is not None:
        scaled = _cut(scaled, _threshold(scaled, jnp.ones_like(scaled), jnp.where(k > 0, k, scaled.shape[-1])))
    if (p := numbers.top_p) is not None:
        scaled = _cut(scaled, jnp.where(p < 1, nucleus_threshold(scaled, p), LOWEST))
    return scaled if numbers.min_p is None else _cut(scaled, scaled.max(-1) + jnp.log(numbers.min_p))


def _cut(scaled: Float[Array, "S V"], least: Float[Array, "S"]) -> Float[Array, "S V"]:
    return jnp.where(scaled < least[:, None], LOWEST, scaled)


def nucleus_threshold(logits: Float[Array, "S V"], top_p: Any) -> Float[Array, "S"]:
    """Return the largest t such that the softmax mass of {logits ≥ t} is at least `top_p` (Holtzman et al., 2020)."""
    return _threshold(logits, jax.nn.softmax(logits, axis=-1), top_p)


def _threshold(logits: Float[Array, "S V"], mass: Float[Array, "S V"], least: Any) -> Float[Array, "S"]:
    """Return the largest t such that the mass of {logits ≥ t} is at least `least`.

    It searches the float32 bit patterns bit by bit, and ends on the exact boundary. On GPUs it finds 4 bits by each
    pass: 32 turns of a loop would launch 160 kernels one by one.
    """
    ordered, searches = _ordered_bits(logits), {"cuda": partial(_search, 4), "default": partial(_search, 1)}
    low = jax.lax.platform_dependent(ordered, mass, jnp.broadcast_to(least, len(logits)), **searches)
    return jnp.min(jnp.where(ordered >= low[:, None], logits, jnp.inf), axis=-1)


def _search(bits: int, ordered: UInt32[Array, "S V"], mass: Float[Array, "S V"], least: Array) -> Any:
    """Return the largest numbers, uint32 [S], such that the mass of {ordered ≥ number} is at least `least`: 0 where no
    number is, for masses sum to 1 only up to rounding. A pass over the masses finds `bits` bits.
    """

    def find(turn: Any, low: UInt32[Array, "S"]) -> Any:
        parts = [jnp.where(ordered >= (low + (one << shifts[turn]))[:, None], mass, 0.0) for one in digits]
        sums = jax.lax.reduce(parts, [0.0] * len(parts), lambda a, b: list(map(jnp.add, a, b)), (1,))
        return low + (sum((one >= least).astype(jnp.uint32) for one in sums) << shifts[turn])

    shifts, digits = jnp.arange(32 - bits, -1, -bits, dtype=jnp.uint32), np.arange(1, 2**bits, dtype=np.uint32)
    return jax.lax.fori_loop(0, len(shifts), find, jnp.zeros(len(ordered), jnp.uint32), unroll=bits > 1)


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


# --- noise


def sample_keys(seed: int, rows: UInt32[np.ndarray, "n 3"]) -> UInt32[np.ndarray, "n 2"]:
    """Return the random key of each (step, prompt index, sample index) under the run's seed: `jax.random.fold_in` of
    the three in turn.
    """
    keys = np.broadcast_to(np.array([0, seed & 0xFFFFFFFF], np.uint32), (len(rows), 2))
    for column in rows.T:
        keys = _fold_in(keys, column)
    return keys


def token_keys(keys: UInt32[Any, "*n 2"], index: Int[Any, "*n"]) -> UInt32[Any, "*n 2"]:
    """Return the random key of a token of each completion, from the completion's key and the token's index, by
    `jax.random.fold_in`: an array of NumPy or of JAX, as these are.
    """
    return _fold_in(keys, index)


def exponential_noise(
    keys: UInt32[Array, "*n 2"], blocks: int, places: int
) -> tuple[Float[Array, "*n blocks"], Float[Array, "*n places"]]:
    """Return independent exponential numbers of each token's key: for the blocks, and for the places in a block.

    They are the two words of the encrypted counters 0, 1, …, so a number does not depend on how many are asked for.
    """
    counters = jnp.arange(max(blocks, places), dtype=jnp.uint32)
    of_block, of_place = _threefry(keys[..., None, :], np.uint32(0), counters)
    return _exponential(of_block[..., :blocks]), _exponential(of_place[..., :places])


def place_noise(keys: UInt32[Array, "*n 2"], places: Int[Array, "*n places"]) -> Float[Array, "*n places"]:
    """Return the numbers of `exponential_noise` of these `places` in a block, in any order."""
    _, of_place = _threefry(keys[..., None, :], np.uint32(0), places.astype(jnp.uint32))
    return _exponential(of_place)


def _exponential(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Map random bits to an exponential number between 1.1e-10 and 16.7: one of 0 would win against any mass."""
    unit = (bits.astype(jnp.float32) + 0.5) * np.float32(2**-32)
    return -jnp.log1p(-jnp.minimum(unit, np.float32(1 - 2**-24)))


def _fold_in(keys: Any, data: Any) -> Any:
    words = _threefry(keys, np.uint32(0), data.astype(np.uint32))
    return jnp.stack(words, axis=-1) if isinstance(data, jax.Array) else np.stack(words, axis=-1)


def _threefry(keys: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Encrypt the counters (high, low), uint32, by 20 rounds of Threefry-2x32 under `keys`, uint32 [..., 2]; arrays of
    NumPy and of JAX give the same words.
    """
    first, second = keys[..., 0], keys[..., 1]
    schedule = (first, second, first ^ second ^ _PARITY)
    x, y = first + high, second + low
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x, y = x + schedule[(group + 1) % 3], y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
