"""Attention within rows by a kernel, whatever the platform: padding, heads and rows on a mesh, and the gradient.

Lists of visible blocks are made once for all layers with the same sliding window. On a mesh each device runs a kernel
on its own rows and heads, without communication. The backward pass recomputes scores from the logsumexp, which is saved
with the output: rematerialising a layer does not run attention again.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from covey.models.attention import Attend
from covey.models.decoder import Decoder
from covey.models.layers import mark_product
from covey.models.span_attention import attend_blockwise, limit_spans, select_window, stack_windows
from covey.models.spans import Spans, distinct_windows
from covey.parallel.arrays import DEFAULT_RULES, num_row_shards, row_sharding

ROW_MULTIPLE = 128
"""Kernels run on rows whose length is a multiple of this; others are padded."""


class RowKernel(NamedTuple):
    """Functions of a platform's kernels.

    Attributes:
        tables: spans, heads of a group, width of a head → the tables of visible blocks.
        forward: queries, keys, values, tables, softcap, interpret → output and logsumexp.
        backward: what was saved, gradient, tables, softcap, interpret → gradients of queries, keys and values.
        max_width: greatest width of a head; layers with wider heads attend blockwise.
    """

    tables: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    max_width: int


def kernel_attention(
    kernel: RowKernel, model: Decoder, spans: Spans, positions: Int[Array, "B T"], interpret: bool
) -> Attend:
    """Return the `Attend` of all layers of `model`; arguments as for `span_attention`."""
    c = model.config
    by_shape = {
        shape: _attend_by_kernel(kernel, model, spans, positions, interpret, *shape)
        if shape[1] <= kernel.max_width
        else attend_blockwise(model, spans, positions)
        for shape in sorted({c.heads(layer) for layer in range(c.num_layers)})
    }

    def attend(q: Array, k: Array, v: Array, cache: Any, **options: Any) -> tuple[Array, Any]:
        return by_shape[k.shape[2], k.shape[3]](q, k, v, cache, **options)

    return attend


def _attend_by_kernel(
    kernel: RowKernel,
    model: Decoder,
    spans: Spans,
    positions: Int[Array, "B T"],
    interpret: bool,
    kv_heads: int,
    width: int,
) -> Attend:
    c, mesh, windows = model.config, model.mesh, distinct_windows(model.config.windows)
    rows = None if mesh.empty or len(positions) % num_row_shards(mesh) else row_sharding(mesh).spec[0]
    heads, repeats = head_axes(c.num_heads, kv_heads, mesh)
    group, padding = c.num_heads // (kv_heads * repeats), -spans.time % ROW_MULTIPLE
    call = _Call(kernel, mesh, rows, heads, None, interpret)

    def make_tables(spans: Spans, positions: Array) -> Any:
        limited = limit_spans(spans, positions, windows)
        return [kernel.tables(one.pad(spans.time + padding), group, width) for one in limited]

    per_window = stack_windows(call.shard(make_tables, ("table", "table"), "table")(spans, positions))

    def attend(
        q: Array,
        k: Array,
        v: Array,
        cache: Any,
        *,
        window: Any = None,
        softcap: float | None = None,
        write: bool = True,
    ) -> tuple[Array, Any]:
        time, tables = q.shape[1], select_window(per_window, windows, window)
        k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x for x in (q, k, v))
        return _attention(call._replace(softcap=softcap), q, k, v, tables)[:, :time], cache

    return attend


def head_axes(heads: int, kv_heads: int, mesh: AbstractMesh) -> tuple[Any, int]:
    """Return the mesh axes that divide the heads, and how often each key head is repeated so that they divide the key
    heads too; no axes where they do not divide the queries' heads.
    """
    axes = tuple(axis for axis in DEFAULT_RULES["heads"] if axis in mesh.shape)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    return (axes, math.lcm(kv_heads, parts) // kv_heads) if heads % parts == 0 else (None, 1)


class _Call(NamedTuple):
    """Static arguments of a kernel, and the mesh axes that divide rows and heads; hashable."""

    kernel: RowKernel
    mesh: AbstractMesh
    rows: Any
    heads: Any
    softcap: float | None
    interpret: bool

    def shard(self, function: Any, inputs: Any, outputs: Any) -> Any:
        """Return `function` run by each device on its own part; letters name the kinds of arrays: activations
        [R, T, H, W], statistics [R, H, ...] or tables [R, ...].
        """
        if self.mesh.empty:
            return function
        specs = {
            "activation": PartitionSpec(self.rows, None, self.heads),
            "statistic": PartitionSpec(self.rows, self.heads),
            "table": PartitionSpec(self.rows),
        }
        kinds = partial(jax.tree.map, specs.__getitem__)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=kinds(inputs), out_specs=kinds(outputs), check_vma=False
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    call: _Call, q: Float[Array, "R T H W"], k: Float[Array, "R T K W"], v: Float[Array, "R T K W"], tables: Any
) -> Float[Array, "R T H W"]:
    return _forward(call, q, k, v, tables)[0]


def _forward(call: _Call, q: Array, k: Array, v: Array, tables: Any) -> tuple[Array, Any]:
    run = partial(call.kernel.forward, softcap=call.softcap, interpret=call.interpret)
    inputs = ("activation", "activation", "activation", "table")
    out, logsumexp = map(mark_product, call.shard(run, inputs, ("activation", "statistic"))(q, k, v, tables))
    return out, (q, k, v, out, logsumexp, tables)


def _backward(call: _Call, saved: tuple[Any, ...], grad: Array) -> tuple[Any, ...]:
    *arrays, tables = saved

    def run(saved: Any, grad: Array, tables: Any) -> Any:
        return call.kernel.backward(saved, grad, tables, call.softcap, call.interpret)

    inputs = (("activation",) * 4 + ("statistic",), "activation", "table")
    return *call.shard(run, inputs, ("activation",) * 3)(tuple(arrays), grad, tables), None


_attention.defvjp(_forward, _backward)
