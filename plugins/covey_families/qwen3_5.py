"""Qwen3.5, dense (0.8B, 2B, 4B, 9B, 27B): the text part.

Three layers of four are gated delta nets. The fourth is attention with a gate on its output, which rotates a quarter of
each head.
"""

from dataclasses import replace
from typing import Any

from covey.errors import WeightsError
from covey.models.config import ModelConfig
from covey.models.families import FAMILIES, Family, NameTable
from covey.models.loading import hf_config
from covey.models.loading.hf_config import Config, Fields, TextPart
from covey_families.settings import DeltaSettings

KIND = "linear_attention"
"""Name of the layers with a gated delta net in `layer_types`."""
MIXERS = {KIND: "delta_net", "full_attention": "attention"}
DEFAULTS: Config = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Field → transformers' default."""
SIZES = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim", "conv_width": "linear_conv_kernel_dim",
}  # fmt: skip
"""Field of `DeltaSettings` → field of config.json."""
PARTIAL = "partial_rotary_factor"
TEXT_PART = TextPart("qwen3_5_text", ("visual.", "mtp."))


def read(c: Config) -> ModelConfig:
    """Read Qwen3.5's text model. The rotation of images, `mrope_section`, is that of text where all positions agree."""
    c = {**DEFAULTS, **c}
    rope = c.get("rope_parameters") or {}
    fraction = rope.get(PARTIAL) or c.get(PARTIAL) or 0.25
    plain = {name: value for name, value in rope.items() if name != PARTIAL}
    config = hf_config.read_qwen3({**c, PARTIAL: None, "rope_parameters": plain})
    kinds = c.get("layer_types") or _kinds(c)
    if set(kinds) - MIXERS.keys():
        raise WeightsError(
            f"layer_types {sorted(set(kinds) - MIXERS.keys())} of {c['model_type']}", want=str([*MIXERS])
        )
    return replace(
        config,
        norm_offset=1.0,
        attention_gate=True,
        rotary_dim=_rotary_dim(config.head_dim, fraction),
        mixers=tuple(MIXERS[kind] for kind in kinds),
        kind_settings=_sizes(c),
    )


def _kinds(c: Config) -> list[str]:
    every = _count(c, "full_attention_interval", 4)
    return ["full_attention" if (layer + 1) % every == 0 else KIND for layer in range(c["num_hidden_layers"])]


def _rotary_dim(head_dim: int, fraction: Any) -> int:
    width = int(head_dim * fraction) if isinstance(fraction, int | float) and 0 < fraction <= 1 else 0
    if width < 2 or width % 2:
        raise WeightsError(f"{PARTIAL} is {fraction!r:.80}", want=f"a fraction of {head_dim} that is an even number")
    return width


def _sizes(c: Config) -> DeltaSettings:
    settings = DeltaSettings(**{ours: _count(c, theirs) for ours, theirs in SIZES.items()})
    if settings.value_heads % settings.key_heads:
        want = f"a multiple of {SIZES['key_heads']}, {settings.key_heads}"
        raise WeightsError(f"{SIZES['value_heads']} is {settings.value_heads}", want=want)
    return settings


def _count(c: Config, name: str, default: int = 0) -> int:
    value = c.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**16:
        raise WeightsError(f"{name} is {value!r:.80}", want="a whole number from 1 to 65535")
    return value


def write(c: ModelConfig) -> Fields:
    """Write the inverse of `read`."""
    names = {ours: theirs for theirs, ours in MIXERS.items()}
    rope = {"rope_type": "default", "rope_theta": c.rope_theta, PARTIAL: (c.rotary_dim or c.head_dim) / c.head_dim}
    if c.rope_scaling is not None:
        raise WeightsError("a scaling of the rotation is not written for Qwen3.5", want="a model without one")
    common = {name: x for name, x in hf_config.write_qwen3(c).items() if not name.startswith(("rope_", "use_sliding"))}
    sizes = {theirs: getattr(c.kind_settings, ours) for ours, theirs in SIZES.items()}
    kinds = [names.get(mixer, mixer) for mixer in c.mixers or ("attention",) * c.num_layers]
    return common | sizes | {"layer_types": kinds, "rope_parameters": rope}


_FUSED = {
    f"delta.{name}_{ours}": f"linear_attn.{theirs}.weight"
    for ours, theirs in (("proj.kernel", "in_proj_qkv"), ("conv.weight", "conv1d"))
    for name in "qkv"
}
_DELTA = {f"delta.{name}_proj.kernel": f"linear_attn.in_proj_{name}.weight" for name in "zba"}
_DELTA |= {
    "delta.o_proj.kernel": "linear_attn.out_proj.weight",
    "delta.norm.scale": "linear_attn.norm.weight",
    "delta.a_log": "linear_attn.A_log",
    "delta.dt_bias": "linear_attn.dt_bias",
}


def family() -> Family:
    """Return the family `qwen3_5_text`."""
    plain = FAMILIES["qwen3"].names
    names = NameTable(plain.prefix, {**plain.layer, **_FUSED, **_DELTA}, plain.top)
    return Family("Qwen3.5 text", read, write, names, "Qwen3_5ForCausalLM", (KIND,))
