"""The noise of the draw: the words of Threefry, the same in a program and on the host, and what is made of them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covey.sampling import logits as noise

ROWS = np.random.default_rng(0).integers(0, 2**32, (40, 3), dtype=np.uint32)
numbers = jax.jit(noise.exponential_noise, static_argnums=(1, 2))


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, -1])
def test_keys_are_those_of_jax(seed: int) -> None:
    keys = np.broadcast_to(jax.random.PRNGKey(seed), (len(ROWS), 2))
    for column in (*ROWS.T, np.arange(40)):
        keys = jax.vmap(jax.random.fold_in)(keys, column)
    assert np.array_equal(noise.token_keys(noise.sample_keys(seed, ROWS), np.arange(40)), keys)


def test_a_program_has_the_words_of_the_host() -> None:
    """And they are those of JAX, which it hashes a key with."""
    keys, counters = noise.sample_keys(3, ROWS), np.arange(300, dtype=np.uint32)
    host = noise._threefry(keys[:, None], np.uint32(0), counters)
    program = jax.jit(noise._threefry)(jnp.asarray(keys)[:, None], jnp.uint32(0), jnp.asarray(counters))
    jaxs = jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(counters))(keys)
    for word, other, of_jax in zip(host, program, np.moveaxis(jaxs, -1, 0), strict=True):
        assert np.array_equal(word, other)
        assert np.array_equal(word, of_jax)


def test_keys_and_words_are_those_of_the_golden_file() -> None:
    """Those of `tests/parity/make_draw_golden.py`, made without Covey: other ones would break runs that are resumed."""
    golden = json.loads((Path(__file__).parents[1] / "parity" / "golden" / "draw.json").read_text())
    assert golden["version"] == noise.DRAW_VERSION
    for row, words in zip(golden["keys"], golden["words"], strict=True):
        seed, *place, index = row["place"]
        key = noise.token_keys(noise.sample_keys(seed, np.array([place], np.uint32)), np.array([index]))
        assert key.tolist() == [row["key"]]
        found = noise._threefry(key, np.uint32(0), np.array(golden["counters"], np.uint32))
        assert np.transpose(found).tolist() == words


def test_no_bits_make_a_number_of_zero_or_infinity() -> None:
    """The trap: a number of 0 wins against any mass."""
    extremes = noise._exponential(jnp.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], jnp.uint32))
    assert ((extremes > 1e-10) & (extremes < 17)).all()
    assert (np.diff(extremes) >= 0).all()


def test_numbers_are_exponential_and_independent() -> None:
    from scipy import stats  # comes with jax; late, for it takes long

    keys = noise.token_keys(noise.sample_keys(1, ROWS)[:, None], np.arange(64))
    of_block, of_place = map(np.asarray, numbers(keys.reshape(-1, 2), 8, 8))
    assert stats.kstest(of_block.ravel(), "expon").pvalue > 1e-3
    assert stats.kstest(of_place.ravel(), "expon").pvalue > 1e-3
    pairs = {
        "levels": (of_block, of_place),
        "counters": (of_block[:, :-1], of_block[:, 1:]),
        "tokens": (of_block[:-1], of_block[1:]),
        "samples": (of_block[:-64], of_block[64:]),
    }
    for a, b in pairs.values():
        assert stats.pearsonr(a.ravel(), b.ravel()).pvalue > 1e-3


def test_a_number_does_not_depend_on_how_many_are_asked_for() -> None:
    few, many = (numbers(noise.sample_keys(1, ROWS), *size) for size in ((5, 3), (128, 400)))
    for a, b in zip(few, many, strict=True):
        assert np.array_equal(a, b[:, : a.shape[1]])
