"""Record the results of the package, so that a refactoring can show that it changed nothing.

    python tools/record.py before.json
    ...change the code...
    python tools/record.py after.json
    python tools/record.py --compare before.json after.json

A recording is a JSON file of SHA-256 digests and of public names, in these sections:

programs: the lowered text of every program of six recipes, for a CPU and for a TPU that is not there.
runs: short runs of the command, each left alone, and killed by SIGKILL behind a step and resumed: the weights that
    `covey export` writes, every row of metrics but for clocks, every completion, the evaluations.
noise: random keys and numbers of some completions.
names: the public names of `covey`, and the JSON schema of recipes.

Runs go through the command alone, so that their cases survive a change of everything behind it. What a recording asks
the package for by other means stands in `lowered` and `noise`. Digests of runs hold for one kind of processor and one
version of JAX. `--only runs/ppo` records what begins with that; `--folder` keeps the run folders.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
STEPS, KILLED_BEHIND = 6, 3
CLOCKS = ("time/", "step_time", "tokens_per_second", "env/seconds", "waste/rollout", "waste/slots")
"""Metrics that depend on the clock, by the beginnings of their names."""
SECONDS = 300
"""Limit for one process."""
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiler flags that save most of the time to compile."""


@dataclass(frozen=True)
class Case:
    """A run: its verb, recipe and settings, and the number of processes."""

    verb: str
    recipe: str
    settings: tuple[str, ...] = ()
    processes: int = 1

    def words(self, out: Path) -> list[str]:
        """Return the words behind `covey` of this run in the folder `out`."""
        launch = ["launch", "local", "-n", str(self.processes)] if self.processes > 1 else []
        return [*launch, self.verb, self.recipe, *(f"--{setting}" for setting in self.settings), "--out", str(out)]


COMMON = (
    f"training.max_steps={STEPS}",
    "training.checkpoint_every_n_steps=2",
    "training.max_to_keep=3",
    "training.eval_every_n_steps=3",
    "evaluation.prompts=3",
)
SUMS = (
    *COMMON,
    "model.source=scratch:arithmetic-tiny@0",
    "rewards=benchmarks.layouts:digits",
    "training.row_length=64",
    "training.max_tokens_per_micro_batch=256",
    "training.prompts_per_step=6",
    "grpo.num_generations=4",
    "rollout.slots=8",
    "rollout.temperature=1",
    "rollout.max_new_tokens=6",
    "evaluation.temperature=1",
)
GAME = (*COMMON, "model.source=scratch:guess-tiny@0", "training.prompts_per_step=6", "grpo.num_generations=4")
SUPERVISED = (*COMMON, "training.batch_size=16", "evaluation.answers=4", "training.row_length=64")
RUNS = {
    "grpo": Case("train", "arithmetic-tiny", SUMS),
    "grpo-ahead": Case("train", "arithmetic-tiny", (*SUMS, "training.off_policy_steps=2")),
    "grpo-processes": Case("train", "arithmetic-tiny", (*SUMS, "model.mesh.fsdp=2"), 2),
    "grpo-lora": Case("train", "arithmetic-tiny", (*SUMS, "model.lora.rank=4")),
    "grpo-updates": Case("train", "arithmetic-tiny", (*SUMS, "grpo.num_iterations=2", "grpo.beta=0.1")),
    "ppo": Case("train", "arithmetic-tiny", (*SUMS, "grpo.algorithm=ppo")),
    "game": Case("train", "guess-tiny", GAME),
    "sft": Case("sft", "sft-tiny", SUPERVISED),
}
PLANNED = {
    "arithmetic-tiny": ("model.source=scratch:arithmetic-tiny",),
    "quickstart": ("model.source=scratch:arithmetic-tiny",),
    "gsm8k-gemma2": ("model.source=scratch:arithmetic-tiny", "model.mesh.fsdp=2", "model.mesh.tp=2"),
    "guess-tiny": ("model.source=scratch:guess-tiny",),
    "sft-tiny": (),
    "gsm8k-nanochat": ("model.source=scratch:arithmetic-tiny", "rollout.tool_markers=['+', '=', '0', '1']"),
}
"""Recipes whose programs are lowered, and the settings that spare their weights."""


# --- digests


def digest(data: bytes | str) -> str:
    """Return the SHA-256 of the data, in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def normalised(text: str) -> str:
    """Return the text of a lowered program with its symbols numbered in the order in which they occur, and without the
    names of results: the names of Python functions are no part of what a program computes.
    """
    text = re.sub(r'jax\.result_info = "[^"]*"', 'jax.result_info = ""', text)
    numbers: dict[str, str] = {}
    return re.sub(r"@[\w.$-]+", lambda symbol: numbers.setdefault(symbol.group(), f"@f{len(numbers)}"), text)


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON Lines without the metrics that depend on the clock."""
    for line in file.read_text().splitlines():
        yield {key: value for key, value in json.loads(line).items() if not key.startswith(CLOCKS)}


def run_digests(folder: Path, weights: Path) -> dict[str, str]:
    """Return the digests of a run.

    Args:
        folder: the run folder.
        weights: safetensors files that `covey export` wrote.
    """
    names = [name for name in ("metrics", "samples", "before", "after") if (folder / f"{name}.jsonl").exists()]
    digests = {name: digest("\n".join(json.dumps(row) for row in rows(folder / f"{name}.jsonl"))) for name in names}
    return digests | {"weights": digest(b"".join(file.read_bytes() for file in sorted(weights.glob("*.safetensors"))))}


# --- runs


def record_run(case: Case, folder: Path) -> dict[str, dict[str, str]]:
    """Return the digests of a run that was left alone, and of one that was killed and resumed."""
    straight, killed = folder / "straight", folder / "killed"
    covey(case.words(straight))
    kill_behind(case.words(killed), killed / "metrics.jsonl", KILLED_BEHIND)
    launch = ["launch", "local", "-n", str(case.processes)] if case.processes > 1 else []
    covey([*launch, case.verb, "--resume", str(killed)])
    return {run.name: run_digests(run, exported(run)) for run in (straight, killed)}


def exported(run: Path) -> Path:
    """Export the weights of a run and return their folder."""
    out = run.with_name(f"{run.name}-weights")
    covey(["export", str(run), "--out", str(out)])
    return out


def covey(words: Sequence[str]) -> None:
    """Run `covey` with these words to its end.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(command(words), capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"covey {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def kill_behind(words: Sequence[str], metrics: Path, step: int) -> None:
    """Start `covey` with these words and kill it and its processes by SIGKILL when `step` steps are in `metrics`."""
    with subprocess.Popen(
        command(words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT
    ) as process:
        while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            time.sleep(0.01)
        if process.poll() is not None:
            raise SystemExit(f"covey {' '.join(words)} ended before step {step}")
        os.killpg(process.pid, signal.SIGKILL)


def command(words: Sequence[str]) -> list[str]:
    """Return the command line of `covey` with these words, by this interpreter."""
    return [sys.executable, "-m", "covey", *words]


# --- what is asked of the package itself


def lowered(recipe: str, settings: Sequence[str], platform: str) -> dict[str, str]:
    """Return the digest of each program of a recipe in its largest shapes, lowered for `cpu` or `tpu`.

    The devices are those of this process: programs for a TPU are built as for a mesh of TPUs, and only lowered.
    """
    import jax

    from covey.config.recipe import Recipe, load_any
    from covey.parallel import make_mesh
    from covey_plan import plan

    ready = load_any(recipe, settings)
    sizes = ready.model.mesh
    place = make_mesh((sizes.fsdp, sizes.tp)) if sizes.fsdp * sizes.tp > 1 else jax.devices()[0]
    build = plan.policy_programs if isinstance(ready, Recipe) else plan.supervised_programs
    with (
        patch("covey.parallel.arrays.platform_of", lambda _: platform),
        patch.object(plan, "platform_of", lambda _: platform),
    ):
        built = build(ready, place, total_steps=100).largest()
        return {program.name: digest(normalised(program.lower(platform).as_text())) for program in built}


def noise() -> dict[str, str]:
    """Return digests of the keys of some completions, of their tokens' keys, and of the numbers of a draw."""
    import numpy as np

    from covey.sampling.logits import exponential_noise, sample_keys, token_keys

    where = np.array([(step, prompt, sample) for step in (0, 1, 77) for prompt in range(9) for sample in range(4)])
    keys = sample_keys(3, where.astype(np.uint32))
    tokens = np.stack([token_keys(keys, np.full(len(keys), index)) for index in range(16)])
    numbers = np.concatenate(exponential_noise(tokens[0], 128, 128), axis=1)
    return {"keys": digest(keys.tobytes()), "tokens": digest(tokens.tobytes()), "numbers": digest(numbers.tobytes())}


def names() -> dict[str, Any]:
    """Return the public names of `covey` and the digest of the schema of recipes."""
    import covey as package

    return {"all": sorted(package.__all__), "schema": digest((ROOT / "docs" / "recipe.schema.json").read_bytes())}


# --- the command


def record(only: str, folder: Path) -> dict[str, Any]:
    """Return the recording of everything whose path in it begins with `only`, and tell what is being recorded."""
    tasks: dict[str, Callable[[], Any]] = {
        f"programs/{recipe}/{platform}": partial(lowered, recipe, settings, platform)
        for recipe, settings in PLANNED.items()
        for platform in ("cpu", "tpu")
    }
    tasks |= {f"runs/{name}": partial(record_run, case, folder / name) for name, case in RUNS.items()}
    tasks |= {"noise": noise, "names": names}
    recording: dict[str, Any] = {}
    for path, task in tasks.items():
        if path.startswith(only):
            began = time.monotonic()
            recording |= flatten(task(), path)
            print(f"{path}: {time.monotonic() - began:.0f} s", flush=True)
    return recording


def flatten(value: Any, path: str) -> dict[str, Any]:
    """Return the leaves of nested mappings by their paths."""
    if not isinstance(value, Mapping):
        return {path: value}
    return {key: leaf for name, inner in value.items() for key, leaf in flatten(inner, f"{path}/{name}").items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each entry that differs or that one recording lacks, and for each run that a kill changed."""
    for path in sorted(before.keys() | after.keys()):
        if path not in after or path not in before:
            yield f"{path}: only {'before' if path in before else 'after'}"
        elif before[path] != after[path]:
            yield f"{path}: differs"
    for path in sorted(after):
        if "/killed/" in path and after[path] != after.get(path.replace("/killed/", "/straight/")):
            yield f"{path}: differs from the run that was left alone"


def main(words: Sequence[str] | None = None) -> int:
    """Record or compare as `words` (the command line by default) ask for; 1 when recordings differ."""
    asked = _parser().parse_args(words)
    if asked.compare:
        before, after = (json.loads(Path(file).read_text()) for file in asked.compare)
        lines = list(differences(before, after))
        print("\n".join(lines or [f"equal: {len(after)} entries"]))
        return int(bool(lines))
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=4"}
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # kernels for TPUs would hold paths and lines
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.absolute() / "compiled"))
        recording = record(asked.only, folder.absolute())
    Path(asked.out).write_text(json.dumps(recording, indent=1) + "\n")
    lines = list(differences(recording, recording))
    print("\n".join([*lines, f"{asked.out}: {len(recording)} entries"]))
    return int(bool(lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="recording.json", help="file to write")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare two recordings instead")
    parser.add_argument("--only", default="", metavar="PREFIX", help="record what begins with that")
    parser.add_argument("--folder", type=Path, help="keep the run folders here")
    return parser


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
