"""Attention kernels, run as ordinary programs, against plain attention under the dense mask of random trees."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from covey.models.attention import Attend, dot_product_attention, masked_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.span_attention import span_attention
from covey.models.spans import NO_WINDOW, Spans, span_mask
from covey.parallel.arrays import shardings
from covey_kernels import gpu, tpu
from covey_kernels.rows import head_axes
from covey_kernels.worklist import FIRST, FULL, LAST, BlockSizes, block_lists, visible_blocks, worklist

WINDOWS = (None, 1, 7, 30, 500)
ROUNDING = 2.0**-24
TOLERANCE = 2 * 96 * ROUNDING
"""Share of the largest number by which two results in float32 may differ that are sums over rows of 96 tokens."""


class Trees(NamedTuple):
    """Rows of random trees: their spans and positions, and who is an ancestor of whom."""

    spans: Spans
    positions: jax.Array
    ancestor: np.ndarray

    def mask(self, window: int | None) -> np.ndarray:
        positions = np.asarray(self.positions)
        near = positions[:, :, None] - positions[:, None, :] < (window or NO_WINDOW)
        return self.ancestor & near


def random_trees(rows: int, time: int, depth: int, seed: int = 0) -> Trees:
    """Rows of trees in depth-first order, their tails padding; a row of padding last."""
    rng = np.random.default_rng(seed)
    parents = np.full((rows, time), -1)
    for row in parents[:-1]:
        used = int(rng.integers(2 * time // 3, time + 1))
        for at, parent in zip(range(used), grow(rng, time, depth), strict=False):
            row[at] = parent
    ancestor = np.broadcast_to(np.eye(time, dtype=bool), (rows, time, time)).copy()
    for row, q in np.argwhere(parents >= 0):
        ancestor[row, q] |= ancestor[row, parents[row, q]]
    start = ancestor.argmax(2)
    end = time - ancestor[:, ::-1].argmax(1)
    positions = ancestor.sum(2) - 1
    return Trees(Spans(jnp.asarray(start), jnp.asarray(end)), jnp.asarray(positions), ancestor)


def grow(rng: np.random.Generator, time: int, depth: int) -> Iterator[int]:
    """Parents of tokens, tree after tree."""
    count = 0

    def branch(parent: int, level: int) -> Iterator[int]:
        nonlocal count
        for _ in range(int(rng.integers(1, max(2, time // 5)))):
            yield parent
            parent, count = count, count + 1
        if level < depth:
            for _ in range(int(rng.integers(1, 4))):
                yield from branch(parent, level + 1)

    while True:
        yield from branch(-1, 1)


@pytest.mark.parametrize("depth", [2, 4])
def test_two_numbers_a_token_say_what_is_visible_under_any_window(depth: int) -> None:
    trees = random_trees(3, 128, depth)
    for window in WINDOWS:
        spans = trees.spans if window is None else trees.spans.limit(trees.positions, window)
        np.testing.assert_array_equal(span_mask(spans), trees.mask(window))


def test_padded_spans_see_themselves_alone() -> None:
    trees = random_trees(2, 50, 2)
    mask = np.asarray(span_mask(trees.spans.pad(64)))
    np.testing.assert_array_equal(mask[:, :50, :50], trees.ancestor)
    np.testing.assert_array_equal(mask[:, 50:], np.broadcast_to(np.eye(64, dtype=bool)[50:], (2, 14, 64)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [BlockSizes(16, 16), BlockSizes(32, 16), BlockSizes(16, 64)])
def test_lists_hold_each_visible_pair_once(sizes: BlockSizes) -> None:
    """In the order of their accumulators, whose first and last pairs are marked; full pairs are all visible."""
    trees = random_trees(3, 128, 3)

    @jax.jit
    def compute(spans: Spans) -> Any:
        blocks = visible_blocks(spans, sizes)
        return [(worklist(one), block_lists(one)) for one in (blocks, blocks.by_key())]

    for by_key, (lists, (order, length)) in enumerate(jax.tree.map(np.asarray, compute(trees.spans))):
        tiles = trees.ancestor.reshape(3, 128 // sizes.queries, sizes.queries, 128 // sizes.keys, sizes.keys)
        tiles = tiles.transpose(0, 3, 1, 4, 2) if by_key else tiles.transpose(0, 1, 3, 2, 4)
        rows, outer, inner = np.nonzero(tiles.any((3, 4)))
        count = int(lists.num_pairs[0])
        assert count == len(rows) <= len(lists.outer)
        np.testing.assert_array_equal(lists.outer[:count], rows * tiles.shape[1] + outer)
        np.testing.assert_array_equal(lists.inner[:count], rows * tiles.shape[2] + inner)
        flags, accumulator = lists.flags[:count], rows * tiles.shape[1] + outer
        np.testing.assert_array_equal(flags & FIRST > 0, np.append(True, np.diff(accumulator) > 0))
        np.testing.assert_array_equal(flags & LAST > 0, np.append(np.diff(accumulator) > 0, True))
        assert not ((flags & FULL > 0) & ~tiles.all((3, 4))[rows, outer, inner]).any()
        for row, block in np.ndindex(length.shape):
            visited = order[row, block, : length[row, block]]
            np.testing.assert_array_equal(visited, np.nonzero(tiles[row, block].any((1, 2)))[0])


def values_and_gradients(
    kernel: ModuleType, trees: Trees, heads: tuple[int, int, int], window: int | None, softcap: float | None, sizes: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The output and its three gradients by `kernel`, and by the oracle."""
    (rows, time), (num_heads, kv_heads, width) = trees.positions.shape, heads
    rng = np.random.default_rng(1)
    draw = lambda n: jnp.asarray(rng.normal(size=(rows, time, n, width)), jnp.float32)  # noqa: E731
    q, k, v, grad = (draw(n) for n in (num_heads, kv_heads, kv_heads, num_heads))
    q = q * (4.0 if softcap else 2.0) / width**0.5
    spans = trees.spans if window is None else trees.spans.limit(trees.positions, window)

    @jax.jit
    def run(*qkv: jax.Array) -> Any:
        tables = kernel.tables(spans, num_heads // kv_heads, width, sizes)
        out, logsumexp = kernel.forward(*qkv, tables, softcap, True)
        return out, *kernel.backward((*qkv, out, logsumexp), grad, tables, softcap, True)

    @jax.jit
    def plain(*qkv: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *x: dot_product_attention(*x, jnp.asarray(trees.mask(window)), softcap), *qkv)
        return out, *pull(grad)

    return list(map(np.asarray, run(q, k, v))), list(map(np.asarray, plain(q, k, v)))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [tpu, gpu], ids=["tpu", "cuda"])
@pytest.mark.parametrize(
    ("heads", "depth", "window", "softcap", "blocks"),
    [
        ((8, 2, 80), 2, None, 50.0, (32, 16)),
        ((7, 1, 96), 2, 40, None, (16, 32)),
        ((4, 4, 16), 4, 17, 30.0, (32, 32)),
        ((2, 1, 512), 2, None, None, (32, 32)),
    ],
)
def test_values_and_gradients_are_those_of_plain_attention(
    kernel: ModuleType,
    heads: tuple[int, int, int],
    depth: int,
    window: int | None,
    softcap: float | None,
    blocks: tuple[int, int],
) -> None:
    """As many heads per key head, and as wide, as those of the families."""
    one, other = BlockSizes(*blocks), BlockSizes(*blocks[::-1])  # smaller than those of a device, to have several
    sizes = one if kernel is tpu else gpu.KernelSizes(one, one, other)
    got, want = values_and_gradients(kernel, random_trees(2, 96, depth), heads, window, softcap, sizes)
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, want, strict=True)]
    assert max(errors) < TOLERANCE, dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))


CONFIG = ModelConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    windows=(None, 9), attn_softcap=20.0,
)  # fmt: skip
TREES = random_trees(4, 96, 2)


def hidden_and_gradients(
    state: Any, config: ModelConfig, attend_of: Callable[[Decoder], Attend], **switches: Any
) -> tuple[Any, Any]:
    """What a decoder makes of the trees' tokens, and the gradient of a sum over it."""
    graph = nnx.split(Decoder(config, rngs=nnx.Rngs(0), **switches))[0]
    tokens = np.random.default_rng(3).integers(0, 48, TREES.positions.shape)
    is_token = (TREES.spans.end - TREES.spans.start > 1)[..., None]

    def total(state: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, state)
        hidden = jnp.where(is_token, model(tokens, TREES.positions, attend_of(model))[0], 0)
        return jnp.sin(hidden).sum(), hidden

    (_, hidden), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(state)
    return hidden, gradient


def kernel_attention(model: Decoder, platform: str) -> Attend:
    model.platform = platform
    return span_attention(model, TREES.spans, TREES.positions, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "kv_heads"), [("tpu", 2), ("cuda", 1)])
def test_a_decoder_computes_on_a_mesh_what_it_does_on_one_device(platform: str, kv_heads: int) -> None:
    """Rows over one axis, heads over the other; layers with two windows; the lists are each device's own. A key head
    that the mesh does not divide is repeated.
    """
    config = replace(CONFIG, num_kv_heads=kv_heads)
    state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1]
    plain = lambda model: masked_attention(jnp.asarray(TREES.ancestor), TREES.positions)  # noqa: E731
    want = hidden_and_gradients(state, config, plain)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(state, shardings(state, mesh))
    got = hidden_and_gradients(placed, config, lambda model: kernel_attention(model, platform))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = 2 * CONFIG.num_layers * TOLERANCE * float(np.abs(b).max())  # forward and back
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts", "repeats"), [(8, 4, 4, 1), (8, 1, 4, 4), (32, 8, 16, 2), (12, 2, 3, 3)]
)
def test_key_heads_are_repeated_until_the_mesh_divides_them(
    heads: int, kv_heads: int, parts: int, repeats: int
) -> None:
    assert head_axes(heads, kv_heads, AbstractMesh((2, parts), ("fsdp", "tp"))) == (("tp",), repeats)


def test_heads_that_the_mesh_does_not_divide_are_computed_by_each_device() -> None:
    assert head_axes(14, 2, AbstractMesh((2, 4), ("fsdp", "tp"))) == (None, 1)


def kernels(jaxpr: Any) -> Iterator[str]:
    """Names of the kernels of a traced program whose results are used."""
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | set(map(id, jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call" and used & set(map(id, eqn.outvars)):
            yield eqn.params["name"]
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernels(inner)


def traced(platform: str, of: Callable[..., Any], dtype: str = "float32") -> list[str]:
    """Kernels of a decoder, or of its gradient."""
    make = lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtype), compute_dtype=jnp.dtype(dtype))  # noqa: E731
    graph, state = nnx.split(nnx.eval_shape(make))

    def total(state: Any) -> jax.Array:
        model = nnx.merge(graph, state)
        model.platform = platform
        attend = span_attention(model, TREES.spans, TREES.positions)
        return model(jnp.zeros((4, 96), jnp.int32), TREES.positions, attend)[0].sum()

    return [name.removeprefix("tree_attention_") for name in kernels(jax.make_jaxpr(of(total))(state).jaxpr)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_layer_computed_again_does_not_attend_again(platform: str, dtype: str) -> None:
    assert traced(platform, jax.grad, dtype) == ["forward", "dq", "dkv"]


@pytest.mark.parametrize(("platform", "names"), [("tpu", ["forward"] * 2), ("cuda", ["forward"])])
def test_heads_too_wide_for_a_kernel_attend_without_it(platform: str, names: list[str]) -> None:
    """Gemma 4: heads of 256 with a window, of 512 without. On GPUs the latter attend blockwise."""
    config = replace(CONFIG, windows=(9, None), layer_heads=((2, 256), (2, 512)))

    def attended(k: jax.Array, wide: jax.Array) -> jax.Array:
        model: Any = SimpleNamespace(config=config, platform=platform, mesh=AbstractMesh((), ()))
        attend, q = span_attention(model, TREES.spans, TREES.positions), jnp.repeat(k, 2, axis=2)
        return attend(q, k, k, None, window=9)[0].sum() + attend(jnp.repeat(wide, 2, axis=2), wide, wide, None)[0].sum()

    shapes = [jax.ShapeDtypeStruct((4, 96, 2, width), jnp.float32) for width in (256, 512)]
    found = [name.removeprefix("tree_attention_") for name in kernels(jax.make_jaxpr(attended)(*shapes).jaxpr)]
    assert found == names


def test_the_platform_chooses_the_implementation() -> None:
    """Older GPUs have no kernels."""
    assert [traced(platform, lambda f: f) for platform in ("cpu", "gpu", "tpu", "cuda")] == [
        [], [], ["forward"], ["forward"],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels_lower_for_their_platform(platform: str) -> None:
    """Without a device; their compilers have more to say (`make aot`)."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))

    def run(state: Any) -> jax.Array:
        model = nnx.merge(graph, state)
        model.platform = platform
        attend = span_attention(model, TREES.spans, TREES.positions)
        return model(jnp.zeros((4, 96), jnp.int32), TREES.positions, attend)[0]

    text = jax.jit(run).trace(state).lower(lowering_platforms=(platform,)).as_text()
    assert "tree_attention_forward" in text
