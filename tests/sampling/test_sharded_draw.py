"""The draw on a mesh: the tokens of one device, and exchanges that do not grow with the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from covey.parallel import make_mesh
from covey.parallel.arrays import partition_spec
from covey.sampling.logits import SamplingParams, draw, sample_keys, token_keys
from covey.sampling.sharded_draw import draw_sharded

S, D = 64, 16
KEYS = token_keys(sample_keys(0, np.arange(3 * S, dtype=np.uint32).reshape(S, 3)), np.zeros(S, np.int32))
TRUNCATED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95)


def compiled(shape: tuple[int, int], vocabulary: int, sampling_params: Any) -> tuple[Any, tuple[Any, ...]]:
    """The program of a head and a draw, and its arguments on a mesh (fsdp, tp)."""
    rng, mesh = np.random.default_rng(vocabulary), make_mesh(shape)
    weight = rng.normal(size=(vocabulary, D)).astype(np.float32)
    head = jax.device_put(weight, NamedSharding(mesh, partition_spec("head.embedding", weight.shape, mesh)))

    def head_and_draw(head: Any, hidden: Any, keys: Any) -> Any:
        return draw_sharded(jnp.einsum("sd,vd->sv", hidden, head, precision="highest"), keys, sampling_params)

    args = head, rng.normal(scale=0.7, size=(S, D)).astype(np.float32), KEYS
    return jax.jit(head_and_draw).lower(*args).compile(), args


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "vocabulary", "sampling_params"),
    [
        ((1, 4), 1000, SamplingParams(temperature=0.8)),
        ((2, 2), 1000, SamplingParams(min_p=0.1)),
        ((1, 4), 1000, SamplingParams(temperature=0.0)),
        ((2, 2), 1000, TRUNCATED),
        ((1, 4), 1000, SamplingParams(min_p=0.1).of_rows(S)),
        ((2, 2), 301, SamplingParams(min_p=0.1)),
        ((1, 4), 8, SamplingParams()),
    ],
)
def test_tokens_are_those_of_one_device(shape: tuple[int, int], vocabulary: int, sampling_params: Any) -> None:
    """Also with parts that are no whole blocks, that are less than one, or that the vocabulary cannot be divided in."""
    program, (head, hidden, keys) = compiled(shape, vocabulary, sampling_params)
    drawn = program(head, hidden, keys)
    logits = jnp.einsum("sd,vd->sv", hidden, np.asarray(head), precision="highest")
    token, *logps = draw(logits, keys, sampling_params)
    assert np.array_equal(drawn[0], token)
    for logp, other in zip(drawn[1:], logps, strict=True):
        np.testing.assert_allclose(logp, other, atol=1e-5)


@pytest.mark.slow
def test_a_part_without_a_token_that_may_be_drawn_never_wins() -> None:
    logits = np.random.default_rng(0).normal(size=(S, 1000)).astype(np.float32)
    logits[: S // 2, 250:], logits[S // 2 :, :750] = -np.inf, -np.inf
    mesh = make_mesh((1, 4))
    divided = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tp")))
    for sampling_params in (SamplingParams(), SamplingParams(min_p=0.01), SamplingParams(temperature=0.0)):
        drawn = jax.jit(draw_sharded, static_argnums=2)(divided, KEYS, sampling_params)
        assert np.isfinite(np.asarray(drawn)).all()
        assert np.array_equal(drawn[0], draw(jnp.asarray(logits), KEYS, sampling_params)[0])


@pytest.mark.parametrize(
    ("sampling_params", "wanted"),
    [
        (SamplingParams(), {"all-reduce": [1 / 4, 128 / 4], "all-gather": [3]}),
        (SamplingParams(min_p=0.1), {"all-reduce": [1 / 4, 129 / 4], "all-gather": [3]}),
        (SamplingParams(temperature=0.0, top_k=5), {"all-reduce": [1 / 4, 1 / 4], "all-gather": [3]}),
        (SamplingParams(top_p=0.9), {"all-to-all": [16_384 / 4 / 4]}),
        (SamplingParams(0.7).of_rows(S), {"all-reduce": [1 / 4, 128 / 4], "all-gather": [3]}),
    ],
)
def test_devices_exchange_a_few_numbers_of_each_slot(sampling_params: Any, wanted: dict[str, list[float]]) -> None:
    """In float32 of each of four parts; whole rows of the logits only where a truncation needs them, each device those
    of its own slots.
    """
    program, _ = compiled((1, 4), 16_384, sampling_params)
    found: dict[str, list[float]] = {}
    for collective in pytest.importorskip("covey_plan.hlo").Program(program.as_text()).collectives():
        found.setdefault(collective.opcode, []).append(collective.bytes / (4 * 4 * S))
    assert found == wanted
