"""LoRA on a decoder (Hu et al., 2021): adapters put on, taken off, merged.

The adapters are a module of ours and not qwix's: qwix intercepts products by patching them while the model is traced,
which fails inside rematerialised layers, and ours are rematerialised. qwix keeps its place for quantised bases.

Actor and reference share the base: `with_lora` copies the module, not its arrays.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from covey.configs import LORA_TARGETS, LoRAConfig
from covey.errors import RecipeError, nearest
from covey.models.decoder import Decoder
from covey.models.layers import Linear, LoRA, project


def with_lora(base: Decoder, config: LoRAConfig, *, seed: int = 0) -> Decoder:
    """A decoder that shares every array of `base` and has adapters on `config.targets`.

    Errors: RecipeError for an unknown target or a rank below 1.
    """
    for name in config.targets:
        if name not in LORA_TARGETS:
            raise RecipeError(
                f"unknown LoRA target {name!r}", fix=nearest(name, LORA_TARGETS), where="model.lora.targets"
            )
    if config.rank < 1:
        raise RecipeError(f"LoRA rank {config.rank}", want="a rank of 1 or more", where="model.lora.rank")
    model = nnx.merge(*nnx.split(base))
    rngs = nnx.Rngs(params=seed)
    for linear in _targets(model, config.targets):
        n_in, n_out = linear.kernel.shape
        linear.lora = LoRA(n_in, n_out, config.rank, config.alpha, rngs=rngs)
    return model


def merged(model: Decoder) -> Decoder:
    """The same function without adapters: each kernel becomes W + scale·A·B."""
    model = nnx.merge(*nnx.split(model))
    for linear in _targets(model, LORA_TARGETS):
        if linear.lora is not None:
            update = project(linear.lora.a[...], linear.lora.b[...], jnp.float32) * linear.lora.scale
            linear.kernel = nnx.Param((linear.kernel[...].astype(jnp.float32) + update).astype(linear.kernel.dtype))
            linear.lora = None
    return model


def without_lora(model: Decoder) -> Decoder:
    """The base under the adapters, sharing its arrays."""
    model = nnx.merge(*nnx.split(model))
    for linear in _targets(model, LORA_TARGETS):
        linear.lora = None
    return model


def has_lora(model: Decoder) -> bool:
    """True when any projection has an adapter."""
    return any(linear.lora is not None for linear in _targets(model, LORA_TARGETS))


def split_trainable(model: Decoder) -> tuple[nnx.GraphDef[Decoder], nnx.State, nnx.State]:
    """The model's graph, what training changes (the adapters when it has any, else every weight), and the rest."""
    kind = nnx.LoRAParam if has_lora(model) else nnx.Param
    parts: tuple[Any, ...] = nnx.split(model, kind, ...)
    return parts[0], parts[1], parts[2]


def _targets(model: Decoder, names: tuple[str, ...]) -> list[Linear]:
    parts = [part for layer in model.layers for part in (layer.attn, layer.mlp)]
    return [getattr(part, name) for part in parts for name in names if hasattr(part, name)]
