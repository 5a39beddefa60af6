"""Conversion of the rotary settings of a Hugging Face config.json to our `RopeScaling`, and back.

They are read in the forms of transformers 4 and 5, and written in that of 4, which both read.
"""

import math
from collections.abc import Mapping
from typing import Any

from covey.errors import WeightsError
from covey.models.config import RopeScaling


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
    _refuse_contradiction(rope, old)
    scaling = rope or old
    if (scaling.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0) != 1.0:
        raise WeightsError("rotary positions on part of each head are not supported", want="partial_rotary_factor 1")
    kind = rope_kind(scaling)
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
    if kind == "yarn" and not layers:
        return _read_yarn(scaling, c)
    of = f" under {layers}" if layers else ""
    known = ("default", "linear", "llama3", *([] if layers else ["yarn"]))
    raise WeightsError(f"RoPE scaling {kind!r}{of} is not supported", want="one of: " + ", ".join(known))


def rope_kind(scaling: Mapping[str, Any]) -> str:
    """Return the name of a scaling; `default` is none."""
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _refuse_contradiction(rope: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Refuse two scalings: transformers takes one of them, and the base of the rotation from neither."""
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


def _read_yarn(scaling: Mapping[str, Any], c: Mapping[str, Any]) -> RopeScaling:
    """Read YaRN with the defaults of transformers 5. Of the two places for the positions of pretraining, that beside
    the scaling counts more there.
    """
    places = (c.get("original_max_position_embeddings"), scaling.get("original_max_position_embeddings"))
    return RopeScaling(
        "yarn",
        factor=scaling["factor"],
        original_max_positions=places[0] or places[1] or c["max_position_embeddings"],
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        truncate=scaling.get("truncate", True),
        attention_factor=_yarn_attention_factor(scaling),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    weights = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(weights[0]) / grown(weights[1]) if weights[0] and weights[1] else grown(1.0)


def write_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Write the inverse of `read_rope_scaling`."""
    if scaling is None:
        return None
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return fields
    fields["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind == "llama3":
        return fields | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
    return fields | {name: getattr(scaling, name) for name in names}
