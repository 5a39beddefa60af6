"""Small models of random weights that learn sums: a Qwen3.5 of one period of layers, and a Llama of its size."""

from pathlib import Path
from typing import Any

from flax import nnx

from covey.models import families
from covey.models.decoder import Decoder
from covey.models.scratch import SCRATCH_MODELS, SPECIAL_TOKENS
from covey.models.scratch_checkpoint import character_tokenizer
from covey.parallel import flatten
from covey_formats.hf import write_hf

ALPHABET = SCRATCH_MODELS["arithmetic-tiny"].alphabet
COMMON: dict[str, Any] = {
    "vocab_size": len(SPECIAL_TOKENS) + len(ALPHABET), "num_hidden_layers": 4, "tie_word_embeddings": True,
    "max_position_embeddings": 2048, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "model_type": "qwen3_5_text", "head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.25},
    },
    "llama": {"model_type": "llama", "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10.0},
}  # fmt: skip
"""Architecture → fields of its config.json, apart from the widths."""


def config_of(architecture: str, width: int, head_dim: int = 0) -> dict[str, Any]:
    """Return the config.json of a model of four layers that is `width` wide, a multiple of 32.

    Args:
        head_dim: width of all heads; 0 for that of `SIZES`.
    """
    fields = COMMON | SIZES[architecture] | ({"head_dim": head_dim} if head_dim else {})
    head_dim = fields["head_dim"]
    counts = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // head_dim)
    if architecture == "qwen3.5":
        counts |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), width // head_dim)
        counts |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), head_dim)
    return fields | counts | {"hidden_size": width, "intermediate_size": width * 8 // 3 // 32 * 32}


def write_model(folder: Path, architecture: str, seed: int = 0, width: int = 224, head_dim: int = 0) -> int:
    """Write a model as a Hugging Face folder, and return its number of weights.

    The embedding is drawn like the matrices, as in `ScratchCheckpoint`: sums are then learnt sooner.
    """
    model = Decoder(families.read_config(config_of(architecture, width, head_dim)), rngs=nnx.Rngs(seed))
    table = model.embed.embedding
    table[...] = table[...] * (width**-0.5 / 0.02)
    write_hf(model, character_tokenizer(ALPHABET), folder)
    return sum(x.size for x in flatten(nnx.state(model)).values())
