"""`python -m benchmarks.published [NAME ...]`: plans of the shapes of published runs, beside what was published.

The runs are those of `published.toml`; each is planned by `covey plan` in a process of its own, from a folder that
holds the model's config and no weights. For TPUs libtpu must be installed, for GPUs JAX's plugin for CUDA (see
docs/performance.md); a run whose compiler is missing is told and left out. A large model takes minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from covey.models import families

ROOT = Path(__file__).parents[1]
RUNS = Path(__file__).with_name("published.toml")
TOKENIZER = ROOT / "tests" / "parity" / "golden" / "tiny-llama"
LLAMA_3_1 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
COMMON = {"model.dtype": "bfloat16", "model.compute-dtype": "bfloat16"}


def main(words: Sequence[str] | None = None) -> int:
    """Plan the runs that `words` name, or all, and print a table; a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    document = tomllib.loads(RUNS.read_text())
    names = [run["name"] for run in document["runs"]]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    selected = parser.parse_args(words).names
    if wrong := set(selected) - set(names):
        parser.error(f"there is no run {', '.join(sorted(wrong))}")
    print("| published | predicted | published | ratio | roofline |\n|---|---|---|---|---|")
    for run in (run for run in document["runs"] if not selected or run["name"] in selected):
        for line in _lines(run, document["models"][run["model"]]):
            print(line, flush=True)
    return 0


def _lines(run: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of the table for a run: its seconds, and its memory."""
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        write_model(Path(folder), config)
        done = subprocess.run(command(run, folder), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{run['name']}: {done.stderr.strip()[-600:]}", file=sys.stderr)
        return
    plan = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"part": "published", "name": run["name"], **plan}), file=sys.stderr)
    step = plan["step_seconds"]
    for predicted, published, unit, least in (
        (step["expected"], run.get("seconds"), "s", f"{step['roofline']:.3g} s"),
        (plan["memory"]["peak"] / 1e9, run.get("gigabytes"), "GB", ""),
    ):
        if published:
            yield (
                f"| [{run['of']}, {run['on']}]({run['url']}) | {predicted:.3g} {unit} | {published:g} {unit} "
                f"| {predicted / published:.2f} | {least} |"
            )


def command(run: Mapping[str, Any], folder: str) -> list[str]:
    """Return the command that plans a run with the model in `folder`."""
    recipe, options, settings = _supervised(*run["rows"]) if "rows" in run else _sampled(*run["sampled"])
    words = [f"--{name}={value}" for name, value in (COMMON | settings | run["settings"]).items()]
    source = [f"--model.source={folder}", f"--on={run['on']}", "--json"]
    return [sys.executable, "-m", "covey", "plan", recipe, *source, *options, *words]


Case = tuple[str, list[str], dict[str, Any]]
"""Recipe, options of `covey plan`, and settings."""


def _supervised(length: int, rows: int, at_once: int) -> Case:
    """Return the case of a step of whole rows, each of one example."""
    settings = {
        "model.remat": "true", "training.batch-size": rows, "training.max-length": length + 1,
        "training.row-length": length, "training.max-tokens-per-micro-batch": length * at_once,
        "evaluation.answers": 0,
    }  # fmt: skip
    return "sft-tiny", ["--prompt-tokens=1", f"--completion-tokens={length}"], settings


def _sampled(prompts: int, samples: int, prompt: int, completion: int, most: int) -> Case:
    """Return the case of a step of GRPO, with the mean and the greatest length of a completion."""
    settings = {
        "training.prompts-per-step": prompts, "grpo.num-generations": samples, "rollout.max-prompt-length": prompt,
        "rollout.max-new-tokens": most,
    }  # fmt: skip
    return "quickstart", [f"--prompt-tokens={prompt}", f"--completion-tokens={completion}"], settings


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model's config, a small tokenizer, and the names of its tensors, which have no numbers."""
    llama = {"rope_scaling": LLAMA_3_1} if config["vocab_size"] == 128256 else {}
    whole = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, **llama, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    names = families.tensor_names(families.read_config(whole, str(folder)))
    save_file({name: np.zeros(0, np.float32) for name in names.values()}, folder / "model.safetensors")


if __name__ == "__main__":
    sys.exit(main())
