"""The head on a mesh: each device walks its own part of the vocabulary, and the numbers are those of one device."""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from covey.losses.logprobs import HeadConfig, chunked_logps, frozen_head_logps
from covey.parallel import make_mesh, row_sharding
from covey.parallel.arrays import partition_spec

R, M, D = 4, 64, 16
COUNT = 50


def arrays(vocabulary: int, rows: int = R) -> tuple[np.ndarray, ...]:
    """A head, hidden states, targets, and the gradients of log-probs and entropies."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(vocabulary, D), scale=0.3).astype(np.float32)
    hidden = rng.normal(size=(rows, M, D)).astype(np.float32)
    target = rng.integers(0, vocabulary, (rows, M)).astype(np.int32)
    scored = np.arange(M) < COUNT
    return weight, hidden, target, *(rng.normal(size=(rows, M)).astype(np.float32) * scored for _ in range(2))


def plain_scores(softcap: float | None, weight: Any, hidden: Any, target: Any) -> tuple[Any, Any]:
    logits = hidden @ weight.T
    logits = (softcap * jnp.tanh(logits / softcap) if softcap else logits) / 0.8
    logps = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logps, target[..., None], -1)[..., 0], -(jnp.exp(logps) * logps).sum(-1)


def loss(score: Any, weight: Any, hidden: Any, target: Any, g: Any, h: Any) -> tuple[Any, Any]:
    logps, entropy = score(weight, hidden, target)
    return (g * logps + h * entropy).sum(), (logps, entropy)


def put(shape: tuple[int, ...], axes: tuple[str, ...], weight: Any, *rows: Any) -> list[jax.Array]:
    mesh = make_mesh(shape, axes)
    where = NamedSharding(mesh, partition_spec("head.embedding", weight.shape, mesh))
    divided = len(rows[0]) % (mesh.size // mesh.shape.get("tp", 1)) == 0
    return [
        jax.device_put(weight, where),
        *jax.device_put(rows, row_sharding(mesh) if divided else NamedSharding(mesh, P())),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axes", "vocabulary", "softcap", "rows", "frozen"),
    [
        ((1, 4), ("fsdp", "tp"), 512, 5.0, R, True),
        ((2, 2), ("fsdp", "tp"), 512, 5.0, R, False),
        ((2, 2), ("fsdp", "tp"), 301, None, R, True),
        ((4, 1), ("fsdp", "tp"), 301, None, R, False),
        ((2, 2), ("data", "fsdp"), 512, None, R, False),
        ((4, 1), ("fsdp", "tp"), 6, 5.0, 3, False),
    ],
)
def test_values_and_gradients_are_those_of_the_plain_head_in_float64(
    shape: tuple[int, ...], axes: tuple[str, ...], vocabulary: int, softcap: float | None, rows: int, frozen: bool
) -> None:
    """Also for a vocabulary or rows that the mesh does not divide, where parts are padded or even empty."""
    inputs = arrays(vocabulary, rows)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else x.dtype) for x in inputs]
        grads = jax.value_and_grad(partial(loss, partial(plain_scores, softcap)), (0, 1), has_aux=True)
        want = jax.tree.map(np.asarray, grads(*wide))
    head = HeadConfig(0.8, softcap, jnp.float32, 64, 48)
    fn = partial(frozen_head_logps, head, True) if frozen else partial(chunked_logps, head)
    score = lambda weight, hidden, target: fn(weight, hidden, target, jnp.int32(COUNT))  # noqa: E731
    got = jax.jit(jax.value_and_grad(partial(loss, score), (0, 1), has_aux=True))(*put(shape, axes, *inputs))
    for one, other in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        one, other = (np.asarray(x)[..., :COUNT] if np.ndim(x) else x for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=5e-6)
    np.testing.assert_allclose(got[1][1], want[1][1], rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(got[1][0], 0 * want[1][0] if frozen else want[1][0], rtol=1e-5, atol=1e-5)


@functools.cache
def compiled(shape: tuple[int, int], frozen: bool, vocabulary: int = 8192) -> tuple[Any, int]:
    """The gradient's program on (fsdp, tp), and its scratch memory."""
    head, width, mesh = HeadConfig(1.0, 30.0, jnp.float32, 64, 256), 32, make_mesh(shape)
    rows = row_sharding(mesh)
    weight = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32, sharding=NamedSharding(mesh, P("tp", "fsdp")))
    hidden = jax.ShapeDtypeStruct((4, 128, width), jnp.float32, sharding=rows)
    target = jax.ShapeDtypeStruct((4, 128), jnp.int32, sharding=rows)

    def total(weight: Any, hidden: Any, target: Any) -> Any:
        fn = partial(frozen_head_logps, head, False) if frozen else partial(chunked_logps, head)
        return fn(weight, hidden, target, jnp.int32(128))[0].sum()

    fn = jax.jit(jax.grad(total, 1 if frozen else (0, 1)))
    program = fn.lower(weight, hidden, target).compile()
    return pytest.importorskip("covey_plan.hlo").Program(
        program.as_text()
    ), program.memory_analysis().temp_size_in_bytes


CHUNK_BYTES = 64 * 32 * 4
"""Hidden states of one chunk."""
PIECE_BYTES = 8192 * 32 * 4 // 4
"""One of four devices' pieces of the head."""


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("frozen", [True, False])
def test_collectives_are_those_of_the_derivation(shape: tuple[int, int], frozen: bool) -> None:
    """In a loop over chunks, and not over blocks, a chunk's hidden states and gradients, and sums per token. Outside,
    the exchange of a device's piece of the head for its part: never the head, and never more than a piece.
    """
    program, _ = compiled(shape, frozen)
    chunks = [x for x in program.collectives() if x.loops]
    assert {len(x.loops) for x in chunks} == {1}
    assert max(x.bytes for x in chunks) == CHUNK_BYTES
    once = [x for x in program.collectives() if not x.loops and x.bytes > 10_000]
    fsdp, tp = shape
    passes = 1 if frozen else 2
    large = [x.opcode for x in chunks if x.bytes > CHUNK_BYTES // 8]
    assert large.count("all-gather") == (fsdp > 1) * passes
    assert large.count("reduce-scatter") == (fsdp > 1)
    assert large.count("all-reduce") == (tp > 1)
    assert len(large) == (fsdp > 1) * (passes + 1) + (tp > 1)
    assert [(x.opcode, x.bytes) for x in once] == [("all-to-all", PIECE_BYTES)] * (fsdp > 1) * passes


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_no_array_is_larger_than_a_piece_of_the_head(shape: tuple[int, int]) -> None:
    program, _ = compiled(shape, frozen=False)
    shape_bytes = pytest.importorskip("covey_plan.hlo").shape_bytes
    assert max(shape_bytes(shape) for one in program.instructions for shape in one.shapes) <= PIECE_BYTES


def test_scratch_memory_does_not_grow_with_the_vocabulary_under_a_frozen_head() -> None:
    """Except for the part that the exchange makes."""
    small, large = (compiled((2, 2), True, vocabulary)[1] for vocabulary in (16_384, 65_536))
    assert large - small <= 1.1 * 2 * (65_536 - 16_384) * 32 * 4 // 4
