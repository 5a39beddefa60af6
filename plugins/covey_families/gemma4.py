"""The family Gemma 4 as tables: its config.json, the kinds of its layers, its tensors. This module imports no JAX.

Three layers of four or more have a window, the others see all tokens with heads of another width. The last layers may
use the keys and values of an earlier layer of their kind. Each layer ends with a number that scales its output, and in
the small models with an input of its own: an embedding of the token and a projection of the model's embedding.

Source: `modeling_gemma4.py` and `modeling_gemma4_unified.py` of transformers 5.24. Mixtures of experts are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from covey.errors import WeightsError
from covey.models.config import ModelConfig, RopeScaling
from covey.models.families import GEMMA_NAMES, Family, NameTable
from covey.models.layer_kinds import LayerKind, Shapes
from covey.models.loading.config_fields import read_rope_scaling, rope_kind, write_rope_scaling
from covey.models.loading.hf_config import (
    Config,
    Fields,
    TextPart,
    check_switches_off,
    read_common,
    write_common,
    write_layer_types,
)

WINDOW, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Gemma4Settings:
    """Settings of Gemma 4 that other families lack.

    Attributes:
        global_heads: number of key heads of layers without a window, and the width of their heads.
        keys_are_values: whether layers without a window use their projected keys as values.
        wide_mlp: whether the MLP is twice as wide in layers that use the keys of another.
        input_width: width of the input of each layer; 0 for none.
        input_vocab: number of tokens that have an embedding for each layer.
    """

    global_heads: tuple[int, int]
    keys_are_values: bool
    wide_mlp: bool
    input_width: int
    input_vocab: int


# --- layer kinds


def heads_of(c: ModelConfig, is_global: bool) -> tuple[int, int]:
    """Return the number of key heads of a kind of layers, and the width of its heads."""
    heads: tuple[int, int] = c.kind_settings.global_heads if is_global else (c.num_kv_heads, c.head_dim)
    return heads


def projected(c: ModelConfig, is_global: bool, is_reader: bool) -> dict[str, int]:
    """Return the projections of the input of a mixer, and their widths; a reader uses the keys of another layer."""
    kv_heads, width = heads_of(c, is_global)
    names = [] if is_reader else ["k_proj"] if is_global and c.kind_settings.keys_are_values else ["k_proj", "v_proj"]
    return {"q_proj": c.num_heads * width} | dict.fromkeys(names, kv_heads * width)


def _attention_shapes(c: ModelConfig, *, is_global: bool, is_reader: bool) -> Shapes:
    width, outputs = heads_of(c, is_global)[1], projected(c, is_global, is_reader)
    norms: Shapes = dict.fromkeys(("q_norm.scale",) if is_reader else ("q_norm.scale", "k_norm.scale"), (width,))
    kernels: Shapes = {f"{name}.kernel": (c.hidden_size, outs) for name, outs in outputs.items()}
    return norms | kernels | {"o_proj.kernel": (outputs["q_proj"], c.hidden_size)}


def _wide_mlp_shapes(c: ModelConfig) -> Shapes:
    inner, outer = (c.hidden_size, 2 * c.intermediate_size), (2 * c.intermediate_size, c.hidden_size)
    return {"gate_proj.kernel": inner, "up_proj.kernel": inner, "down_proj.kernel": outer}


def _end_shapes(c: ModelConfig) -> Shapes:
    width, shapes = c.kind_settings.input_width, dict[str, tuple[int, ...]]({"scalar": (1,)})
    if not width:
        return shapes
    kernels: Shapes = {"input_gate.kernel": (c.hidden_size, width), "input_proj.kernel": (width, c.hidden_size)}
    return shapes | kernels | {"norm.scale": (c.hidden_size,)}


def _input_shapes(c: ModelConfig) -> Shapes:
    s: Gemma4Settings = c.kind_settings
    joined = c.num_layers * s.input_width
    kernel = {"context_proj.kernel": (c.hidden_size, joined)}
    return {"embed.embedding": (s.input_vocab, joined), "norm.scale": (s.input_width,)} | kernel


def _mixer(name: str, is_global: bool, is_reader: bool) -> LayerKind:
    shapes = partial(_attention_shapes, is_global=is_global, is_reader=is_reader)
    return LayerKind("attn", f"covey_families.gemma4_layers:{name}", shapes)


LOCAL_ATTENTION = _mixer("LocalAttention", False, False)
GLOBAL_ATTENTION = _mixer("GlobalAttention", True, False)
LOCAL_READER = _mixer("LocalReader", False, True)
GLOBAL_READER = _mixer("GlobalReader", True, True)
WIDE_MLP = LayerKind("mlp", "covey_families.gemma4_layers:WideMLP", _wide_mlp_shapes)
END = LayerKind("end", "covey_families.gemma4_layers:LayerEnd", _end_shapes)
INPUTS = LayerKind("layer_inputs", "covey_families.gemma4_layers:LayerInputs", _input_shapes)


# --- config.json


def read_gemma4(c: Config) -> ModelConfig:
    """Read the text model of Gemma 4, or of Gemma 4 unified. Absent fields have the defaults of transformers."""
    _refuse_mixture(c)
    c = {**DEFAULTS, **OWN_DEFAULTS[c["model_type"]], **{name: x for name, x in c.items() if x is not None}}
    check_switches_off(c, "attention_bias")
    if c["use_bidirectional_attention"] not in (None, "vision"):
        raise WeightsError(f"use_bidirectional_attention {c['use_bidirectional_attention']!r:.40} is not supported")
    kinds = _layer_kinds(c)
    heads = _heads(c, kinds)
    settings = Gemma4Settings(
        global_heads=next((shape for shape, kind in zip(heads, kinds, strict=True) if kind == GLOBAL), heads[0]),
        keys_are_values=c["attention_k_eq_v"],
        wide_mlp=c["use_double_wide_mlp"],
        input_width=_count(c, "hidden_size_per_layer_input", 0),
        input_vocab=_count(c, "vocab_size_per_layer_input"),
    )
    if settings.input_width and settings.input_vocab < c["vocab_size"]:
        raise WeightsError(f"vocab_size_per_layer_input is {settings.input_vocab}", want="at least vocab_size")
    sources = _kv_sources(c, kinds)
    local = next((shape for shape, kind in zip(heads, kinds, strict=True) if kind == WINDOW), None)
    rope = {kind: _read_rope(c, kind) for kind in (GLOBAL, WINDOW)}
    common = {name: x for name, x in c.items() if name not in ("rope_parameters", "rope_scaling")}
    return read_common(
        common | {"num_key_value_heads": (local or heads[0])[0], "head_dim": (local or heads[0])[1]},
        pre_norms=True,
        post_norms=True,
        qk_norm=True,
        embed_scale=c["hidden_size"] ** 0.5,
        query_scale=1.0,
        final_softcap=c.get("final_logit_softcapping"),
        windows=tuple(c["sliding_window"] if kind == WINDOW else None for kind in kinds),
        rope_theta=rope[GLOBAL][0],
        rope_scaling=rope[GLOBAL][1],
        local_rope_theta=rope[WINDOW][0],
        local_rope_scaling=rope[WINDOW][1],
        mixers=tuple(_MIXERS[kind, source is not None] for kind, source in zip(kinds, sources, strict=True)),
        other_parts=tuple(_other_parts(settings, source is not None) for source in sources),
        layer_inputs="gemma4_inputs" if settings.input_width else None,
        layer_heads=tuple(heads),
        kv_sources=tuple(sources) if any(source is not None for source in sources) else None,
        kind_settings=settings,
    )


def _refuse_mixture(c: Config) -> None:
    if c.get("enable_moe_block") or c.get("num_experts"):
        raise WeightsError(
            "Gemma 4 with experts (26B-A4B) is not supported",
            want="a dense Gemma 4: E2B, E4B, 12B or 31B",
        )


def _layer_kinds(c: Config) -> list[str]:
    """Return the kind of each layer. In transformers the last layer has no window, whatever the config says."""
    layers = range(c["num_hidden_layers"])
    kinds = c.get("layer_types") or [WINDOW if (layer + 1) % 6 else GLOBAL for layer in layers]
    return [*kinds[:-1], GLOBAL]


def _heads(c: Config, kinds: Sequence[str]) -> list[tuple[int, int]]:
    """Return the number of key heads and the width of heads of each layer, which layers of a kind have in common.

    transformers writes `per_layer_config`; published models have `global_head_dim` and `num_global_key_value_heads`.
    """
    kv_heads, width = _count(c, "num_key_value_heads"), _count(c, "head_dim")
    theirs = c["num_global_key_value_heads"] if c["attention_k_eq_v"] else None
    wide = {"head_dim": c["global_head_dim"], "num_key_value_heads": kv_heads if theirs is None else theirs}
    given = c.get("per_layer_config")
    own = [wide if kind == GLOBAL else {} for kind in kinds] if given is None else _overrides(given, kinds)
    defaults = {"num_key_value_heads": kv_heads, "head_dim": width}
    heads = [(_count({**defaults, **x}, "num_key_value_heads"), _count({**defaults, **x}, "head_dim")) for x in own]
    if len(set(zip(heads, kinds, strict=True))) > len(set(kinds)):
        raise WeightsError("heads differ between layers of one kind", want="the same for all layers of a kind")
    for number, size in heads:
        if c["num_attention_heads"] % number or size % 2:
            raise WeightsError(
                f"{number} key heads of {size} numbers do not fit {c['num_attention_heads']} heads",
                want="a divisor of num_attention_heads, and heads of an even width",
            )
    return heads


def _overrides(given: Any, kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(given, Mapping) or not all(isinstance(x, Mapping) and x.keys() <= known for x in given.values()):
        raise WeightsError("per_layer_config is not supported", want="heads alone: " + ", ".join(sorted(known)))
    return [given.get(str(number), given.get(number, {})) for number in range(len(kinds))]


def _kv_sources(c: Config, kinds: Sequence[str]) -> list[int | None]:
    """Return the layer whose keys each of the last layers uses: the last one of its kind with keys of its own."""
    first = len(kinds) - _count(c, "num_kv_shared_layers", 0)
    if first < 1 or set(kinds[:first]) != set(kinds):
        raise WeightsError(
            f"num_kv_shared_layers is {c['num_kv_shared_layers']} of {len(kinds)} layers",
            want="fewer, so that each kind of layers has one with keys of its own",
        )
    last = {kind: number for number, kind in enumerate(kinds[:first])}
    return [None] * first + [last[kind] for kind in kinds[first:]]


def _read_rope(c: Config, kind: str) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of a kind of layers."""
    rope: Mapping[str, Any] = (c.get("rope_parameters") or ROPES).get(kind) or ROPES[kind]
    if rope_kind(rope) == "proportional":
        rope = {"factor": 1.0, "partial_rotary_factor": 1.0, **rope}
    return rope.get("rope_theta", ROPES[kind]["rope_theta"]), read_rope_scaling(rope, {}, kind)


def _other_parts(s: Gemma4Settings, is_reader: bool) -> tuple[str, str]:
    return ("gemma4_wide_mlp" if s.wide_mlp and is_reader else "mlp"), "gemma4_end"


def _count(c: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = c.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise WeightsError(f"{name} is {value!r:.40}", want=f"a whole number from {least} to {2**31 - 1}")
    return value


def write_gemma4(c: ModelConfig) -> Fields:
    """Write the inverse of `read_gemma4`, in the form of published models."""
    common, s = write_common(c), c.kind_settings
    kinds = write_layer_types(c)
    ropes = {GLOBAL: (c.rope_theta, c.rope_scaling), WINDOW: (c.local_rope_theta, c.local_rope_scaling)}
    own = {
        "attention_bias": False,
        "hidden_activation": common["hidden_act"],
        "rope_parameters": {
            kind: {"rope_theta": theta} | (write_rope_scaling(x) or {"rope_type": "default"})
            for kind, (theta, x) in ropes.items()
        },
        "sliding_window": kinds["sliding_window"] or c.max_positions,
        "layer_types": kinds["layer_types"],
        "final_logit_softcapping": c.final_softcap,
        "attention_k_eq_v": s.keys_are_values,
        "num_global_key_value_heads": s.global_heads[0],
        "global_head_dim": s.global_heads[1],
        "num_kv_shared_layers": sum(source is not None for source in c.kv_sources or ()),
        "use_double_wide_mlp": s.wide_mlp,
        "hidden_size_per_layer_input": s.input_width,
        "vocab_size_per_layer_input": s.input_vocab,
    }
    left_out = ("rope_theta", "rope_scaling", "hidden_act")
    return {name: x for name, x in common.items() if name not in left_out} | own


_MIXERS = {
    (WINDOW, False): "gemma4_local", (GLOBAL, False): "gemma4_global",
    (WINDOW, True): "gemma4_local_reader", (GLOBAL, True): "gemma4_global_reader",
}  # fmt: skip
"""(Kind of a layer, whether it uses the keys of another) → kind of its mixer."""

ROPES: dict[str, dict[str, Any]] = {
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
}
DEFAULTS: Fields = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262_144,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
"""Field → transformers' default."""
OWN_DEFAULTS: dict[str, Fields] = {
    "gemma4_text": {
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    },
    "gemma4_unified_text": {
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
}


# --- tensors

_END_NAMES = {
    "end.input_gate.kernel": "per_layer_input_gate.weight",
    "end.input_proj.kernel": "per_layer_projection.weight",
    "end.norm.scale": "post_per_layer_input_norm.weight",
    "end.scalar": "layer_scalar",
}
_INPUT_NAMES = {
    "layer_inputs.embed.embedding": "model.embed_tokens_per_layer.weight",
    "layer_inputs.context_proj.kernel": "model.per_layer_model_projection.weight",
    "layer_inputs.norm.scale": "model.per_layer_projection_norm.weight",
}
NAMES = NameTable(GEMMA_NAMES.prefix, {**GEMMA_NAMES.layer, **_END_NAMES}, {**GEMMA_NAMES.top, **_INPUT_NAMES})
UNUSED = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
"""Tensors of layers that use the keys of another layer: published files have them, and nothing computes with them."""


def unused_tensors(c: ModelConfig) -> set[str]:
    """Return the names of tensors that a file may have and that no layer uses."""
    readers = [layer for layer in range(c.num_layers) if c.kv_source(layer) is not None]
    return {NAMES.prefix.format(layer) + name for layer in readers for name in UNUSED}


def gemma4_text() -> Family:
    """Return the family of Gemma 4: E2B, E4B and 31B."""
    return _family("Gemma 4 text", "Gemma4ForCausalLM")


def gemma4_unified_text() -> Family:
    """Return the family of Gemma 4 unified: 12B."""
    return _family("Gemma 4 unified text", "Gemma4UnifiedForCausalLM")


def _family(name: str, architecture: str) -> Family:
    # transformers 5 takes rotary settings of an older form in place of the others, and has no base of the rotation.
    return Family(name, read_gemma4, write_gemma4, NAMES, architecture, unused=unused_tensors, has_older_form=False)


_OTHERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")
TEXT_PART = TextPart("gemma4_text", _OTHERS)
UNIFIED_TEXT_PART = TextPart("gemma4_unified_text", _OTHERS)
