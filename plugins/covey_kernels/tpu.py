"""Attention over packed trees on TPUs, by Pallas and Mosaic: forward, gradient of queries, gradient of keys and values.

The grid walks a `Worklist` of visible pairs of blocks: no step is spent on a masked pair, and none is computed but
those on a tree's edges under a mask. Scores are [keys, queries]: the statistics of the softmax are then rows of lanes,
and the heads of a group lie beside each other, so that a block of keys is read once for its group (Dao et al., 2022,
"FlashAttention").

A step takes several key heads where blocks are small, since a step has a fixed cost and the compiler overlaps the
heads.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from covey.models.spans import MASKED_SCORE, Spans
from covey_kernels.rows import RowKernel, kernel_attention
from covey_kernels.worklist import FIRST, FULL, LAST, BlockSizes, Worklist, visible_blocks, worklist

LONG_ROW = 4096
"""Length from which rows have blocks of 256: their branches are long, so that few pairs are partly masked."""
MAX_STEP = 16 * 128 * 128
"""Largest number of scores in a step of the grid; with it, a step's arrays fit into vector memory."""
VMEM_BYTES = 32 * 2**20
MAX_WIDTH = 512
"""Widest heads that were tried."""


class Tables(NamedTuple):
    """Visibility as the kernels read it, for all layers with one sliding window.

    Attributes:
        queries: for each block of queries, `Spans.start` and index in the row, repeated for the heads of a group.
        ends: `Spans.end` of each block of keys.
        by_query, by_key: visible pairs.
    """

    queries: Int[Array, "N 2 GQ"]
    ends: Int[Array, "M U 1"]
    by_query: Worklist
    by_key: Worklist


def block_sizes(time: int, group: int) -> BlockSizes:
    """Return the sizes of blocks for rows of `time` tokens with `group` heads per key head.

    >>> block_sizes(2048, 4), block_sizes(8192, 2)
    (BlockSizes(queries=128, keys=128), BlockSizes(queries=256, keys=256))
    """
    size = 256 if time >= LONG_ROW and group <= 4 and time % 256 == 0 else 128
    return BlockSizes(size, size)


def tables(spans: Spans, group: int, width: int, sizes: BlockSizes | None = None) -> Tables:
    """Return the tables of rows whose length the sizes of blocks divide."""
    sizes = sizes or block_sizes(spans.time, group)
    index = jnp.broadcast_to(jnp.arange(spans.time), spans.start.shape)
    queries = jnp.stack([spans.start, index], 1).reshape(len(index), 2, -1, sizes.queries).swapaxes(1, 2)
    blocks = visible_blocks(spans, sizes)
    return Tables(
        jnp.tile(queries.reshape(-1, 2, sizes.queries), (1, 1, group)).astype(jnp.int32),
        spans.end.reshape(-1, sizes.keys, 1).astype(jnp.int32),
        worklist(blocks),
        worklist(blocks.by_key()),
    )


def forward(
    q: Float[Array, "R T H W"],
    k: Float[Array, "R T K W"],
    v: Float[Array, "R T K W"],
    tables: Tables,
    softcap: float | None,
    interpret: bool,
) -> tuple[Float[Array, "R T H W"], Float[Array, "R K Q 1 GQ"]]:
    """Compute attention of scaled queries, and the logsumexp of their scores in the layout of `backward`."""
    kv_heads, width = k.shape[2:]
    queries, keys, values = _grouped(q, kv_heads), _heads_first(k), _heads_first(v)
    columns = tables.queries.shape[-1]
    statistic = (len(k), kv_heads, q.shape[1] * queries.shape[2] // columns, 1, columns)
    out, logsumexp = _call(
        _Kernel("tree_attention_forward", softcap, interpret, _start_forward, _forward, _finish_forward),
        tables,
        {"q": queries, "k": keys, "v": values},
        {
            "out": jax.ShapeDtypeStruct(queries.shape, q.dtype),
            "logsumexp": jax.ShapeDtypeStruct(statistic, jnp.float32),
        },
        {"max_score": (1, columns), "sum_exp": (1, columns), "mixed": (width, columns)},
    )
    return _ungrouped(out), logsumexp


def backward(
    saved: tuple[Array, Array, Array, Array, Array], grad: Array, tables: Tables, softcap: float | None, interpret: bool
) -> tuple[Float[Array, "R T H W"], Float[Array, "R T K W"], Float[Array, "R T K W"]]:
    """Compute the gradients of q, k and v; `saved` holds them, then the results of `forward`."""
    q, k, v, out, logsumexp = saved
    kv_heads, width = k.shape[2:]
    queries, keys, values = _grouped(q, kv_heads), _heads_first(k), _heads_first(v)
    inputs = {"q": queries, "k": keys, "v": values, "grad_out": _grouped(grad, kv_heads), "logsumexp": logsumexp}
    kernel = _Kernel("tree_attention_dq", softcap, interpret, _start_dq, _dq, _finish_dq)
    outputs = {"dq": _like(queries), "delta": _like(logsumexp)}
    sums = {"sum_q": (tables.queries.shape[-1], width)}
    dq, delta = _call(kernel, tables, inputs | {"out": _grouped(out, kv_heads)}, outputs, sums)
    kernel = _Kernel("tree_attention_dkv", softcap, interpret, _start_dkv, _dkv, _finish_dkv, by_key=True)
    outputs, sums = {"dk": _like(keys), "dv": _like(values)}, {"sum_k": (tables.ends.shape[1], width)}
    dk, dv = _call(kernel, tables, inputs | {"delta": delta}, outputs, sums | {"sum_v": sums["sum_k"]})
    return _ungrouped(dq), _heads_first(dk), _heads_first(dv)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class _Kernel(NamedTuple):
    """Functions of a kernel on the references of one key head: `start` and `finish` an accumulator, `step` a pair."""

    name: str
    softcap: float | None
    interpret: bool
    start: Callable[..., None]
    step: Callable[..., None]
    finish: Callable[..., None]
    by_key: bool = False


_LAYOUTS: dict[str, str] = {
    **dict.fromkeys(("q", "grad_out", "out", "dq"), "grouped"),
    **dict.fromkeys(("k", "v", "dk", "dv"), "keys"),
    **dict.fromkeys(("logsumexp", "delta"), "statistic"),
    **{name: name for name in ("queries", "ends")},
}


def _call(
    kernel: _Kernel,
    tables: Tables,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    sums: dict[str, tuple[int, int]],
) -> list[Array]:
    """Run a kernel over the visible pairs; `sums` are the shapes of its accumulators, in float32."""
    kv_heads, group = inputs["q"].shape[1:3]
    sizes = BlockSizes(tables.queries.shape[-1] // group, tables.ends.shape[1])
    heads = heads_per_step(kv_heads, group, sizes)
    specs = _block_specs(inputs["q"].shape, sizes, heads, kernel.by_key)
    work = tables.by_key if kernel.by_key else tables.by_query
    names = ["queries", "ends", *inputs, *outputs, *sums]

    def specs_of(names: Iterable[str]) -> list[Any]:
        return [specs[_LAYOUTS[name]] for name in names]

    result: list[Array] = pl.pallas_call(
        partial(_run_step, kernel, names, heads, specs["num_keys"]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv_heads // heads, work.num_pairs[0]),
            in_specs=specs_of(("queries", "ends", *inputs)),
            out_specs=specs_of(outputs),
            scratch_shapes=[pltpu.VMEM((heads, *shape), jnp.float32) for shape in sums.values()],
        ),
        out_shape=list(outputs.values()),
        name=kernel.name,
        interpret=kernel.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
    )(work.outer, work.inner, work.flags, tables.queries, tables.ends, *inputs.values())
    return result


def heads_per_step(kv_heads: int, group: int, sizes: BlockSizes) -> int:
    """Return the number of key heads in a step: a divisor of them, and half of them at most, since a chip with two
    cores divides the heads.

    >>> heads_per_step(8, 4, BlockSizes(128, 128)), heads_per_step(1, 7, BlockSizes(256, 256))
    (4, 1)
    """
    most = min(kv_heads // 2, MAX_STEP // (group * sizes.queries * sizes.keys))
    return next((n for n in range(most, 1, -1) if kv_heads % n == 0), 1)


def _block_specs(shape: tuple[int, ...], sizes: BlockSizes, heads: int, by_key: bool) -> dict[str, Any]:
    """Return, for each layout of arrays, the index map from a pair of the worklist to the blocks of its step."""
    _, _, group, time, width = shape
    num_queries, num_keys, columns = time // sizes.queries, time // sizes.keys, group * sizes.queries

    def query(pair: Array, outer: Any, inner: Any) -> tuple[Array, Array]:
        block = (inner if by_key else outer)[pair]
        return jax.lax.div(block, num_queries), jax.lax.rem(block, num_queries)

    def key(pair: Array, outer: Any, inner: Any) -> tuple[Array, Array]:
        block = (outer if by_key else inner)[pair]
        return jax.lax.div(block, num_keys), jax.lax.rem(block, num_keys)

    def spec(block: tuple[int | None, ...], find: Callable[..., Any], place: Callable[..., Any]) -> Any:
        return pl.BlockSpec(block, lambda head, pair, outer, inner, _: place(head, *find(pair, outer, inner)))

    return {
        "num_keys": num_keys,
        "grouped": spec((None, heads, group, sizes.queries, width), query, lambda h, r, i: (r, h, 0, i, 0)),
        "keys": spec((None, heads, sizes.keys, width), key, lambda h, r, i: (r, h, i, 0)),
        "statistic": spec((None, heads, None, 1, columns), query, lambda h, r, i: (r, h, i, 0, 0)),
        "queries": spec((None, 2, columns), query, lambda h, r, i: (r * num_queries + i, 0, 0)),
        "ends": spec((None, sizes.keys, 1), key, lambda h, r, i: (r * num_keys + i, 0, 0)),
    }


def _run_step(
    kernel: _Kernel, names: list[str], heads: int, num_keys: int, outer: Any, inner: Any, flags: Any, *refs: Any
) -> None:
    """Run one step of the grid: a pair of blocks, for `heads` key heads."""
    pair, named = pl.program_id(1), dict(zip(names, refs, strict=True))
    queries, ends = named.pop("queries"), named.pop("ends")
    each = [SimpleNamespace(**{name: ref.at[head] for name, ref in named.items()}) for head in range(heads)]

    def for_each(function: Callable[..., None]) -> None:
        for one in each:
            function(one)

    def masked() -> None:
        block = (outer if kernel.by_key else inner)[pair]
        mask = _mask(jax.lax.rem(block, num_keys) * ends.shape[0], queries[...], ends[...])
        for_each(partial(kernel.step, softcap=kernel.softcap, mask=mask))

    pl.when(flags[pair] & FIRST != 0)(partial(for_each, kernel.start))
    pl.when(flags[pair] & FULL == 0)(masked)
    full = partial(kernel.step, softcap=kernel.softcap, mask=None)
    pl.when(flags[pair] & FULL != 0)(partial(for_each, full))
    pl.when(flags[pair] & LAST != 0)(partial(for_each, kernel.finish))


def _mask(first_key: Array, queries: Array, ends: Array) -> Array:
    key = first_key + jax.lax.broadcasted_iota(jnp.int32, ends.shape, 0)
    start, index = queries[0:1], queries[1:2]
    return (start <= key) & (key <= index) & (index < ends)


def _start_forward(refs: Any) -> None:
    refs.max_score[...] = jnp.full_like(refs.max_score, MASKED_SCORE)
    refs.sum_exp[...], refs.mixed[...] = jnp.zeros_like(refs.sum_exp), jnp.zeros_like(refs.mixed)


def _forward(refs: Any, softcap: float | None, mask: Array | None) -> None:
    scores, _ = _scores(refs, softcap)
    scores = scores if mask is None else jnp.where(mask, scores, MASKED_SCORE)
    max_score = jnp.maximum(refs.max_score[...], scores.max(axis=0, keepdims=True))
    weights, decay = jnp.exp(scores - max_score), jnp.exp(refs.max_score[...] - max_score)
    refs.max_score[...] = max_score
    refs.sum_exp[...] = refs.sum_exp[...] * decay + weights.sum(axis=0, keepdims=True)
    mixed = dot(refs.v[...], weights.astype(refs.v.dtype), 0, 0)
    refs.mixed[...] = refs.mixed[...] * decay + mixed


def _finish_forward(refs: Any) -> None:
    out = (refs.mixed[...] / refs.sum_exp[...]).T
    refs.out[...] = out.astype(refs.out.dtype).reshape(refs.out.shape)
    refs.logsumexp[...] = refs.max_score[...] + jnp.log(refs.sum_exp[...])


def _start_dq(refs: Any) -> None:
    """Also compute delta, the sum of grad_out · out over a head, as a row: `backward` reads neither array for it."""
    refs.sum_q[...] = jnp.zeros_like(refs.sum_q)
    products = _flat(refs.grad_out).astype(jnp.float32) * _flat(refs.out).astype(jnp.float32)
    refs.delta[...] = dot(jnp.ones((1, products.shape[1]), jnp.float32), products, 1, 1)


def _dq(refs: Any, softcap: float | None, mask: Array | None) -> None:
    _, grad_scores = _weights(refs, softcap, mask)
    refs.sum_q[...] += dot(grad_scores.astype(refs.k.dtype), refs.k[...], 0, 0)


def _finish_dq(refs: Any) -> None:
    refs.dq[...] = refs.sum_q[...].astype(refs.dq.dtype).reshape(refs.dq.shape)


def _start_dkv(refs: Any) -> None:
    refs.sum_k[...], refs.sum_v[...] = jnp.zeros_like(refs.sum_k), jnp.zeros_like(refs.sum_v)


def _dkv(refs: Any, softcap: float | None, mask: Array | None) -> None:
    weights, grad_scores = _weights(refs, softcap, mask)
    grad_out, q = _flat(refs.grad_out), _flat(refs.q)
    refs.sum_v[...] += dot(weights.astype(grad_out.dtype), grad_out, 1, 0)
    refs.sum_k[...] += dot(grad_scores.astype(q.dtype), q, 1, 0)


def _finish_dkv(refs: Any) -> None:
    refs.dk[...], refs.dv[...] = refs.sum_k[...].astype(refs.dk.dtype), refs.sum_v[...].astype(refs.dv.dtype)


def _weights(refs: Any, softcap: float | None, mask: Array | None) -> tuple[Array, Array]:
    """Return the softmax's weights [keys, queries], recomputed from the logsumexp, and the gradient of the scores."""
    scores, slope = _scores(refs, softcap)
    weights = jnp.exp(scores - refs.logsumexp[...])
    weights = weights if mask is None else jnp.where(mask, weights, 0.0)
    grad_scores = weights * (dot(refs.v[...], _flat(refs.grad_out), 1, 1) - refs.delta[...])
    return weights, grad_scores if slope is None else grad_scores * slope


def _scores(refs: Any, softcap: float | None) -> tuple[Array, Array | None]:
    """Return the scores [keys, queries] after the soft-cap, and the soft-cap's derivative."""
    scores = dot(refs.k[...], _flat(refs.q), 1, 1)
    if softcap is None:
        return scores, None
    tanh = jnp.tanh(scores * (1 / softcap))
    return softcap * tanh, 1 - tanh * tanh


def dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Return the product of two blocks over one axis of each, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _flat(grouped: Any) -> Array:
    """Return a block [G, queries, W] as [G · queries, W]."""
    block: Array = grouped[...]
    return block.reshape(-1, block.shape[-1])


def _grouped(x: Float[Array, "R T H W"], kv_heads: int) -> Float[Array, "R K G T W"]:
    rows, time, _, width = x.shape
    return x.reshape(rows, time, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)


def _ungrouped(x: Float[Array, "R K G T W"]) -> Float[Array, "R T H W"]:
    rows, _, _, time, width = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(rows, time, -1, width)


def _heads_first(x: Float[Array, "R T K W"]) -> Float[Array, "R K T W"]:
    return x.swapaxes(1, 2)


attention = partial(kernel_attention, RowKernel(tables, forward, backward, MAX_WIDTH))
"""Function that `covey.attention` offers."""
