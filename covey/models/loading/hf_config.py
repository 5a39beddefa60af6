"""Conversion of a Hugging Face config.json to our `ModelConfig`, and back.

Each family has a reader and a writer of its own fields. `read_common` and `write_common` handle the fields that all
families share, and `config_fields` the rotary settings. `config_fields.LAYER_KINDS` has the kinds of layers that are
read; `write_layer_types` writes them.

The config.json of a model that also reads images has the text model's settings in `text_config`. Its tensors have one
of two prefixes: of transformers 4.50, as on the hub, or of later versions. Tensors of other parts are not read.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from covey.errors import WeightsError
from covey.models.config import ModelConfig
from covey.models.loading.config_fields import (
    LAYER_KINDS,
    read_rope_scaling,
    rope_settings,
    write_rope_scaling,
)
from covey.registry import entry_points, offered

Config = Mapping[str, Any]
"""A config.json as read."""

Fields = dict[str, Any]
"""A config.json to be written."""


# --- reading


def read_common(c: Config, **switches: Any) -> ModelConfig:
    """Read the fields that all families share; `switches` are the settings that this family changes."""
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    fields = {
        "vocab_size": c["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": c["intermediate_size"],
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or hidden // heads,
        "norm_eps": c["rms_norm_eps"],
        "rope_theta": rope_settings(c).get("rope_theta", c.get("rope_theta", 10_000.0)),  # transformers' default
        "rope_scaling": read_rope_scaling(rope_settings(c), c),
        "tie_embeddings": c.get("tie_word_embeddings", False),
        "max_positions": c["max_position_embeddings"],
        "family": c["model_type"],
        "activation": _activation(c),
    }
    return ModelConfig(**(fields | switches))


def read_llama(c: Config) -> ModelConfig:
    """Read Llama 1 to 3, SmolLM2, and other models of type llama."""
    check_switches_off(c, "attention_bias", "mlp_bias")
    return read_common(c)


def read_mistral(c: Config) -> ModelConfig:
    """Read Mistral: all layers have the window, which an absent key sets to 4096 and null removes."""
    c = {"num_key_value_heads": 8, "sliding_window": 4096, **c}
    return read_common(c, windows=one_window(c))


def read_qwen2(c: Config) -> ModelConfig:
    """Read Qwen2 and Qwen2.5."""
    first = c.get("max_window_layers") if c.get("use_sliding_window") else None
    windows = layer_windows(c, lambda layer: first is not None and layer >= first)
    return read_common(c, attention_bias=True, windows=windows)


def read_qwen3(c: Config) -> ModelConfig:
    """Read dense Qwen3."""
    check_switches_off(c, "attention_bias", "use_sliding_window")
    return read_common(c, qk_norm=True, head_dim=c["head_dim"])


def read_gemma2(c: Config) -> ModelConfig:
    """Read Gemma 2."""
    return _read_gemma(
        c,
        attn_softcap=c["attn_logit_softcapping"],
        final_softcap=c["final_logit_softcapping"],
        windows=layer_windows(c, lambda layer: layer % 2 == 0),
    )


def read_gemma3(c: Config) -> ModelConfig:
    """Read Gemma 3's text model. Where it is part of a larger one, checkpoints leave out most fields.

    `attn_logit_softcapping` is ignored: transformers, the reference, reads it but applies no cap to the scores.
    """
    c = {**GEMMA3_DEFAULTS, **c}
    every = c.get("sliding_window_pattern", 6)
    return _read_gemma(
        c,
        qk_norm=True,
        final_softcap=c.get("final_logit_softcapping"),
        windows=layer_windows(c, lambda layer: (layer + 1) % every != 0),
        **_read_gemma3_ropes(c),
    )


def _read_gemma3_ropes(c: Config) -> Fields:
    """Return RoPE bases and scalings of layers with full attention and of layers with a window."""
    kinds: dict[str, Any] = c.get("rope_parameters") or {}
    if kinds and not kinds.keys() & LAYER_KINDS.keys():
        raise WeightsError("rope_parameters name no kind of layer", want=f"{' and '.join(LAYER_KINDS)} in them")
    wide = (kinds.get("full_attention") or {}) | (c.get("rope_scaling") or {})
    local = kinds.get("sliding_attention") or {}
    return {
        "rope_theta": wide.get("rope_theta", c.get("rope_theta", 1_000_000.0)),
        "rope_scaling": read_rope_scaling(wide, c, "full_attention"),
        "local_rope_theta": local.get("rope_theta", c.get("rope_local_base_freq", 10_000.0)),
        "local_rope_scaling": read_rope_scaling(local, {}, "sliding_attention"),
    }


def _read_gemma(c: Config, **switches: Any) -> ModelConfig:
    check_switches_off(c, "attention_bias", "use_bidirectional_attention")
    common = {
        "head_dim": c["head_dim"],
        "post_norms": True,
        "norm_offset": 1.0,
        "embed_scale": c["hidden_size"] ** 0.5,
        "query_scale": c["query_pre_attn_scalar"] ** -0.5,
        "tie_embeddings": c.get("tie_word_embeddings", True),
    }
    return read_common(c, **(common | switches))


def layer_windows(c: Config, slides: Callable[[int], bool]) -> tuple[int | None, ...] | None:
    """Return the window of each layer by its declared kind; where kinds are not declared, `slides` tells which layers
    have one.
    """
    layers = range(c["num_hidden_layers"])
    kinds = c.get("layer_types") or ["sliding_attention" if slides(layer) else "full_attention" for layer in layers]
    fields = [LAYER_KINDS[kind] for kind in kinds]
    return tuple(None if field is None else c[field] for field in fields) if any(fields) else None


def one_window(c: Config) -> tuple[int, ...] | None:
    """Return the window that all layers share. A family with one has no types of layers."""
    layers, window = c["num_hidden_layers"], c.get("sliding_window")
    if any((kind == "sliding_attention") != (window is not None) for kind in c.get("layer_types") or ()):
        raise WeightsError(f"layer_types are not supported for {c['model_type']}", want="the same type for all layers")
    return None if window is None else (window,) * layers


def _activation(c: Config) -> str:
    name = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise WeightsError(f"activation {name!r} is not supported", want="one of: " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def check_switches_off(c: Config, *switches: str) -> None:
    for name in switches:
        if c.get(name):
            raise WeightsError(f"{name}: {c[name]!r} is not supported for {c['model_type']}")


# --- writing


def write_llama(c: ModelConfig) -> Fields:
    """Write the inverse of `read_llama`; the other writers likewise invert their readers."""
    return write_common(c) | {"attention_bias": False, "mlp_bias": False}


def write_mistral(c: ModelConfig) -> Fields:
    """Write Mistral, or a family with the same fields."""
    return write_common(c) | {"sliding_window": write_layer_types(c)["sliding_window"]}


def write_qwen2(c: ModelConfig) -> Fields:
    windowed = c.windows is not None
    own = {"use_sliding_window": windowed, "max_window_layers": 0 if windowed else c.num_layers}
    return write_common(c) | write_layer_types(c) | own


def write_qwen3(c: ModelConfig) -> Fields:
    return write_common(c) | {"attention_bias": False, "use_sliding_window": False}


def write_gemma2(c: ModelConfig) -> Fields:
    common, scalar = write_common(c), round((c.query_scale or c.head_dim**-0.5) ** -2, 6)
    own = {
        "attention_bias": False,
        "hidden_activation": common["hidden_act"],
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "attn_logit_softcapping": c.attn_softcap,
        "final_logit_softcapping": c.final_softcap,
    }
    layers = write_layer_types(c)
    layers["sliding_window"] = layers["sliding_window"] or c.max_positions  # transformers requires one, used or not
    return common | layers | own


def write_gemma3(c: ModelConfig) -> Fields:
    """Write Gemma 3, in the form of transformers 5 if layers with a window have a scaling: form 4 cannot express it."""
    fields = write_gemma2(c) | {"rope_local_base_freq": c.local_rope_theta}
    if c.local_rope_scaling is None:
        return fields
    kinds = {
        "full_attention": (c.rope_theta, c.rope_scaling),
        "sliding_attention": (c.local_rope_theta, c.local_rope_scaling),
    }
    named = {
        kind: {"rope_theta": theta} | (write_rope_scaling(scaling) or {"rope_type": "default"})
        for kind, (theta, scaling) in kinds.items()
    }
    return {name: value for name, value in fields.items() if not name.startswith("rope_")} | {"rope_parameters": named}


def write_common(c: ModelConfig) -> Fields:
    """Write the fields that all families share: the inverse of `read_common`."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == c.activation),
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_positions,
        "rope_theta": c.rope_theta,
        "rope_scaling": write_rope_scaling(c.rope_scaling),
        "tie_word_embeddings": c.tie_embeddings,
    }


def write_layer_types(c: ModelConfig) -> Fields:
    windows = c.windows or (None,) * c.num_layers
    return {
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


GEMMA3_DEFAULTS: Config = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""Field → transformers' default, for the fields that Gemma 3 checkpoints leave out."""

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


class TextPart(NamedTuple):
    """The text model in a model that reads images too.

    Attributes:
        kind: its `model_type`.
        others: how the names of tensors of the other parts begin, inside the module `model` or outside.
    """

    kind: str
    others: tuple[str, ...]


TEXT_PARTS = {"gemma3": TextPart("gemma3_text", ("vision_tower.", "multi_modal_projector."))}
"""`model_type` of a whole model → its text part. Packages add others by entry points `text:KIND` of `covey.models`."""

MODULE = "model.language_model"
"""Module of the text part in transformers, without its head."""

_PREFIXES = {f"{MODULE}.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}


WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Modules of torch.compile, DDP, FSDP and recomputed layers, which may stand anywhere in a name."""


def plain_names(names: Iterable[str], part: TextPart | None, embedding: str, *heads: str) -> dict[str, str]:
    """Return each name of a tensor with its name in the causal language model alone: without the modules around it, and
    inside `model` if that was saved by itself.

    Args:
        names: names in a checkpoint.
        part: the text model of a whole one, whose other parts are left out; None for a text model by itself.
        embedding: name of the embedding in the model, from which the modules around it are known.
        heads: names of heads, which are not inside `model`.

    >>> plain_names(["_orig_mod.embed_tokens.weight"], None, "model.embed_tokens.weight", "lm_head.weight")
    {'_orig_mod.embed_tokens.weight': 'model.embed_tokens.weight'}
    """
    name_of = str if part is None else partial(text_name, others=part.others)
    plain = {name: text for name in names if (text := name_of(WRAPPERS.sub("", name))) is not None}
    root, _, tail = embedding.partition(".")
    around = [text.removesuffix(tail) for text in plain.values() if f".{text}".endswith(f".{tail}")]
    if embedding in plain.values() or len(around) != 1:
        return plain
    inside, outside = around[0], around[0].removesuffix(f"{root}.")
    return {
        name: f"{root}.{text.removeprefix(inside)}"
        if text.startswith(inside) and text not in heads
        else text.removeprefix(outside)
        for name, text in plain.items()
    }


def whole_kinds() -> list[str]:
    """Return the `model_type` of each model that has a text part, of ours and of installed packages."""
    names = entry_points(group="covey.models").names
    return sorted({*TEXT_PARTS, *(name.removeprefix("text:") for name in names if name.startswith("text:"))})


def text_part(config: Mapping[str, Any]) -> TextPart | None:
    """Return the text part of the model that a config.json describes; None for a text model by itself."""
    kind = str(config.get("model_type"))
    if kind in TEXT_PARTS or f"text:{kind}" not in entry_points(group="covey.models").names:
        return TEXT_PARTS.get(kind)
    part: TextPart = offered("covey.models", f"text:{kind}")
    return part


def is_whole(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a model that has its text model as a part."""
    return text_part(config) is not None


def text_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of the text part; `config` itself if it is a text model's.

    Raises:
        WeightsError: there is no such part, it is of another family than the whole's, or it and the whole disagree on
            whether the head is the embedding.
    """
    whole = text_part(config)
    if whole is None:
        return config
    part, family = config.get("text_config"), whole.kind
    if not isinstance(part, Mapping):
        raise WeightsError("the field 'text_config' is missing", want="an object", where=where)
    part = {"model_type": family} | dict(part)
    if part["model_type"] != family:
        raise WeightsError(f"model_type in text_config is {part['model_type']!r:.80}", want=family, where=where)
    tied = [fields.get("tie_word_embeddings", True) for fields in (config, part)]
    if tied[0] != tied[1]:
        raise WeightsError(
            f"tie_word_embeddings is {tied[0]!r}, and {tied[1]!r} in text_config", want="the same", where=where
        )
    return part


def text_name(name: str, others: tuple[str, ...] = ()) -> str | None:
    """Return the name that a tensor or module of the whole has in the text model alone; None for one of the `others`.

    >>> text_name("language_model.model.norm.weight"), text_name("model.tower.weight", ("tower.",))
    ('model.norm.weight', None)
    """
    if name.removeprefix("model.").startswith(others):
        return None
    for whole, text in _PREFIXES.items():
        if name.startswith(whole):
            return text + name.removeprefix(whole)
    return name
