"""Agreement: a token counts where the trainer's logits, with its noise, would have drawn it too."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covey.config.schema import SamplingConfig
from covey.losses.logprobs import HeadConfig, chunked_logps, frozen_head_logps, redraw
from covey.sampling import logits as noise
from covey.sampling.logits import SamplingParams, draw
from tests.losses.test_vocab_parallel import put

R, M, D = 4, 32, 16
COUNT = 26
HEAD = HeadConfig(0.8, None, jnp.float32, 32, 48)


def arrays(vocabulary: int) -> tuple[np.ndarray, ...]:
    """A head, hidden states, and keys."""
    rng = np.random.default_rng(vocabulary)
    weight = rng.normal(size=(vocabulary, D), scale=0.6).astype(np.float32)
    keys = noise.sample_keys(5, rng.integers(0, 99, (R, 3), np.uint32))
    tokens = noise.token_keys(keys[:, None], np.arange(M)[None].repeat(R, 0))
    return weight, rng.normal(size=(R, M, D)).astype(np.float32), tokens


def exact_race(logits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Tokens that the race draws, by its definition in float64, from the words of the noise."""
    mass = np.exp(logits - logits.max(-1, keepdims=True))
    words = noise._threefry(keys[..., None, :], np.uint32(0), np.arange(1000, dtype=np.uint32))
    of_block, of_place = (-np.log1p(-np.minimum((w + 0.5) * 2.0**-32, 1 - 2.0**-24)) for w in words)
    ids = np.arange(logits.shape[-1])
    block_mass = np.stack([mass[..., ids % 128 == block].sum(-1) for block in range(128)], -1)
    block = np.argmax(block_mass / of_block[..., :128], -1)[..., None]
    return np.argmax(np.where(ids % 128 == block, mass / of_place[..., ids // 128], 0.0), -1)


def with_some_wrong(drawn: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Targets of which every third is another token than the drawn one, of the same block where there is one; and
    which of the scored ones are right.
    """
    wrong = (np.arange(drawn.size) % 3 == 0).reshape(drawn.shape)
    target = np.where(wrong, (drawn + (128 if vocabulary > 256 else 1)) % vocabulary, drawn)
    return target.astype(np.int32), ~wrong & (np.arange(M) < COUNT)


@pytest.mark.parametrize(
    ("vocabulary", "block", "frozen"), [(301, 64, True), (700, 100, False), (60, 4096, False), (513, 256, True)]
)
def test_the_tokens_of_the_race_agree_and_others_do_not(vocabulary: int, block: int, frozen: bool) -> None:
    """For blocks of the pass that are no multiples of those of the race; and log-probs keep their bits."""
    weight, hidden, keys = arrays(vocabulary)
    drawn = exact_race(hidden.astype(np.float64) @ weight.T.astype(np.float64) / 0.8, keys)
    target, right = with_some_wrong(drawn, vocabulary)
    head = HEAD._replace(block_size=block)
    score = jax.jit(partial(frozen_head_logps, head, False) if frozen else partial(chunked_logps, head))
    *scores, agreed = score(weight, hidden, target, jnp.int32(COUNT), keys)
    assert np.array_equal(agreed[:, :COUNT], right[:, :COUNT])
    assert all(map(np.array_equal, scores, score(weight, hidden, target, jnp.int32(COUNT))))


def gradient(frozen: bool, target: Any, keys: Any) -> Any:
    fn = partial(frozen_head_logps, HEAD, True) if frozen else partial(chunked_logps, HEAD)
    return jax.jit(jax.grad(lambda w, x: sum(s.sum() for s in fn(w, x, target, jnp.int32(M), keys)[:2]), (0, 1)))


@pytest.mark.parametrize("frozen", [True, False])
def test_it_changes_no_bit_of_a_gradient(frozen: bool) -> None:
    weight, hidden, keys = arrays(301)
    target = np.arange(R * M, dtype=np.int32).reshape(R, M)
    both = (gradient(frozen, target, given)(weight, hidden) for given in (keys, None))
    assert all(map(np.array_equal, *both))


SETTINGS = [
    SamplingConfig(temperature=0.8, top_k=20, top_p=0.9),
    SamplingConfig(min_p=0.05),
    SamplingConfig(temperature=0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", SETTINGS)
def test_truncated_and_greedy_draws_are_repeated(config: SamplingConfig) -> None:
    weight, hidden, keys = arrays(301)
    params = SamplingParams.from_config(config)
    logits = jnp.einsum("rmd,vd->rmv", hidden, weight, precision="highest").reshape(R * M, -1)
    drawn = np.asarray(jax.jit(draw, static_argnums=2)(logits, keys.reshape(-1, 2), params)[0]).reshape(R, M)
    target, right = with_some_wrong(drawn, 301)
    agreed = jax.jit(partial(redraw, HEAD, params))(weight, hidden, target, jnp.int32(COUNT), keys)
    assert np.array_equal(agreed[:, :COUNT], right[:, :COUNT])


@pytest.mark.parametrize(
    ("shape", "axes", "vocabulary"),
    [((1, 4), ("fsdp", "tp"), 301), ((2, 2), ("fsdp", "tp"), 301), ((4, 1), ("fsdp", "tp"), 6)],
)
def test_on_a_mesh_the_parts_of_the_vocabulary_race_together(
    shape: tuple[int, ...], axes: tuple[str, ...], vocabulary: int
) -> None:
    """Also where parts are padded, and for a truncated draw."""
    weight, hidden, keys = arrays(vocabulary)
    target, right = with_some_wrong(exact_race((hidden @ weight.T).astype(np.float64) / 0.8, keys), vocabulary)
    on_mesh = put(shape, axes, weight, hidden, target, keys)
    *_, agreed = jax.jit(lambda w, x, t, k: chunked_logps(HEAD, w, x, t, jnp.int32(COUNT), k))(*on_mesh)
    assert np.array_equal(np.asarray(agreed)[:, :COUNT], right[:, :COUNT])
    again = partial(redraw, HEAD, SamplingParams(temperature=0.8, top_k=5))
    found, want = (
        jax.jit(lambda w, x, t, k: again(w, x, t, jnp.int32(COUNT), k))(*given)
        for given in (on_mesh, (weight, hidden, target, keys))
    )
    assert np.array_equal(np.asarray(found)[:, :COUNT], want[:, :COUNT])
