"""Conversion of the rotary settings of a Hugging Face config.json to our `RopeScaling`, and back.

They are read in the forms of transformers 4 and 5, and written in that of 4, which both read.
"""

from collections.abc import Mapping
from typing import Any

from covey.errors import WeightsError
from covey.models.config import RopeScaling


def rope_settings(c: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings of full attention, in the form of transformers 5; empty for an older config."""
    settings: dict[str, Any] = c.get("rope_parameters") or {}
    return settings.get("full_attention") or settings


def read_rope_scaling(rope: Mapping[str, Any], c: Mapping[str, Any], layers: str = "") -> RopeScaling | None:
    """Return the scaling that `rope` or an older config sets; `layers` names the kind of layers, if there are many."""
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
    of = f" under {layers}" if layers else ""
    raise WeightsError(f"RoPE scaling {kind!r}{of} is not supported", want="one of: default, linear, llama3")


def write_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Write the inverse of `read_rope_scaling`."""
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
