"""Attention within rows, forward and backward, as the compiler for v5e leaves it."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from covey.models.config import ModelConfig
from covey.models.decoder import Attention, rngs_for_shapes
from covey.models.layers import rope_frequencies, rope_tables
from covey.models.span_attention import span_attention
from covey.models.spans import Spans

KERNELS = ["dkv", "dq", "forward"]
COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def config_of(heads: int, kv_heads: int, width: int, softcap: float | None, window: int | None) -> ModelConfig:
    return ModelConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_layers=2, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=width, attn_softcap=softcap, windows=window and (None, window),
    )  # fmt: skip


def compile_gradients(config: ModelConfig, mesh: Mesh, rows: int, time: int) -> Any:
    """Attention of rows of `time` tokens and its gradients; a layer's window is an argument, as in a loop of layers."""
    model: Any = SimpleNamespace(config=config, mesh=mesh.abstract_mesh, platform="tpu")
    shard = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731

    def heads(number: int) -> jax.ShapeDtypeStruct:
        axes = ("fsdp", None, "tp" if number % mesh.shape["tp"] == 0 else None)
        return jax.ShapeDtypeStruct((rows, time, number, config.head_dim), jnp.bfloat16, sharding=shard(*axes))

    numbers = jax.ShapeDtypeStruct((rows, time), jnp.int32, sharding=shard("fsdp"))
    window = jax.ShapeDtypeStruct((), jnp.int32, sharding=shard())

    def gradients(q: Any, k: Any, v: Any, grad: Any, spans: Spans, positions: Any, window: Any) -> Any:
        attend = span_attention(model, spans, positions)
        run = lambda *qkv: attend(*qkv, None, window=window, softcap=config.attn_softcap)[0]  # noqa: E731
        out, pull = jax.vjp(run, q, k, v)
        return out, pull(grad)

    q, k = heads(config.num_heads), heads(config.num_kv_heads)
    return jax.jit(gradients).lower(q, k, k, q, Spans(numbers, numbers), numbers, window).compile()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "softcap", "window", "time"),
    [
        (14, 2, 64, None, None, 1920),
        (32, 8, 128, None, None, 1920),
        (16, 8, 256, 50.0, 512, 1920),
        (16, 8, 256, 50.0, 512, 8192),
        (8, 1, 256, None, None, 1920),
        (28, 4, 128, None, None, 8192),
        (32, 32, 80, None, None, 1920),
        (32, 32, 96, None, 2047, 4096),
    ],
)
def test_each_device_computes_its_rows_and_heads_and_no_array_of_all_scores(
    topology: Callable[[str], Any],
    heads: int,
    kv_heads: int,
    width: int,
    softcap: float | None,
    window: int | None,
    time: int,
) -> None:
    """Three kernels, memory for a copy of each argument and result, and no collective, except that the gradients of key
    heads which several devices have are summed.
    """
    mesh = Mesh(np.array(topology("v5e:2x2").devices).reshape(2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    compiled = compile_gradients(config_of(heads, kv_heads, width, softcap, window), mesh, 4, time)
    text = compiled.as_text()
    assert sorted(re.findall(r"%\w*tree_attention_(\w+?)_*(?:\.\d+)? = ", text)) == KERNELS
    assert set(re.findall(COLLECTIVES, text)) == ({"all-reduce"} if kv_heads % 2 else set())
    assert not re.findall(rf"\[(?:\d+,)*{time},{time}\b", text)
    lanes = -(-width // 128) * 128
    queries = 2 * time * (heads // 2) * lanes * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * queries


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "hidden"), [(14, 2, 64, 896), (32, 8, 128, 2048), (8, 4, 256, 2304)]
)
def test_activations_are_written_as_attention_reads_them(
    topology: Callable[[str], Any], heads: int, kv_heads: int, width: int, hidden: int
) -> None:
    """Projections, rotation and attention, forward and backward: nothing of the size of the keys is copied into another
    layout, but within vector memory.
    """
    time, rows = 1920, 2
    config = config_of(heads, kv_heads, width, None, None)
    config = replace(config, hidden_size=hidden)
    sharding = SingleDeviceSharding(topology("v5e:2x2").devices[0])
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)  # noqa: E731
    make = partial(Attention, config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs_for_shapes())
    attention = nnx.eval_shape(make)
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        linear.platform = "tpu"
    graph, state = nnx.split(attention)
    model: Any = SimpleNamespace(config=config, mesh=AbstractMesh((), ()), platform="tpu")

    def gradients(state: Any, x: Any, grad: Any, spans: Spans, positions: Any) -> Any:
        attend = span_attention(model, spans, positions)
        rope = rope_tables(positions, rope_frequencies(width, 1e4, None))
        out, pull = jax.vjp(lambda s, x: nnx.merge(graph, s)(x, rope, attend, None, None)[0], state, x)
        return out, pull(grad)

    x, numbers = shape(rows, time, hidden), shape(rows, time, dtype=jnp.int32)
    state = jax.tree.map(lambda leaf: shape(*leaf.shape), state)
    text = jax.jit(gradients).lower(state, x, x, Spans(numbers, numbers), numbers).compile().as_text()
    copies = re.findall(r" = \w+\[([\d,]+)\]\{([^}]*)\} (?:copy|transpose)\(", text)
    in_memory = [list(map(int, sizes.split(","))) for sizes, layout in copies if "S(1)" not in layout]
    assert [sizes for sizes in in_memory if time in sizes and math.prod(sizes) >= rows * time * kv_heads * width] == []
