"""Checks of the types and ranges of the fields of an untrusted config.json, before a model is built from it.

Rotary settings are converted to our `RopeScaling`, and back. They are read in the forms of transformers 4 and 5, and
written in form 4, which both versions read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.errors import WeightsError
from covey.models.config import RopeScaling

NUM_LAYERS = "num_hidden_layers"
LAYER_KINDS = {"full_attention": None, "sliding_attention": "sliding_window"}
"""Kind of a layer in `layer_types` → field of its sliding window; None for a kind without a window."""
NULLABLE = (
    "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "rope_theta", "rope_local_base_freq",
    "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor", "rope_parameters", "rope_scaling",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "hidden_act", "hidden_activation",
    "layer_types", "no_rope_layers", "rope_type", "type", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", *LAYER_KINDS,
)  # fmt: skip
"""Fields that may be null, which means the same as absent."""


def check_config(config: Mapping[str, Any], where: str, own_kinds: Sequence[str] = ()) -> None:
    """Check that every field of a config.json has a type and a range that a model can have.

    Args:
        own_kinds: kinds of layers in `layer_types` that the family reads itself.

    Raises:
        WeightsError: a field has a wrong value; the message names it.
    """
    _check_fields(config, "", where)
    heads, layers = config.get("num_attention_heads"), config.get(NUM_LAYERS)
    if heads is not None:
        _check_heads(config, heads, where)
    kinds = config.get("layer_types")
    if kinds is not None and len(kinds) != layers:
        raise WeightsError(f"layer_types has {len(kinds)} entries", want=f"one a layer: {layers}", where=where)
    if set(kinds or ()) - {*LAYER_KINDS, *own_kinds}:
        want = "a list of " + " and ".join((*LAYER_KINDS, *own_kinds))
        raise WeightsError(f"layer_types is {_format_value(kinds)}", want=want, where=where)
    marks = config.get("no_rope_layers")
    if marks is not None and len(marks) < (layers or 0):
        raise WeightsError(f"no_rope_layers has {len(marks)} entries", want=f"one a layer: {layers}", where=where)
    if config.get("rope_theta", 0) is None and not config.get("rope_parameters"):
        raise WeightsError("rope_theta is None", want="a finite number above 0", where=where)


def check_layers(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Check that there are not more layers than tensors, before anything is allocated per layer."""
    if config.get(NUM_LAYERS, 0) > tensors:
        raise WeightsError(
            f"{NUM_LAYERS} is {config[NUM_LAYERS]} and the checkpoint has {tensors} tensors", where=where
        )


def _check_fields(fields: Mapping[str, Any], within: str, where: str) -> None:
    for name, (right, want) in CHECKS.items():
        value = fields.get(name)
        if name not in fields or (value is None and name in NULLABLE):
            continue
        if not right(value):
            raise WeightsError(f"{within}{name} is {_format_value(value)}", want=want, where=where)
        if isinstance(value, Mapping):
            _check_fields(value, f"{within}{name}.", where)


def _check_heads(config: Mapping[str, Any], heads: int, where: str) -> None:
    sharing, width = config.get("num_key_value_heads") or heads, config.get("head_dim")
    if heads % sharing:
        want = f"a divisor of num_attention_heads, {heads}"
        raise WeightsError(f"num_key_value_heads is {sharing}", want=want, where=where)
    if width is None and config.get("hidden_size", heads) % heads:
        want = f"a divisor of hidden_size, {config['hidden_size']}, or a head_dim"
        raise WeightsError(f"num_attention_heads is {heads}", want=want, where=where)
    if width is not None and width % 2:
        raise WeightsError(f"head_dim is {width}", want="an even number: RoPE turns pairs", where=where)


def _format_value(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # an integer of thousands of digits
        return "too large a number"


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf and value < 1e300


_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", NUM_LAYERS, "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "sliding_window", "sliding_window_pattern",
    "no_rope_layer_interval", "original_max_position_embeddings",
)  # fmt: skip
_NUMBERS = (
    "rms_norm_eps", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
_YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "truncate")
_OBJECTS = ("rope_parameters", "rope_scaling", *LAYER_KINDS)
_TEXTS = ("hidden_act", "hidden_activation", "rope_type", "type")

CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number from 1 to 2147483647")),
    "max_window_layers": (lambda value: _is_count(value, 0), "a whole number from 0 to 2147483647"),
    **dict.fromkeys(_NUMBERS, (_is_number, "a finite number above 0")),
    "rope_theta": (lambda value: _is_number(value) and value > 1, "a finite number above 1"),
    **dict.fromkeys(
        _YARN_NUMBERS, (lambda value: _is_number(value) and 1e-6 <= value <= 1e6, "a number from 1e-6 to 1e6")
    ),
    **dict.fromkeys(_FLAGS, (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(_OBJECTS, (lambda value: isinstance(value, Mapping), "an object")),
    **dict.fromkeys(_TEXTS, (lambda value: isinstance(value, str), "text")),
    "no_rope_layers": (
        lambda value: isinstance(value, list) and all(mark in (0, 1) for mark in value),
        "a list of 0 and 1",
    ),
    "layer_types": (
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        "a list of " + " and ".join(LAYER_KINDS),
    ),
}
"""Field → (check of a value, description of the right values), including the rotary settings."""


def rope_settings(c: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings of full attention, in the form of transformers 5; empty for an older config."""
    settings: dict[str, Any] = c.get("rope_parameters") or {}
    return settings.get("full_attention") or settings


def read_rope_scaling(rope: Mapping[str, Any], c: Mapping[str, Any], layers: str = "") -> RopeScaling | None:
    """Return the scaling that `rope` or an older config sets; `layers` names the kind of layers, if there are many.

    Raises:
        WeightsError: the scaling is not supported, or `rope` and the older form contradict each other.
    """
    old: dict[str, Any] = c.get("rope_scaling") or {}
    _check_contradiction(rope, old)
    scaling = rope or old
    partial = (scaling.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0) != 1.0
    if partial and rope_kind(scaling) != "proportional":
        raise WeightsError("rotary positions on part of each head are not supported", want="partial_rotary_factor 1")
    kind: Any = rope_kind(scaling)
    if kind == "default":
        return None
    known = [name for name in ROPE_FIELDS if name != "yarn" or not layers]
    if kind not in known:
        of = f" under {layers}" if layers else ""
        want = "one of: " + ", ".join(["default", *known])
        raise WeightsError(f"RoPE scaling {kind!r}{of} is not supported", want=want)
    scaling = _with_yarn_defaults(scaling, c) if kind == "yarn" else scaling
    return RopeScaling(kind, **{ours: scaling[theirs] for ours, theirs in ROPE_FIELDS[kind].items()})


def rope_kind(scaling: Mapping[str, Any]) -> str:
    """Return the name of a scaling; `default` is none."""
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _check_contradiction(rope: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Check that there is one scaling: transformers takes one of two, and the base of the rotation from neither."""
    numbers = {name: value for name, value in old.items() if name not in ("type", "rope_type")}
    if (
        rope
        and old
        and (rope_kind(rope) != rope_kind(old) or any(rope.get(name) != value for name, value in numbers.items()))
    ):
        raise WeightsError(
            "rope_parameters and rope_scaling contradict each other",
            want="one of them",
            fix="write the scaling into rope_parameters, beside rope_theta, and remove rope_scaling",
        )


def _with_yarn_defaults(scaling: Mapping[str, Any], c: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of YaRN with the defaults of transformers 5. Of the two places for the positions of
    pretraining, the place next to the scaling counts more there.
    """
    positions = "original_max_position_embeddings"
    return {
        "factor": scaling["factor"],
        positions: c.get(positions) or scaling.get(positions) or c["max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32.0,
        "beta_slow": scaling.get("beta_slow") or 1.0,
        "truncate": scaling.get("truncate", True),
        "attention_factor": _yarn_attention_factor(scaling),
    }


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    if (factor := scaling.get("attention_factor")) is not None:
        return float(factor)

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    weights = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(weights[0]) / grown(weights[1]) if weights[0] and weights[1] else grown(1.0)


def with_older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with its `rope_parameters` also in the fields of transformers 4: a reader that knows only these
    would take the default base of the rotation, and no scaling.

    >>> with_older_rope({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})["rope_scaling"]
    {'rope_type': 'linear', 'factor': 2.0}
    """
    rope, local = rope_settings(config), (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    older = {
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": scaling if rope_kind(scaling) != "default" else None,
        "rope_local_base_freq": local.get("rope_theta"),
    }
    return {**config, **{name: x for name, x in older.items() if x is not None and config.get(name) is None}}


def write_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Write the inverse of `read_rope_scaling`."""
    if scaling is None:
        return None
    fields = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_FIELDS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **fields}


ROPE_FIELDS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_positions": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_max_positions": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
    "proportional": {"factor": "factor", "fraction": "partial_rotary_factor"},
}
"""Kind of scaling → field of `RopeScaling` → field of config.json."""
