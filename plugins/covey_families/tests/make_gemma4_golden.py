"""Makes the golden numbers of Gemma 4: logits, log-probs and greedy tokens of tiny random models by transformers.

Run in the environment of `make golden-families`, with transformers 5.24 or later:

    python plugins/covey_families/tests/make_gemma4_golden.py

Writes golden/gemma4.json (configs and shapes of tensors) and golden/gemma4.npz beside this file. Texts and weights are
those of tests/parity/make_golden.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "tests" / "parity"))
from make_golden import GREEDY_TOKENS, SMALL, alone, forward, greedy, inputs, padded, samples, weight  # noqa: E402

LOCAL, GLOBAL = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "e2b": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 10,
        "num_key_value_heads": 1,
        "global_head_dim": 16,
        "layer_types": [LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL] * 2,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 64,
        "final_logit_softcapping": 30.0,
    },
    "e4b": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 7,
        "global_head_dim": 16,
        "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, LOCAL, GLOBAL, GLOBAL],
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 80,
        "final_logit_softcapping": 3.0,
    },
    "31b": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 7,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    "12b": {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 6,
        "global_head_dim": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "layer_types": [LOCAL, GLOBAL] * 3,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            GLOBAL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1000.0,
                "factor": 2.0,
            },
            LOCAL: {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        },
    },
    "one-width": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "global_head_dim": 8,
        "layer_types": [GLOBAL, LOCAL, GLOBAL, GLOBAL],
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 64,
        "hidden_activation": "silu",
        "rope_parameters": {
            GLOBAL: {"rope_type": "default", "rope_theta": 500.0},
            LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}
"""Tiny models that together use every setting that is read."""


LARGEST_ERROR = 2.5e-5
"""Models whose results in float32 differ more from those in float64 are drawn again: rounding decides what they say."""


def weight_of(name: str, draw: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weights of a tensor, which follow from its name; numbers that scale layers are near 1."""
    drawn = weight(f"{name}#{draw}", shape)
    return 1 + drawn if name.endswith("layer_scalar") else drawn


def config_of(name: str) -> Any:
    fields = SMALL | {"head_dim": 8, "sliding_window": 5} | MODELS[name]
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def model_of(config: Any, draw: int) -> tuple[torch.nn.Module, dict[str, list[int]]]:
    """Return a random model, and the shapes of its tensors."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    state = {k: x for k, x in model.state_dict().items() if k != "lm_head.weight" or not config.tie_word_embeddings}
    for key, value in state.items():
        value.copy_(torch.from_numpy(weight_of(key, draw, tuple(value.shape))))
    return model, {key: list(value.shape) for key, value in state.items()}


def results(model: torch.nn.Module, tokens: np.ndarray, given: dict[str, Any]) -> dict[str, np.ndarray]:
    each = [alone(model, *one) for one in samples(given["groups"])]
    rows = padded(model, np.array(given["padded"]))
    return {"": forward(model, tokens), "/padded": rows, "/samples": np.concatenate(each)}


def main() -> None:
    tokens, given = np.random.RandomState(0).randint(0, SMALL["vocab_size"], (2, 40)), inputs()
    described, arrays = {}, {"tokens": tokens.astype(np.int32)}
    prompt = torch.tensor([given["groups"][0]["prompt"]])
    for name in MODELS:
        config, draw, error = config_of(name), -1, np.inf
        while error > LARGEST_ERROR:
            draw += 1
            model, shapes = model_of(config, draw)
            rounded = results(model, tokens, given)
            likeliest, margin = greedy(model, prompt[0].numpy(), GREEDY_TOKENS, ())
            cached = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GREEDY_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert cached[0, -GREEDY_TOKENS:].tolist() == likeliest.tolist()
            exact = results(model.double(), tokens, given)
            exact["/padded"] = rounded["/padded"]  # transformers masks padding with numbers that float64 turns into NaN
            error = max(np.abs(exact[part] - rounded[part]).max() for part in exact)
            print(f"{name}, draw {draw}: narrowest choice {margin:.3f}, float32 differs by {error:.1e}", flush=True)
        described[name] = {"config": config.to_dict(), "shapes": shapes, "draw": draw}
        arrays |= {f"{name}{part}": x for part, x in exact.items()} | {f"{name}/greedy": likeliest}
    (HERE / "golden" / "gemma4.json").write_text(json.dumps(described, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(HERE / "golden" / "gemma4.npz", **arrays)


if __name__ == "__main__":
    main()
