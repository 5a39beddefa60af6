"""The families: what their config.json means to us, and what their tensors are called. Tables, and nothing else.

A family is a row of `FAMILIES`: a reader from the checkpoint's config.json to `ModelConfig`, and a name table from our
parameter paths (`layers.3.attn.q_proj.kernel`) to its tensor names. Loading and export use the same table.

Ours are [in, out], theirs [out, in]: every path that ends in `.kernel` is transposed on the way, nothing else is.
Norm scales stay as they are stored; Gemma's +1 is `ModelConfig.norm_offset`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.errors import WeightsError, nearest
from covey.models.config import ModelConfig, RopeScaling

Config = Mapping[str, Any]
"""A config.json as read."""


@dataclass(frozen=True)
class NameTable:
    """Tensor names of a checkpoint format: `layer` under `prefix` with the layer's number, `top` beside the layers."""

    prefix: str
    layer: Mapping[str, str]
    top: Mapping[str, str]

    def name(self, path: str) -> str:
        """The checkpoint's name of our parameter `path`."""
        if path in self.top:
            return self.top[path]
        _, index, rest = path.split(".", 2)
        return self.prefix.format(index) + self.layer[rest]


@dataclass(frozen=True)
class Family:
    """One row: how to read the config, and the Hugging Face names."""

    read: Callable[[Config], ModelConfig]
    names: NameTable


def read_config(config: Config, where: str = "config.json") -> ModelConfig:
    """A config.json as our `ModelConfig`.

    Raises:
        WeightsError: the family is unknown, a field is missing, or a setting is one that we do not compute.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise WeightsError(
            f"model_type {kind!r} is not supported", want=f"one of: {known}", fix=nearest(kind, FAMILIES), where=where
        )
    try:
        return FAMILIES[kind].read(config)
    except KeyError as error:
        raise WeightsError(f"the field {error} is missing", where=where) from error


def parameters(config: ModelConfig) -> list[str]:
    """The dotted paths of every parameter of the decoder that `config` describes."""
    layer = [f"{norm}.scale" for norm in ("attn_norm", "mlp_norm")]
    layer += [f"attn.{name}.kernel" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    layer += [f"mlp.{name}.kernel" for name in ("gate_proj", "up_proj", "down_proj")]
    layer += [f"attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj") if config.attention_bias]
    layer += [f"attn.{name}.scale" for name in ("q_norm", "k_norm") if config.qk_norm]
    layer += [f"{norm}.scale" for norm in ("post_attn_norm", "post_mlp_norm") if config.post_norms]
    top = ["embed.embedding", "norm.scale"] + ([] if config.tie_embeddings else ["head.embedding"])
    return top + [f"layers.{index}.{name}" for index in range(config.num_layers) for name in layer]


def names(config: ModelConfig, table: NameTable | None = None) -> dict[str, str]:
    """Our path → the checkpoint's tensor name, for each parameter; the family's Hugging Face table unless given."""
    table = table or FAMILIES[config.family].names
    return {path: table.name(path) for path in parameters(config)}


def orient(path: str, tensor: np.ndarray) -> np.ndarray:
    """A tensor turned from the checkpoint's layout to ours, or back: kernels are transposed."""
    return tensor.T if path.endswith(".kernel") else tensor


def match(expected: Mapping[str, str], found: Iterable[str], ignored: Callable[[str], bool], where: str) -> None:
    """Refuse a checkpoint that lacks a tensor or has one that the model would not use.

    Raises:
        WeightsError: naming the first few.
    """
    have = set(found)
    missing = sorted(set(expected.values()) - have)
    extra = sorted(name for name in have - set(expected.values()) if not ignored(name))
    if missing:
        raise WeightsError(
            f"{_few(missing)} missing",
            fix="the download may have been cut short: fetch it again",
            where=where,
        )
    if extra:
        raise WeightsError(
            f"{_few(extra)} unknown to this family",
            want="only tensors that the model computes with",
            where=where,
        )


def _few(names: list[str]) -> str:
    """`a is`, `a, b are`, or the first three of many and their number."""
    shown = ", ".join(names[:3]) + (f" … ({len(names)} tensors)" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


# --- readers of config.json


def _base(c: Config, **switches: Any) -> ModelConfig:
    """The fields that all families share; `switches` are what this one changes."""
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
        "rope_theta": _rope(c).get("rope_theta", c.get("rope_theta", 10_000.0)),  # what an absent key means there
        "rope_scaling": _rope_scaling(_rope(c), c),
        "tie_embeddings": c.get("tie_word_embeddings", False),
        "max_positions": c["max_position_embeddings"],
        "family": c["model_type"],
        "activation": _activation(c),
    }
    return ModelConfig(**(fields | switches))


def _llama(c: Config) -> ModelConfig:
    _refuse(c, "attention_bias", "mlp_bias")
    return _base(c)


def _qwen2(c: Config) -> ModelConfig:
    windowed = c.get("use_sliding_window", False)
    first = c.get("max_window_layers", c["num_hidden_layers"])
    default = ["sliding_attention" if windowed and i >= first else "full_attention" for i in range(_layers(c))]
    return _base(c, attention_bias=True, windows=_windows(c, default))


def _qwen3(c: Config) -> ModelConfig:
    _refuse(c, "attention_bias", "use_sliding_window")
    return _base(c, qk_norm=True, head_dim=c["head_dim"])


def _gemma2(c: Config) -> ModelConfig:
    default = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(_layers(c))]
    return _gemma(
        c,
        attn_softcap=c["attn_logit_softcapping"],
        final_softcap=c["final_logit_softcapping"],
        windows=_windows(c, default),
    )


def _gemma3(c: Config) -> ModelConfig:
    every = c.get("sliding_window_pattern", 6)
    default = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(_layers(c))]
    local = (c.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    return _gemma(
        c,
        qk_norm=True,
        attn_softcap=c.get("attn_logit_softcapping"),
        final_softcap=c.get("final_logit_softcapping"),
        windows=_windows(c, default),
        rope_theta=_rope(c).get("rope_theta", c.get("rope_theta", 1_000_000.0)),
        local_rope_theta=local or c.get("rope_local_base_freq", 10_000.0),
    )


def _gemma(c: Config, **switches: Any) -> ModelConfig:
    _refuse(c, "attention_bias")
    common = {
        "head_dim": c["head_dim"],
        "post_norms": True,
        "norm_offset": 1.0,
        "embed_scale": c["hidden_size"] ** 0.5,
        "query_scale": c["query_pre_attn_scalar"] ** -0.5,
        "tie_embeddings": c.get("tie_word_embeddings", True),
    }
    return _base(c, **(common | switches))


def _layers(c: Config) -> int:
    return int(c["num_hidden_layers"])


def _windows(c: Config, default: list[str]) -> tuple[int | None, ...] | None:
    """The window of each layer by its declared type, `default` where types are not declared."""
    kinds = c.get("layer_types") or default
    if "sliding_attention" not in kinds:
        return None
    return tuple(c["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)


def _activation(c: Config) -> str:
    name = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise WeightsError(f"activation {name!r} is not supported", want="one of: " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def _rope(c: Config) -> Config:
    """The rotary settings of full attention, in the form of transformers 5; empty for an older config."""
    settings: dict[str, Any] = c.get("rope_parameters") or {}
    return settings.get("full_attention") or settings


def _rope_scaling(rope: Config, c: Config) -> RopeScaling | None:
    scaling = rope or c.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if (scaling.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0) != 1.0:
        raise WeightsError("rotary positions on part of each head are not supported", want="partial_rotary_factor 1")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", scaling["factor"])
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_positions=scaling["original_max_position_embeddings"],
        )
    raise WeightsError(f"RoPE scaling {kind!r} is not supported", want="one of: default, linear, llama3")


def _refuse(c: Config, *switches: str) -> None:
    for name in switches:
        if c.get(name):
            raise WeightsError(f"{name}: {c[name]!r} is not supported for {c['model_type']}")


ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_TOP = {
    "embed.embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.embedding": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm.scale": "input_layernorm.weight",
    "attn.q_proj.kernel": "self_attn.q_proj.weight",
    "attn.k_proj.kernel": "self_attn.k_proj.weight",
    "attn.v_proj.kernel": "self_attn.v_proj.weight",
    "attn.o_proj.kernel": "self_attn.o_proj.weight",
    "attn.q_proj.bias": "self_attn.q_proj.bias",
    "attn.k_proj.bias": "self_attn.k_proj.bias",
    "attn.v_proj.bias": "self_attn.v_proj.bias",
    "attn.q_norm.scale": "self_attn.q_norm.weight",
    "attn.k_norm.scale": "self_attn.k_norm.weight",
    "mlp.gate_proj.kernel": "mlp.gate_proj.weight",
    "mlp.up_proj.kernel": "mlp.up_proj.weight",
    "mlp.down_proj.kernel": "mlp.down_proj.weight",
}
# "post_attention_layernorm" is the norm before the MLP in Llama, and the norm on the attention's output in Gemma.
_LLAMA_NAMES = NameTable("model.layers.{}.", _ATTENTION | {"mlp_norm.scale": "post_attention_layernorm.weight"}, _TOP)
_GEMMA_NORMS = {
    "post_attn_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "post_mlp_norm.scale": "post_feedforward_layernorm.weight",
}
_GEMMA_NAMES = NameTable("model.layers.{}.", _ATTENTION | _GEMMA_NORMS, _TOP)

FAMILIES = {
    "llama": Family(_llama, _LLAMA_NAMES),
    "qwen2": Family(_qwen2, _LLAMA_NAMES),
    "qwen3": Family(_qwen3, _LLAMA_NAMES),
    "gemma2": Family(_gemma2, _GEMMA_NAMES),
    "gemma3_text": Family(_gemma3, _GEMMA_NAMES),
}
