"""The host's random numbers are those of `jax.random`, bit for bit."""

import jax
import numpy as np
import pytest

from covey.sampling.sequence import sample_keys, uniform_noise

ROWS = np.random.default_rng(0).integers(0, 2**32, (40, 3), dtype=np.uint32)


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, -1])
def test_keys_are_those_of_jax(seed: int) -> None:
    keys = np.broadcast_to(jax.random.PRNGKey(seed), (len(ROWS), 2))
    for column in ROWS.T:
        keys = jax.vmap(jax.random.fold_in)(keys, column)
    assert np.array_equal(sample_keys(seed, ROWS), keys)


def test_numbers_are_those_of_jax() -> None:
    keys, index = sample_keys(3, ROWS), np.arange(40 * 8).reshape(40, 8)
    draw = jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i)))
    want = np.stack([draw(keys, column) for column in index.T], axis=1)
    assert np.array_equal(uniform_noise(keys[:, None], index), want)
    assert 0 <= want.min() < want.max() < 1
