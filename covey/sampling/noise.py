"""Random numbers of the completions: JAX's Threefry (Salmon et al., 2011), computed on the host with the same bits.

They are few, and in each compiled program that draws them they would cost half a second of compilation.
"""

import numpy as np
from jaxtyping import Float32, UInt32

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


def uniform_noise(keys: UInt32[np.ndarray, "*n 2"], index: np.ndarray) -> Float32[np.ndarray, "*n"]:
    """Return one number in [0, 1) for each completion's key and token index: `jax.random.uniform` under the key into
    which the index is folded.
    """
    folded, zero = _fold_in(keys, index.astype(np.uint32)), np.uint32(0)
    bits = np.bitwise_xor(*_threefry(folded, zero, zero))
    floats: Float32[np.ndarray, "*n"] = ((bits >> 9) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1)
    return floats


def _fold_in(keys: UInt32[np.ndarray, "*n 2"], data: UInt32[np.ndarray, "*n"]) -> UInt32[np.ndarray, "*n 2"]:
    return np.stack(_threefry(keys, np.uint32(0), data), axis=-1)


def _threefry(
    keys: UInt32[np.ndarray, "*n 2"], high: np.ndarray | np.uint32, low: np.ndarray | np.uint32
) -> tuple[UInt32[np.ndarray, "*n"], UInt32[np.ndarray, "*n"]]:
    """Encrypt the counters (high, low) by 20 rounds of Threefry-2x32."""
    first, second = keys[..., 0], keys[..., 1]
    schedule = (first, second, first ^ second ^ _PARITY)
    x, y = first + high, second + low
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x, y = x + schedule[(group + 1) % 3], y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
