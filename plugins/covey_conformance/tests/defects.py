"""Defects of trainers, planted in `examples/conformance/plain_loop.py` by a change of its text."""

from pathlib import Path
from typing import NamedTuple

PLAIN = Path(__file__).parents[3] / "examples" / "conformance" / "plain_loop.py"


class Defect(NamedTuple):
    """A defect: the check that is meant for it, the checks that find it too, and what is replaced by what."""

    meant: str
    others: set[str]
    changes: dict[str, str]

    def plant(self) -> str:
        """Return the text of the loop with the defect."""
        text = PLAIN.read_text("utf-8")
        for old, new in self.changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


GRADIENTS = {f"gradient/{name}" for name in ("grpo", "grpo-k1", "grpo-k2", "grpo-k3", "dapo", "gspo", "empty")}
OF_STEP = GRADIENTS | {"sampler/first-ratio", "sampler/stored-ratio", "optimizer/adamw", "optimizer/clip"}
MASKS = {f"mask/{name}" for name in ("prompt", "padding", "stop", "tool", "cut", "cut-left-out")}
MERGE = "weights = {name: np.ascontiguousarray(w) for name, w in trainer.weights().items()}"
DEFECTS = {
    "mean of means": Defect(
        "invariance/accumulation",
        set(),
        {
            "masks[at : at + size], weight[at : at + size], self.s)": "masks[at : at + size], np.full(size, size / "
            'len(rows) / counts[at : at + size].sum()) if self.s["algorithm"] == "dapo" else weight[at : at + size], '
            "self.s)"
        },
    ),
    "off-by-one label": Defect(
        "gradient/grpo", OF_STEP | MASKS | {"gradient/dr_grpo"}, {'"labels": ids[:, 1:]}': '"labels": ids[:, :-1]}'}
    ),
    "padding in the mean": Defect(
        "gradient/grpo",
        OF_STEP | MASKS,
        {"counts = np.array([mask.sum() for mask in masks])": "counts = np.full(len(masks), max(map(len, masks)))"},
    ),
    "prompt in the loss": Defect(
        "mask/prompt",
        OF_STEP | MASKS | {"gradient/dr_grpo"},
        {
            '        batch["mask"][n, at], batch["weight"][n, at] = masks[n], masks[n] * weight[n]\n': "        batch["
            '"mask"][n, at], batch["weight"][n, at] = masks[n], masks[n] * weight[n]\n'
            '        batch["mask"][n, : at.start], batch["weight"][n, : at.start] = 1, weight[n]\n'
        },
    ),
    "std with ddof 0": Defect("advantage/z-score", {"advantage/weights", "advantage/none"}, {"ddof=1": "ddof=0"}),
    "no stop token": Defect(
        "mask/stop",
        OF_STEP | MASKS | {"gradient/dr_grpo"},
        {
            'return np.array(row.get("mask", np.ones(len(row["completion"]))))': 'return (np.array(row["completion"]) '
            '!= 2) * np.array(row.get("mask", np.ones(len(row["completion"]))))'
        },
    ),
    "KL sign": Defect(
        "gradient/grpo-k3",
        {"gradient/grpo-k1"},
        {'d = (batch["ref_logps"] - logps)': 'd = (logps - batch["ref_logps"])'},
    ),
    "clip per tensor": Defect(
        "optimizer/clip",
        set(),
        {
            "g, w = g * factor,": 'g, w = g * (min(1, s["max_grad_norm"] / np.linalg.norm(g)) if s["max_grad_norm"] '
            "else 1),"
        },
    ),
    "ratio from re-tokenised text": Defect(
        "sampler/tokens",
        {"sampler/fresh"},
        {
            '"completion": completion, "logps"': '"completion": trainer.tokenizer.encode(trainer.tokenizer.decode('
            'completion, skip_special_tokens=False)).ids, "logps"'
        },
    ),
    "adapter scale": Defect(
        "resume/merge",
        set(),
        {
            MERGE: 'settings = trainer.s | {"lora_alpha": trainer.s["lora_rank"]}\n    other = type("Other", (), {"s": '
            'settings, "base": trainer.base, "params": trainer.params})\n'
            "    weights = {name: np.ascontiguousarray(w) for name, w in Trainer."
            "weights(other).items()}"
        },
    ),
    "temperature left out": Defect(
        "sampler/first-ratio",
        {"sampler/logps", "sampler/mean-ratio", "sampler/stored-ratio"},
        {
            'batch["ids"], self.s["temperature"])': 'batch["ids"], 1.0)',
            'batch, self.s["temperature"], slope)': "batch, 1.0, slope)",
            'ids, trainer.s["temperature"])': "ids, 1.0)",
        },
    ),
    "sampler's weights stale": Defect("sampler/fresh", set(), {"        self.sampler = self.weights()\n": ""}),
}
"""Defects by name."""
