"""A Gemma 3 in a GGUF file, with weights drawn from the names of its tensors and a SentencePiece vocabulary."""

import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, HEAD_DIM, INNER, WINDOW = 7, 32, 4, 16, 48, 8


def write(path: Path, vocabulary: dict[str, Any], changes: dict[str, Any] | None = None) -> Path:
    """Write the model; `vocabulary` has `tokens`, `types` and `scores`, and `changes` are other metadata."""
    writer = gguf.GGUFWriter(path, "gemma3")
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata(vocabulary) | (changes or {})).items():
        kinds.get(type(value), writer.add_array)(key, value)
    for name, shape in shapes(len(vocabulary["tokens"])).items():
        writer.add_tensor(name, draw(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(vocabulary: dict[str, Any]) -> dict[str, Any]:
    model = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 2,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": WINDOW,
        "rope.freq_base": 1e6,
    }
    tokenizer = {
        "model": "llama",
        "pre": "default",
        "tokens": vocabulary["tokens"],
        "token_type": vocabulary["types"],
        "scores": vocabulary["scores"],
        "padding_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    fields = {f"gemma3.{name}": value for name, value in model.items()}
    return fields | {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}


def shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """Name in the file → shape of each tensor, as NumPy has it."""
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (2 * HEAD_DIM, HIDDEN),
        "attn_v": (2 * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "attn_q_norm": (HEAD_DIM,),
        "attn_k_norm": (HEAD_DIM,),
        "post_attention_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
        "post_ffw_norm": (HIDDEN,),
    }
    top = {"token_embd.weight": (rows, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return top | {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of one tensor; scales of norms are near 1, as in the file, where the 1 is added already."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return ((1 + 0.3 * values) if "norm" in name else 0.3 * values).astype(np.float32)
