"""Attention within rows, forward and backward, as the compiler for v5e leaves it."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from covey.models.config import ModelConfig
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
