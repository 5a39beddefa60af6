"""Write a random Llama as a Hugging Face folder, whose stop token has a given probability.

All libraries load the same folder, and none of their code is touched: that lengths are ragged is the model's doing.
Dimension 0 of the residual stream is the same large number for every token. Layers neither read nor write it (their
norms' scales and their outputs' rows are 0 there), and it is nearly all of the stream's square, so behind the final
norm it is a constant. The head's row of the stop token is what makes a logit of it; all other logits are close to each
other. The probability is therefore the same at every step, and lengths are geometric.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from benchmarks.peers.work import PAD, STOP

LOUD = 64.0
"""Value of dimension 0 of every token's embedding."""
BEHIND_NORM = 0.4
"""Approximate value of the same dimension after the final norm."""
SPREAD = 0.02
"""Standard deviation of all other weights."""


def write(folder: Path, shape: Mapping[str, Any], stop_probability: float, unknown: str = "<pad>") -> None:
    """Write config.json, model.safetensors and a tokenizer of one token per word. Probability 0: the stop token never
    comes.

    Args:
        shape: the entries of config.json that say how large the model is.
        unknown: the token of a word that is not in the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    ends = {"eos_token_id": STOP, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **ends}))
    save_file(_weights(config, stop_probability), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, config["vocab_size"], unknown)


def _weights(c: Mapping[str, Any], stop_probability: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    queries, keys = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    normal = lambda *shape: rng.normal(0, SPREAD, shape).astype(np.float32)  # noqa: E731
    out = {"model.embed_tokens.weight": _embedding(normal(c["vocab_size"], hidden), stop_probability)}
    quiet = 10 * LOUD / math.sqrt(hidden)  # brings what is not loud, some 0.1, back to about 1
    for n in range(layers):
        at = f"model.layers.{n}."
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            out[f"{at}self_attn.{name}_proj.weight"] = normal(size, hidden)
        out[f"{at}self_attn.o_proj.weight"] = _silent(normal(hidden, queries) / math.sqrt(2 * layers))
        out[f"{at}mlp.gate_proj.weight"], out[f"{at}mlp.up_proj.weight"] = normal(inner, hidden), normal(inner, hidden)
        out[f"{at}mlp.down_proj.weight"] = _silent(normal(hidden, inner) / math.sqrt(2 * layers))
        out[f"{at}input_layernorm.weight"] = _silent(np.full(hidden, quiet, np.float32))
        out[f"{at}post_attention_layernorm.weight"] = _silent(np.full(hidden, quiet, np.float32))
    out["model.norm.weight"] = np.full(hidden, 0.1, np.float32)
    out["model.norm.weight"][0] = BEHIND_NORM / math.sqrt(hidden)
    return out


def _embedding(table: np.ndarray, stop_probability: float) -> np.ndarray:
    """Return the tied embedding, in which the stop token's logit stands out against the log-sum of all others' by its
    log-odds.
    """
    table[:, 0] = LOUD
    table[[PAD, STOP]] = 0.0
    table[[PAD, STOP], 0] = -LOUD
    if stop_probability:
        odds = stop_probability / (1 - stop_probability)
        table[STOP, 0] = LOUD + math.log(odds * (len(table) - 2)) / BEHIND_NORM
    return table


def _silent(weight: np.ndarray) -> np.ndarray:
    weight[0] = 0.0
    return weight


def _write_tokenizer(folder: Path, size: int, unknown: str) -> None:
    words = {f"w{n}": n for n in range(size)}
    del words[f"w{PAD}"], words[f"w{STOP}"]
    words |= {"<pad>": PAD, "<eos>": STOP}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<pad>", "<eos>"])
    inner.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "padding_side": "left"}))


COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "initializer_range": SPREAD, "eos_token_id": STOP, "pad_token_id": PAD, "bos_token_id": None,
    "torch_dtype": "float32",
}  # fmt: skip
