"""The published models of Qwen3.5 and Gemma 4: their configs, as far as sizes depend on them, have the sizes of the
table of known models.
"""

import math
from typing import Any

import pytest

from covey.models import families

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def qwen(hidden: int, inner: int, layers: int, heads: int, keys: int, values: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys, "hidden_act": "silu",
        "linear_num_value_heads": values, "tie_word_embeddings": tied, "max_position_embeddings": 262_144,
    }  # fmt: skip


def gemma(hidden: int, inner: int, layers: int, heads: int, keys: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "final_logit_softcapping": 30.0,
    } | others  # fmt: skip


LARGE = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024}
CONFIGS = {
    "hf:Qwen/Qwen3.5-0.8B": qwen(1024, 3584, 24, 8, 2, 16, True),
    "hf:Qwen/Qwen3.5-2B": qwen(2048, 6144, 24, 8, 2, 16, True),
    "hf:Qwen/Qwen3.5-4B": qwen(2560, 9216, 32, 16, 4, 32, True),
    "hf:Qwen/Qwen3.5-9B": qwen(4096, 12_288, 32, 16, 4, 32, False),
    "hf:Qwen/Qwen3.5-27B": qwen(5120, 17_408, 64, 24, 4, 48, False),
    "hf:google/gemma-4-E2B-it": gemma(
        1536, 6144, 35, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True,
        layer_types=[LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL] * 7,
    ),
    "hf:google/gemma-4-E4B-it": gemma(2560, 10_240, 42, 8, 2, num_kv_shared_layers=18),
    "hf:google/gemma-4-12B-it": gemma(
        3840, 15_360, 48, 16, 8, model_type="gemma4_unified_text", num_global_key_value_heads=1, **LARGE
    ),
    "hf:google/gemma-4-31B-it": gemma(5376, 21_504, 60, 32, 16, num_global_key_value_heads=4, **LARGE),
}  # fmt: skip


def test_sizes_are_those_of_the_published_configs() -> None:
    known = pytest.importorskip("covey_formats.catalogue").MODELS
    sizes = {}
    for source, config in CONFIGS.items():
        read = families.read_config(config)
        sizes[source] = sum(math.prod(families.parameter_shape(read, path)) for path in families.parameter_paths(read))
    assert sizes == {model.source: model.parameters for model in known if model.source in CONFIGS}
    assert {model.thinking for model in known if model.source in CONFIGS} == {"switch"}
