"""Layers of Gemma 4, as `gemma4` lays out their parameters."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.models.attention import Attend, SharedKeys
from covey.models.config import ModelConfig
from covey.models.decoder import Embedding
from covey.models.layers import ACTIVATIONS, MLP, Linear, RMSNorm, Rope, apply_joint, rotate
from covey_families.gemma4 import heads_of, projected


class LocalAttention(nnx.Module):
    """Attention with norms on queries, keys and values, and keys as values where there is no other projection. Layers
    that use its keys and values get them rotated and normalised.
    """

    is_global, is_reader = False, False
    q_proj: Linear
    o_proj: Linear

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: Any):
        self.width = heads_of(config, self.is_global)[1]
        outputs = projected(config, self.is_global, self.is_reader)
        self.joint = tuple(outputs)
        sizes = [(name, config.hidden_size, width) for name, width in outputs.items()]
        for name, n_in, n_out in [*sizes, ("o_proj", outputs["q_proj"], config.hidden_size)]:
            linear = Linear(n_in, n_out, bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            setattr(self, name, linear)
        self.q_norm = RMSNorm(config, self.width, param_dtype)
        if not self.is_reader:
            self.k_norm = RMSNorm(config, self.width, param_dtype)
            self.v_norm = RMSNorm(replace(config, norm_scales=False), self.width, param_dtype)

    def __call__(self, x: Array, rope: Rope, attend: Attend, cache: Any, window: Any) -> tuple[Array, Any]:
        q, *keys = self._project(x)
        q = rotate(self.q_norm(q), rope, self.q_proj.platform)
        k = rotate(self.k_norm(keys[0]), rope, self.q_proj.platform)
        v = self.v_norm(keys[-1])
        mixed, cache = attend(q, k, v, cache, window=window, softcap=None)
        return self.o_proj.from_heads(mixed), SharedKeys(k, v, cache)

    def _project(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T N W"]]:
        return apply_joint(self, x, self.width)


class GlobalAttention(LocalAttention):
    """`LocalAttention` of layers without a window."""

    is_global = True


class LocalReader(LocalAttention):
    """Attention to the keys and values of an earlier layer, whose cache is the only one."""

    is_reader = True

    def __call__(self, x: Array, rope: Rope, attend: Attend, cache: Any, window: Any) -> tuple[Array, Any]:
        q = rotate(self.q_norm(self._project(x)[0]), rope, self.q_proj.platform)
        shared: SharedKeys = cache
        mixed, _ = attend(q, shared.k, shared.v, shared.cache, window=window, softcap=None, write=False)
        return self.o_proj.from_heads(mixed), []


class GlobalReader(LocalReader):
    """`LocalReader` of layers without a window."""

    is_global = True


class WideMLP(MLP):
    """An MLP of twice the width."""

    def __init__(self, config: ModelConfig, **options: Any):
        super().__init__(replace(config, intermediate_size=2 * config.intermediate_size), **options)


class LayerEnd(nnx.Module):
    """End of a layer: x + norm(project(act(gate(x)) · input)), if layers have inputs, times a number.

    The number is no weight: transformers keeps it in a buffer, which training leaves alone.
    """

    input_gate: Linear
    input_proj: Linear

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: Any):
        self.width, self.activation = config.kind_settings.input_width, config.activation
        self.scalar = nnx.Variable(jnp.ones((1,), param_dtype))
        if self.width:
            sizes = {"input_gate": (config.hidden_size, self.width), "input_proj": (self.width, config.hidden_size)}
            for name, size in sizes.items():
                setattr(self, name, Linear(*size, bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs))
            self.norm = RMSNorm(config, config.hidden_size, param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], own_input: Any, gather: Callable[[Array], Array]
    ) -> Float[Array, "B T D"]:
        if self.width:
            gate = ACTIVATIONS[self.activation](self.input_gate(gather(x)))
            x = x + self.norm(self.input_proj(gate * own_input))
        return x * self.scalar[...].astype(x.dtype)


class LayerInputs(nnx.Module):
    """The input of each layer: (norm(projection of the embedding) + embedding of the token for the layer) / √2."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: Any):
        s, self.layers, self.scale = config.kind_settings, config.num_layers, config.hidden_size**-0.5
        joined = config.num_layers * s.input_width
        table = replace(config, vocab_size=s.input_vocab, hidden_size=joined)
        self.embed = Embedding(table, param_dtype=param_dtype, rngs=rngs)
        self.context_proj = Linear(
            config.hidden_size, joined, bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.norm = RMSNorm(config, s.input_width, param_dtype)

    def __call__(self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Float[Array, "L B T P"]:
        context = self.context_proj(x) * jnp.asarray(self.scale, x.dtype)
        context = self.norm(context.reshape(*tokens.shape, self.layers, -1))
        own = jnp.take(self.embed.embedding[...], tokens, axis=0).reshape(context.shape)
        own = own * jnp.asarray(context.shape[-1] ** 0.5, own.dtype)
        joined = (context + own.astype(x.dtype)) * jnp.asarray(2**-0.5, x.dtype)
        return jnp.moveaxis(joined, 2, 0)
