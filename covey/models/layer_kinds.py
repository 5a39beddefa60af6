"""The kinds of layers as a table: a name → the class that computes a part of a layer, and its parameters' shapes.

A layer has two parts, each with its norms and residual: a *mixer*, which sees other tokens, and a *feed-forward* part,
which sees one. A third part may end it. `ModelConfig.parts` names their kinds for each layer; a package offers further
kinds by entry points of the group `covey.models`, as `layer:NAME`. A class is imported when the first model with its
kind is made. This module imports no JAX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

from covey.models.config import ModelConfig
from covey.registry import offered

Shapes = dict[str, tuple[int, ...]]
"""Name of a parameter in its part, `q_proj.kernel` → its shape in our layout: kernels are [in, out]."""


@dataclass(frozen=True)
class LayerKind:
    """One kind of a part of a layer.

    Attributes:
        part: name of the part in `Layer` and in paths of parameters: attn in `layers.3.attn.q_proj.kernel`.
        module: class of the part, as "module:class". It is made from (config, *, dtype, param_dtype, rngs). A mixer is
            called with (x, rope, attend, cache, window) and returns its output and the new cache; if other layers use
            its keys and values, a new `SharedKeys`, which these get as their cache. A feed-forward part is called with
            x and returns its output. The end of a layer is called with (x, input of the layer, gather), see `Layer`,
            and returns the layer's output. `ModelConfig.layer_inputs` is called with tokens and embeddings, and returns
            an array [L, B, T, ...].
        shapes: parameters of the part.
        has_state: whether a mixer has a state in place of keys and values; see `recurrence`.
    """

    part: str
    module: str
    shapes: Callable[[ModelConfig], Shapes]
    has_state: bool = False

    def load(self) -> Any:
        """Import the class of the part."""
        return resolve_name(self.module)


@cache
def find_kind(name: str) -> LayerKind:
    """Return the kind `name` from the table, or from an installed package.

    Raises:
        CoveyError: no package offers it, or the one that does cannot be imported.
    """
    kind: LayerKind = KINDS[name] if name in KINDS else offered("covey.models", f"layer:{name}")
    return kind


def has_state(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a state in place of keys and values."""
    return find_kind(config.parts(layer)[0]).has_state


def any_state(config: ModelConfig) -> bool:
    """Return whether any layer has a state."""
    return any(has_state(config, layer) for layer in range(config.num_layers))


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Return the parameters of a layer: norm scales, kernels, biases, and others."""
    c = config
    norms = [*("attn_norm", "mlp_norm") * c.pre_norms, *("post_attn_norm", "post_mlp_norm") * c.post_norms]
    shapes: Shapes = {f"{name}.scale": (c.hidden_size,) for name in norms if c.norm_scales}
    for kind in map(find_kind, c.parts(layer)):
        shapes |= {f"{kind.part}.{name}": shape for name, shape in kind.shapes(c).items()}
    return dict(sorted(shapes.items(), key=lambda item: _ORDER.get(item[0].rsplit(".", 1)[-1], len(_ORDER))))


def top_shapes(config: ModelConfig) -> Shapes:
    """Return the parameters outside the layers."""
    c, table = config, (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"embed.embedding": table} | ({"norm.scale": table[1:]} if c.norm_scales else {})
    shapes |= {} if c.tie_embeddings else {"head.embedding": table}
    inputs = {} if c.layer_inputs is None else find_kind(c.layer_inputs).shapes(c)
    return shapes | {f"layer_inputs.{name}": shape for name, shape in inputs.items()}


def attention_shapes(c: ModelConfig) -> Shapes:
    """Return the parameters of attention: global, with a window, or with a gate on its output."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    norms = (queries, keys) if c.qk_norm_whole else (c.head_dim, c.head_dim)
    outputs = {"q_proj": queries * (2 if c.attention_gate else 1), "k_proj": keys, "v_proj": keys}
    shapes: Shapes = {"q_norm.scale": norms[:1], "k_norm.scale": norms[1:]} if c.qk_norm and c.norm_scales else {}
    shapes |= {f"{name}.kernel": (c.hidden_size, width) for name, width in outputs.items()}
    shapes |= {"o_proj.kernel": (queries, c.hidden_size)}
    return shapes | ({f"{name}.bias": (width,) for name, width in outputs.items()} if c.attention_bias else {})


def mlp_shapes(c: ModelConfig) -> Shapes:
    """Return the parameters of the MLP."""
    inner = ("gate_proj", "up_proj") if c.gated_mlp else ("up_proj",)
    shapes: Shapes = {f"{name}.kernel": (c.hidden_size, c.intermediate_size) for name in inner}
    return shapes | {"down_proj.kernel": (c.intermediate_size, c.hidden_size)}


_ORDER = {"scale": 0, "kernel": 1, "bias": 2}

KINDS = {
    "attention": LayerKind("attn", "covey.models.decoder:Attention", attention_shapes),
    "mlp": LayerKind("mlp", "covey.models.layers:MLP", mlp_shapes),
}
"""Covey's own kinds. A mixture of experts would be a row, with the feed-forward part of a package of its own."""
