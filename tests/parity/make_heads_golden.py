"""Makes the golden numbers of classification heads: what transformers' *ForSequenceClassification says of an answer.

Run in an environment with the extra `[parity]`, beside `make_golden.py`, whose weights it uses:

    python tests/parity/make_heads_golden.py

Writes into `golden/` beside this file:

    heads.json   config.json and tensor shapes as transformers saves them, of one tiny model a family; the weights are
                 drawn again from their names (`make_golden.weight`), by this script and by the tests
    heads.npz    prompts with their completions, token by token, and the score of each completion behind its prompt,
                 taken one at a time, without padding
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from make_golden import FAMILIES, GOLDEN, SMALL, dump, weight
from transformers import AutoConfig, AutoModelForSequenceClassification

NAMES = ("llama", "linear-rope", "qwen2", "qwen3", "gemma2", "gemma3_text")
PROMPTS = (7, 1, 12)
COMPLETIONS = ((5, 1, 9, 3), (2, 17), (30, 4, 11))
"""Lengths, in tokens: several completions a prompt, one of a single token."""


def sequences() -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Random tokens of those lengths."""
    random = np.random.RandomState(3)
    draw = lambda n: random.randint(0, SMALL["vocab_size"], n).astype(np.int32)  # noqa: E731
    return [draw(n) for n in PROMPTS], [[draw(n) for n in lengths] for lengths in COMPLETIONS]


def scored(name: str) -> tuple[dict[str, Any], np.ndarray]:
    """A model's description and its scores."""
    fields = SMALL | FAMILIES[name]
    config = AutoConfig.for_model(
        fields["model_type"], num_labels=1, **{k: v for k, v in fields.items() if k != "model_type"}
    )
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    for key, value in model.state_dict().items():
        value.copy_(torch.from_numpy(weight(key, tuple(value.shape))))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
        tensors = safetensors.numpy.load_file(Path(folder) / "model.safetensors")
    assert all(np.array_equal(tensor, weight(key, tensor.shape)) for key, tensor in tensors.items())
    prompts, groups = sequences()
    pairs = [(p, c) for p, completions in zip(prompts, groups, strict=True) for c in completions]
    scores = [score(model, np.concatenate(pair)) for pair in pairs]
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    return {"config": saved, "shapes": shapes}, np.array(scores, np.float32)


def score(model: torch.nn.Module, tokens: np.ndarray) -> float:
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64)[None])).logits.item()


def main() -> None:
    described, arrays = {}, {}
    for name in NAMES:
        described[name], arrays[name] = scored(name)
    prompts, groups = sequences()
    for i, (prompt, completions) in enumerate(zip(prompts, groups, strict=True)):
        arrays[f"prompt{i}"] = prompt
        for j, completion in enumerate(completions):
            arrays[f"completion{i}.{j}"] = completion
    dump("heads.json", described)
    np.savez_compressed(GOLDEN / "heads.npz", **arrays)
    print({name: arrays[name].round(3).tolist() for name in NAMES})


if __name__ == "__main__":
    main()
