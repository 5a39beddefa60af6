"""`python -m benchmarks.ragged FOLDER [--steps N]`: measure what real questions of all lengths cost in padding and
programs.

Trains a random model of the size `tiny` on the questions of GSM8K (FOLDER has train.jsonl and test.jsonl), 8 × 8
completions a step, which stop anywhere: 85 tokens in the mean, at most 256. A word is a token. Told are the shares of
row positions and of decode steps without a token, the programs that each phase took, and which steps took new ones.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, spread_of
from benchmarks.peers.checkpoint import write
from benchmarks.peers.work import SHAPES

ROOT = Path(__file__).parents[1]
MEAN, MOST = 90, 256
"""Mean number of tokens of a completion before it is cut, and the number at which it is cut."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SETTINGS = {
    "model.lora.rank": 16, "rollout.top-k": 0, "rollout.temperature": 1.0, "rollout.max-prompt-length": 1024,
    "rollout.max-new-tokens": MOST, "grpo.num-generations": 8, "training.prompts-per-step": 8, "evaluation.prompts": 8,
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Train, and print the results as a table and as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ragged", description=__doc__)
    parser.add_argument("data", type=Path, metavar="FOLDER", help="GSM8K: train.jsonl and test.jsonl")
    parser.add_argument("--steps", type=int, default=30, metavar="N")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="ragged-") as held:
        model, run = Path(held) / "model", Path(held) / "run"
        write(model, SHAPES["tiny"], 1 / MEAN, unknown="w2")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        code = subprocess.call(_command(asked.data.resolve(), model, run, asked.steps), cwd=ROOT, stdout=sys.stderr)
        if code == 0:
            tell(_found(run), asked.steps)
    return code


def _command(data: Path, model: Path, run: Path, steps: int) -> list[str]:
    settings = SETTINGS | {"data.path": data, "model.source": model, "training.max-steps": steps}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "covey", "train", "gsm8k-smollm2", "--out", str(run), *words]


def _found(run: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shares = {name: [row[f"waste/{name}"] for row in rows] for name in ("rows", "rollout")}
    compiling = [row["step"] for row in rows if row["time/compile"]]
    return {
        "waste": {name: {"mean": float(np.mean(found)), **spread_of(found)} for name, found in shares.items()},
        "lengths": spread_of([row["completions/mean_length"] for row in rows]),
        "steps_that_compiled": compiling,
        "programs": json.loads((run / "summary.json").read_text())["programs"],
    }


def tell(found: dict[str, Any], steps: int) -> None:
    """Print the table, and last the line of JSON."""
    for name, share in found["waste"].items():
        print(f"waste in {name}: {share['mean']:.1%} in the mean, {share['low']:.1%} to {share['high']:.1%}")
    print(f"programs in {steps} steps: {', '.join(f'{phase} {n}' for phase, n in found['programs'].items())}")
    print(f"steps that took new ones: {found['steps_that_compiled']}")
    print(json.dumps({"part": "ragged", "steps": steps, **found, "machine": machine()}))


if __name__ == "__main__":
    sys.exit(main())
