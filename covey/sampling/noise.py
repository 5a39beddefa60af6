"""Noise of the draw: random numbers that depend on (seed, step, prompt index, sample index, token index) alone.

They are those of Threefry (Salmon et al., 2011): integers in 32 bits, hence the same on every platform, in every slot,
batch, chunk and mesh. The host computes the key of each completion; the compiled program derives those of
its tokens, and expands them to the numbers of a draw. An appended token uses up an index, and the noise of that index
is not used.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

DRAW_VERSION = 2
"""Version of the map from noise to tokens, recorded in checkpoints: 1 was an inverse CDF, 2 is a race in two levels."""

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


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
    """Return independent exponential numbers of each token's key: those of the blocks and of the places in a block.

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
