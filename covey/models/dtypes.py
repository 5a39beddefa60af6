"""The type of the products, and kernels in this type, made once for a call of many programs.

A product rounds its kernel to the decoder's compute type. On a CPU, XLA rounds the kernels of the whole model again in
each program: for each chunk of decode steps, each prefill and each micro-batch. Rounded before the call, the products
have the same operands. On accelerators only decoding gains: a chunk of steps rounds before its loop.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from covey.models.decoder import Decoder, Embedding, rngs_for_shapes
from covey.models.layers import Linear
from covey.parallel.arrays import dotted_path
from covey.parallel.mesh import platform_of

State = TypeVar("State")

AUTO = "auto"
CPUINFO = Path("/proc/cpuinfo")
CPU_FLAGS = ("amx_bf16", "avx512_bf16")
"""Flags of /proc/cpuinfo of processors that multiply bfloat16 in hardware."""


def operand_type(model: nnx.Module, *, everywhere: bool = False) -> jnp.dtype[Any] | None:
    """Return the type to which `round_kernels` rounds the kernels of `model`; None where rounding gains nothing: in
    float32, and on accelerators, where a product rounds what it reads anyway and a copy would cost memory.

    Args:
        everywhere: also on accelerators, as for `round_for_sampling`.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Linear):
            dtype = jnp.dtype(node.dtype)
            return dtype if (everywhere or node.platform == "cpu") and dtype != jnp.float32 else None
    return None


sampling_type = partial(operand_type, everywhere=True)


def with_rounded_head(model: Decoder) -> Decoder:
    """Return `model` with a head of its own in its `operand_type`, which a tied model has not: sampling reads the whole
    head in each step, and would round the embedding in each chunk of steps. All other arrays are shared.
    """
    weight = (model.embed if model.head is None else model.head).embedding.get_value()
    if (dtype := operand_type(model)) is None or weight.dtype.itemsize <= dtype.itemsize:
        return model
    graph, params = nnx.split(model)
    rounded: Decoder = nnx.merge(graph, params)
    head = nnx.eval_shape(lambda: Embedding(model.config, param_dtype=dtype, rngs=rngs_for_shapes()))
    head.embedding.set_value(_round(weight, dtype))
    rounded.head = nnx.data(head)
    return rounded


def round_kernels(params: State, dtype: jnp.dtype[Any] | None, ends: tuple[str, ...] = (".kernel",)) -> State:
    """Return `params` with the kernels of projections in `dtype`, if they are wider; all other arrays are shared.

    Args:
        params: state of a model, or a part of it, of arrays or of shapes.
        dtype: the model's `operand_type`; None changes nothing.
        ends: ends of the paths of the arrays that are rounded.
    """
    if dtype is None:
        return params

    def convert(path: Any, x: Any) -> Any:
        is_wide = x.dtype.itemsize > dtype.itemsize and dotted_path(path).endswith(ends)
        return _round(x, dtype) if is_wide else x

    rounded: State = jax.tree_util.tree_map_with_path(convert, params)
    return rounded


def round_for_sampling(params: State, dtype: jnp.dtype[Any] | None) -> State:
    """Return `params` with kernels and adapters in `dtype`, the model's `sampling_type`. A product rounds either before
    it multiplies, so that no bit of it changes.
    """
    return round_kernels(params, dtype, (".kernel", ".lora.a", ".lora.b"))


def _round(x: Any, dtype: jnp.dtype[Any]) -> Any:
    return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def resolve_compute_dtype(compute_dtype: str, platform: str | None = None) -> str:
    """Return `compute_dtype`; for auto bfloat16 where the devices of `platform`, by default the first device of this
    process, multiply it in hardware, else float32.

    These devices do: TPUs, NVIDIA GPUs of compute capability 8.0 or more, and processors under Linux with one of
    `CPU_FLAGS`. Other GPUs are not asked, and get float32.
    """
    if compute_dtype != AUTO:
        return compute_dtype
    platform = platform or platform_of(SingleDeviceSharding(jax.local_devices()[0]))
    in_hardware = _cpu_has_bfloat16() if platform == "cpu" else platform in ("tpu", "cuda")
    return "bfloat16" if in_hardware else "float32"


def _cpu_has_bfloat16() -> bool:
    if not CPUINFO.is_file():  # it is Linux alone that has one
        return False
    flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(errors="replace"), re.M)
    return flags is not None and not set(CPU_FLAGS).isdisjoint(flags[1].split())
