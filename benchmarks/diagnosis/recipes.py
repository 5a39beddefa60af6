"""Recipes of the runs, the models that they start from, and the data that they read."""

import json
import random
from pathlib import Path

from covey.config import recipe
from covey.config.recipe import Recipe, SFTRecipe

DIGITS = "123456789"
REVERSE = """
name: reverse
model: {source: FOLDER/base, remat: false}
data: {task: jsonl, path: FOLDER/train.jsonl, test_path: FOLDER/test.jsonl}
rewards: [arithmetic_answer]
rollout: {max_prompt_length: 6, max_new_tokens: 8, temperature: 1.0, slots: 128, decode_chunk: 4}
grpo: {num_generations: 8, beta: 0.0}
training:
  max_steps: 24
  prompts_per_step: 16
  actor_optimizer: {learning_rate: 1.0e-3, warmup_ratio: 0.1, schedule: constant}
  row_length: 128
  max_tokens_per_micro_batch: 2048
  eval_every_n_steps: 12
evaluation: {prompts: 100, accuracy: arithmetic_answer, format: number_only, temperature: 0}
"""
REVERSE_SFT = """
name: reverse-sft
method: sft
model: {source: "scratch:reverse", remat: false}
data: {task: jsonl, path: FOLDER/train.jsonl, test_path: FOLDER/test.jsonl}
training:
  max_steps: 60
  batch_size: 64
  optimizer: {learning_rate: 3.0e-3, warmup_ratio: 0.1, schedule: constant}
  row_length: 128
  max_tokens_per_micro_batch: 1024
  eval_every_n_steps: 10
rollout: {max_prompt_length: 6, max_new_tokens: 8, slots: 128, decode_chunk: 4}
evaluation: {prompts: 100, answers: 100, accuracy: arithmetic_answer, format: number_only, temperature: 0}
"""
SHORTER = {
    "arithmetic-tiny": (
        "model.source=FOLDER/sums", "training.max_steps=16", "training.prompts_per_step=24",
        "training.eval_every_n_steps=4", "evaluation.prompts=100",
    ),
    "guess-tiny": (
        "model.source=FOLDER/guess", "training.max_steps=16", "training.prompts_per_step=16",
        "training.eval_every_n_steps=8", "evaluation.prompts=64",
    ),
    "quickstart": (
        "training.max_steps=6", "training.prompts_per_step=4", "training.checkpoint_every_n_steps=0",
        "evaluation.prompts=8", "rollout.max_new_tokens=24", "rollout.slots=32",
    ),
}  # fmt: skip
"""Settings of the built-in recipes that make their runs shorter."""
BASES = {
    "base": "reverse-sft training.max_steps=56",
    "weak": "reverse-sft training.max_steps=30",
    "sums": "sft-tiny training.max_steps=60",
    "guess": "sft-guess training.max_steps=250",
}
"""Supervised runs that the others start from, by the name of their folder."""
ABBREVIATIONS = {
    "LR": "training.actor_optimizer.learning_rate",
    "SFT_LR": "training.optimizer.learning_rate",
    "STEPS": "training.max_steps",
    "RANK": "model.lora.rank",
    "OWN:": "benchmarks.diagnosis.rewards:",
}


def recipe_of(words: str, folder: Path, seed: int) -> Recipe | SFTRecipe:
    """Return the recipe of a run: its name and its settings, with spaces between."""
    name, *settings = words.split()
    expanded = [_expand(setting, folder) for setting in (*SHORTER.get(name, ()), *settings, f"seed={seed}")]
    if name == "reverse":
        return recipe.parse(_expand(REVERSE, folder), expanded, name)
    if name == "reverse-sft":
        return recipe.parse(_expand(REVERSE_SFT, folder), expanded, name, SFTRecipe)
    return recipe.load_any(name, expanded)


def _expand(text: str, folder: Path) -> str:
    """Return `text` with the names of settings and paths in full."""
    name, equals, value = text.partition("=")
    text = f"{ABBREVIATIONS.get(name, name)}{equals}{value}"
    return text.replace("OWN:", ABBREVIATIONS["OWN:"]).replace("FOLDER", str(folder))


def make_data(folder: Path) -> None:
    """Write strings of three digits and their reversal, and data that are wrong on purpose."""
    every = [a + b + c for a in DIGITS for b in DIGITS for c in DIGITS]
    longer = [text + "9" for text in every[:200]]
    random.Random(0).shuffle(every)
    train, test = every[:600], every[600:]
    shuffled = random.Random(1).sample(train, len(train))
    rows = {
        "train": _rows(train),
        "test": _rows(test),
        "few": _rows(train[:24]),
        "repeated": _rows(train[:24] * 25),
        "one": _rows(train[:1] * 200),
        "longer": _rows(longer),
        "wrong": _rows(train, shuffled),
        "sums-one": _sums([(17, 25)] * 200),
        "sums-train": _sums([(a, b) for a in range(10, 50) for b in range(10, 50) if (a + b) % 5]),
        "sums-test": _sums([(a, b) for a in range(10, 50) for b in range(10, 50) if not (a + b) % 5]),
        "products": [_row(f"{a}×{b}=", str(a * b)) for a in range(10, 50) for b in range(2, 10) if a * b < 100],
    }
    for name, of_file in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in of_file)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _rows(texts: list[str], answers: list[str] | None = None) -> list[dict[str, str]]:
    """Return rows to reverse `texts`; those that get the answers to other texts are wrong."""
    return [_row(f"{text}=", answer[::-1]) for text, answer in zip(texts, answers or texts, strict=True)]


def _sums(pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    return [_row(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def _row(prompt: str, answer: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": answer, "answer": answer}
