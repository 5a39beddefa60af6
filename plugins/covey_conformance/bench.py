"""The bench: what every trainer gets (the tiny model, the rows of a step, the settings), and what should come out."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from covey_conformance.oracle import Model, Row, step_gradient
from covey_conformance.tiny_model import STOP, Weights, write_tiny_model

SETTINGS: Mapping[str, Any] = {
    "algorithm": "grpo", "epsilon": 0.2, "epsilon_high": 0.2, "beta": 0.0, "kl": "k3", "advantage": "group_zscore",
    "reward_weights": None, "mask_truncated": False, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": 0,
    "samples": 4, "prompts": 2, "micro_batch": 8, "turn_tokens": 12, "iterations": 1,
    "packing": False, "pad_prompt": 0, "pad_completion": 0, "devices": 1, "processes": 1,
    "learning_rate": 0.01, "warmup_steps": 0, "total_steps": 8, "b1": 0.9, "b2": 0.99, "eps": 0.01, "weight_decay": 0.0,
    "max_grad_norm": 0.0, "dtype": "float32", "lora_rank": 0, "lora_alpha": 0.0, "as_released": False,
}  # fmt: skip
"""Settings with which a trainer is loaded where a check sets no others; docs/conformance-adapter.md explains each."""
LENGTHS = ((3, (5, 3, 2, 12)), (5, (1, 7, 4, 9)))
"""Tokens of each prompt, and of its completions, one of which is cut off at 12."""
ADVANTAGES = (0.9, -1.2, 0.6, 1.1, -0.7, 1.3, -0.4, 0.8)


class Bench:
    """A folder with the tiny model, and the rows of one step.

    Args:
        folder: a new folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = folder / "model"
        self.weights = write_tiny_model(self.model)
        self._scratch = 0

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of a step, with log-probs of the policy that sampled them and of the reference."""
        rng = np.random.default_rng(2)
        rows: list[dict[str, Any]] = []
        old, ref = (Model(self.beside(seed)) for seed in (3, 4))
        for group, (prompt_length, lengths) in enumerate(LENGTHS):
            prompt = rng.integers(5, 50, prompt_length).tolist()
            for length in lengths:
                finished = length < SETTINGS["max_tokens"]
                completion = rng.integers(5, 50, length).tolist()
                completion[-1:] = [STOP] if finished and length else completion[-1:]
                row = {"prompt": prompt, "completion": completion, "group": group, "finished": finished}
                row |= {"advantage": ADVANTAGES[len(rows)]}
                row |= {
                    name: m.logps(row)[0].astype(np.float32) for name, m in (("old_logps", old), ("ref_logps", ref))
                }
                rows.append(row)
        return rows

    def beside(self, seed: int) -> Weights:
        """Return the weights of another policy: each matrix has noise of 0.3 of its standard deviation."""
        rng = np.random.default_rng(seed)
        return {n: w + 0.3 * w.std() * rng.normal(size=w.shape) for n, w in self.weights.items()}

    def gradient(
        self, rows: Sequence[Row], *, only: Sequence[Sequence[float]] | None = None, **settings: Any
    ) -> Weights:
        """Compute the oracle's gradient of a step on the tiny model; `only` as in `step_gradient`."""
        return step_gradient(self.weights, rows, {**SETTINGS, **settings}, only)

    def new_folder(self) -> Path:
        """Return the path of a folder that does not exist yet."""
        self._scratch += 1
        return self.folder / f"scratch-{self._scratch}"


def distance(got: Weights, want: Weights) -> float:
    """Compute the largest difference of any two entries, as a fraction of the largest entry wanted."""
    largest = max(float(np.abs(w).max()) for w in want.values())
    return max(float(np.abs(got[name] - w).max()) for name, w in want.items()) / largest
