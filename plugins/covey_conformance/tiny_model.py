"""The model that all trainers load: a Llama of two layers, small enough for a dense oracle, as a Hugging Face folder.

Its weights are always the same, scaled so that log-probs, ratios and gradients are of the size of a real model's. Its
tokenizer has merges, so that a text does not tell its tokens, and its chat template drops earlier reasoning.
"""

import json
from pathlib import Path

import numpy as np
from jaxtyping import Float
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

Weights = dict[str, Float[np.ndarray, "..."]]
"""Arrays by their names in a Hugging Face checkpoint."""

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, VOCAB = 32, 48, 2, 2, 1, 16, 64
ROPE_THETA, NORM_EPS = 10_000.0, 1e-6
PAD, STOP, END_OF_THOUGHT = 0, 2, 4
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
PIECES = "th the in an er on re nd hi ou aa aaa ba bb ab oo st en es xy or ea"
"""Tokens that the tokenizer merges, each of an earlier one and a letter."""
LETTERS = "abcdefghijklmnopqrstuvwxyz.,?!1234ĠĊ"
"""Single characters of the vocabulary; the last two are space and line feed in the byte-level alphabet."""
TEMPLATE = """\
{% for m in messages %}{% set text = m['content'] %}\
{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}{% set text = text.split('</think>')[-1] %}\
{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def write_tiny_model(folder: Path) -> Weights:
    """Write the model to a new folder, and return its weights, float32."""
    weights = _draw_weights()
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, text in _files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return weights


def _draw_weights() -> Weights:
    """Draw the weights, float32; bfloat16 has them exactly."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return np.asarray(rng.normal(size=(rows, columns)) * gain / columns**0.5)

    def scale() -> np.ndarray:
        return 1 + 0.2 * rng.normal(size=WIDTH)

    embedding, head = rng.normal(size=(VOCAB, WIDTH)), matrix(VOCAB, WIDTH, 1.5)
    embedding[:, 0] += 3.0  # nearly constant in what the head sees, and so a bias of these tokens
    head[[PAD, STOP, END_OF_THOUGHT], 0] += (-4.0, 0.8, 0.5)  # trainers know padding by its token: it is never drawn
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": scale(),
            f"{at}self_attn.q_proj.weight": matrix(HEADS * HEAD_WIDTH, WIDTH),
            f"{at}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_WIDTH, WIDTH),
            f"{at}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_WIDTH, WIDTH),
            f"{at}self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD_WIDTH),
            f"{at}post_attention_layernorm.weight": scale(),
            f"{at}mlp.gate_proj.weight": matrix(HIDDEN, WIDTH),
            f"{at}mlp.up_proj.weight": matrix(HIDDEN, WIDTH),
            f"{at}mlp.down_proj.weight": matrix(WIDTH, HIDDEN),
        }
    weights |= {"model.norm.weight": scale(), "lm_head.weight": head}
    return {name: w.astype(bfloat16).astype(np.float32) for name, w in weights.items()}


def read_weights(folder: Path) -> Weights:
    """Read all weights of a Hugging Face folder, float32."""
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {name: w.astype(np.float32) for name, w in load_file(file).items()}
    return weights


def _files() -> dict[str, str]:
    """Return the text of the configs and of the tokenizer by name of file."""
    vocab = [*SPECIAL, *LETTERS, *PIECES.split()]
    assert len(set(vocab)) <= VOCAB
    merges = [f"{piece[:-1]} {piece[-1]}" for piece in PIECES.split()]
    vocab += [f"<unused{n}>" for n in range(VOCAB - len(vocab))]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
        "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_WIDTH, "vocab_size": VOCAB, "max_position_embeddings": 512,
        "rms_norm_eps": NORM_EPS, "rope_theta": ROPE_THETA, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": STOP, "pad_token_id": PAD,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "added_tokens": [
            {"id": n, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": n < 3} for n, text in enumerate(SPECIAL)
        ],
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {text: n for n, text in enumerate(vocab)}, "merges": merges,
        },
    }  # fmt: skip
    names = {"eos_token": SPECIAL[STOP], "pad_token": SPECIAL[PAD], "bos_token": None, "model_max_length": 512}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **names}
    generation = {"eos_token_id": STOP, "pad_token_id": PAD}
    documents = {
        "config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }  # fmt: skip
    return {name: json.dumps(text, ensure_ascii=False, indent=1) for name, text in documents.items()}
