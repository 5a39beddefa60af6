"""Families whose layers differ from Llama's in switches of `ModelConfig` alone: Phi-3, OLMo 2, SmolLM3, nanochat.

Each has a reader and a writer of its config, and the names of its tensors. No JAX here.
"""

from covey.errors import WeightsError
from covey.models.config import ModelConfig
from covey.models.families import FAMILIES, GEMMA_NAMES, Family, NameTable
from covey.models.loading.config_fields import rope_kind, rope_settings
from covey.models.loading.hf_config import (
    Config,
    Fields,
    check_switches_off,
    layer_windows,
    one_window,
    read_common,
    write_common,
    write_layer_types,
    write_llama,
    write_mistral,
)


def phi3() -> Family:
    """Return the family `phi3`, in whose files q, k and v share a tensor, and so do gate and up."""
    plain = FAMILIES["llama"].names
    fused = dict.fromkeys([f"attn.{name}_proj.kernel" for name in "qkv"], "self_attn.qkv_proj.weight")
    fused |= dict.fromkeys(("mlp.gate_proj.kernel", "mlp.up_proj.kernel"), "mlp.gate_up_proj.weight")
    names = NameTable(plain.prefix, {**plain.layer, **fused}, plain.top)
    return Family("Phi-3", read_phi3, write_mistral, names, "Phi3ForCausalLM")


def olmo2() -> Family:
    """Return the family `olmo2`."""
    return Family("OLMo 2", read_olmo2, write_olmo2, GEMMA_NAMES, "Olmo2ForCausalLM")


def smollm3() -> Family:
    """Return the family `smollm3`."""
    return Family("SmolLM3", read_smollm3, write_smollm3, FAMILIES["llama"].names, "SmolLM3ForCausalLM")


def nanochat() -> Family:
    """Return the family `nanochat`."""
    plain = FAMILIES["llama"].names
    mlp = {"mlp.up_proj.kernel": "mlp.fc1.weight", "mlp.down_proj.kernel": "mlp.fc2.weight"}
    names = NameTable(plain.prefix, {**plain.layer, **mlp}, plain.top)
    return Family("nanochat", read_nanochat, write_nanochat, names, "NanoChatForCausalLM")


def read_phi3(c: Config) -> ModelConfig:
    """Read Phi-3 and Phi-4 with plain rotary positions; all layers have the window, if there is one.

    `longrope` is refused: it rotates a text otherwise once the text is longer than a limit, so that what was cached
    for its beginning is wrong. transformers reads `su` and `yarn` of this family as the same.
    """
    kind = rope_kind(rope_settings(c) or c.get("rope_scaling") or {})
    if kind != "default":
        raise WeightsError(
            f"RoPE scaling {kind!r} is not supported for phi3",
            want="a model with plain rotary positions",
            fix="Phi-3 models for 4k tokens have them: Phi-3-mini-4k-instruct",
        )
    return read_common(c, windows=one_window(c))


def read_olmo2(c: Config) -> ModelConfig:
    """Read OLMo 2."""
    check_switches_off(c, "attention_bias")
    return read_common(c, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_whole=True)


def read_smollm3(c: Config) -> ModelConfig:
    """Read SmolLM3: every fourth layer does not rotate, or the layers that `no_rope_layers` marks with 0."""
    check_switches_off(c, "attention_bias", "mlp_bias")
    c = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0, **c}
    layers, every = range(c["num_hidden_layers"]), c.get("no_rope_layer_interval", 4)
    marks = c.get("no_rope_layers")
    rotates = [(i + 1) % every != 0 for i in layers] if marks is None else [bool(marks[i]) for i in layers]
    windowed = c.get("use_sliding_window", False) and c.get("sliding_window") is not None
    windows = layer_windows(c, lambda layer: windowed and not rotates[layer])
    return read_common(c, rope_layers=tuple(rotates), windows=windows)


def read_nanochat(c: Config) -> ModelConfig:
    """Read nanochat in its transformers form, where tensors have Llama's names."""
    check_switches_off(c, "attention_bias")
    return read_common(
        c,
        gated_mlp=False,
        qk_norm=True,
        norm_scales=False,
        embed_norm=True,
        rope_backwards=True,
        final_softcap=c.get("final_logit_softcapping", 15.0),
    )


def write_olmo2(c: ModelConfig) -> Fields:
    return write_common(c) | {"attention_bias": False}


def write_smollm3(c: ModelConfig) -> Fields:
    rotates = c.rope_layers or (True,) * c.num_layers
    own = {"no_rope_layers": list(map(int, rotates)), "use_sliding_window": c.windows is not None}
    return write_llama(c) | write_layer_types(c) | own


def write_nanochat(c: ModelConfig) -> Fields:
    return write_common(c) | {"attention_bias": False, "final_logit_softcapping": c.final_softcap}
