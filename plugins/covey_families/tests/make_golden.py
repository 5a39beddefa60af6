"""Golden numbers of Qwen3.5: logits in float64 and greedy continuations of transformers for five small configs.

Run by hand in an environment with torch and transformers 5.24: python plugins/covey_families/tests/make_golden.py. The
weights are those of `weights_of`, from the names and shapes that transformers has.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("golden")
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CONFIGS: list[dict[str, Any]] = [
    ATTENTION | {"heads": (2, 4, 8, 8), "num_hidden_layers": 4, "tie_word_embeddings": True},
    ATTENTION | {"heads": (3, 3, 8, 12), "num_hidden_layers": 5, "num_key_value_heads": 1},
    ATTENTION
    | {"heads": (1, 4, 16, 8), "num_hidden_layers": 3, "linear_conv_kernel_dim": 3}
    | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}},
    ATTENTION
    | {"heads": (2, 2, 8, 8), "num_hidden_layers": 3, "linear_conv_kernel_dim": 2, "rms_norm_eps": 1e-5}
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ATTENTION
    | {"heads": (2, 8, 4, 8), "num_hidden_layers": 4, "head_dim": 24}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1, 1, 1]}},
]


def weights_of(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return the weights of a model by their names in the checkpoint, always the same."""
    random = np.random.RandomState(0)
    out = {}
    for name, shape in sorted(shapes.items()):
        draw = random.standard_normal(shape)
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        start = {"linear_attn.norm.weight": 1.0, "linear_attn.A_log": -1.0}
        out[name] = (next((x for end, x in start.items() if name.endswith(end)), 0.0) + draw * scale).astype(np.float32)
    return out


def in_float64() -> Any:
    """Return the module of the model with float64 in place of each float32 in its text: it casts in between, whatever
    the type of the weights.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    text = Path(module.__file__).read_text().replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    exact = ModuleType(f"{module.__package__}.exact")
    sys.modules[exact.__name__] = exact
    exact.__package__, exact.__file__ = module.__package__, module.__file__
    exec(text.replace("dtype=torch.float)", "dtype=torch.float64)"), exact.__dict__)
    return exact


def main() -> None:
    """Write the files, and print how far the results of transformers in float32 are from those in float64."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    def logits(model: Any, start: int = 0) -> np.ndarray:
        length, rope = 24 if start else 80, config.rope_parameters
        padded = torch.tensor([[0] * start + [1] * (length - start)])
        ids = (padded.cumsum(-1) - 1).clamp(min=0)
        if model.dtype == torch.float64:
            width = int(config.head_dim * rope["partial_rotary_factor"])
            at = torch.arange(0, width, 2, dtype=torch.float64) / width
            model.model.rotary_emb.inv_freq = rope["rope_theta"] ** -at
        with torch.no_grad():
            out = model(tokens[:, :length], attention_mask=padded if start else None, position_ids=ids).logits
        return out[0, start:].numpy()

    described, arrays, exact_module = [], {}, in_float64()
    for number, fields in enumerate(CONFIGS):
        keys, values, key_dim, value_dim = fields.pop("heads")
        sizes = {"linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": key_dim}
        config = Qwen3_5TextConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, max_position_embeddings=512,
            linear_value_head_dim=value_dim, **sizes, **fields,
        )  # fmt: skip
        models = [Qwen3_5ForCausalLM(config).eval().float(), exact_module.Qwen3_5ForCausalLM(config).eval().double()]
        shapes = {name: list(p.shape) for name, p in models[0].named_parameters()}
        for model in models:
            weights = {name: torch.tensor(x).to(model.dtype) for name, x in weights_of(shapes).items()}
            model.load_state_dict(weights, strict=False)
        tokens = torch.tensor(np.random.RandomState(1).randint(0, 61, (1, 80)))
        for name, start in (("logits", 0), ("padded", 9)):
            rounded, exact = (logits(model, start) for model in models)
            arrays[f"{number}/{name}"] = exact.astype(np.float32)
            difference = np.abs(rounded - exact)
            root = np.sqrt(np.square(difference).mean())
            print(
                f"{number}, {name}: float32 is {difference.max():.1e} away at most, {root:.1e} in the root mean square"
            )
        greedy = models[0].generate(tokens[:, :20], max_new_tokens=20, do_sample=False, eos_token_id=None)
        arrays[f"{number}/greedy"] = greedy[0, 20:].numpy()
        described.append({"config": json.loads(config.to_json_string(use_diff=False)), "shapes": shapes})
    FILE.with_suffix(".json").write_text(json.dumps(described) + "\n")
    np.savez_compressed(FILE.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    main()
