"""`python -m benchmarks.layouts`: compare runs of one process with four devices, two with two, and four with one.

Each of `CASES` trains two steps in each layout, with a checkpoint after each. Then each layout resumes step 1 of
another one. Told per case, in a table and in one line of JSON: whether all samples with their rewards are the same, and
the largest differences of the metrics and the weights from those of one process. All layouts run at once; the runs of a
layout share its processes: `python -m benchmarks.layouts work FOLDER LAYOUT`.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak import CLOCKS, last_arrays
from covey.config import recipe
from covey.monitor.run_files import CHECKPOINTS, METRICS, SAMPLES
from covey.monitor.writer import read_rows
from covey_hosts.local import Attempt, LocalOptions

LAYOUTS = {"1x4": (1, 4), "2x2": (2, 2), "4x1": (4, 1)}
"""Name → processes, and devices of each."""
MESHES = {"fsdp 4": {"fsdp": 4}, "fsdp 2 × tp 2": {"fsdp": 2, "tp": 2}, "data 2 × fsdp 2": {"data": 2, "fsdp": 2}}
STEPS = 2
TOLERANCE = 1e-5
OWN = (*CLOCKS, "waste/", "learning_rate")
"""Metrics that say how the work was done, not what came of it."""
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiler flags that save most of the time to compile."""


@dataclass(frozen=True)
class Case:
    """Case of the comparison: what is trained, and on which mesh; `rank` is that of the adapters, 0 for all weights."""

    algorithm: str
    rank: int
    mesh: str

    @property
    def weights(self) -> str:
        return "LoRA" if self.rank else "full"

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.weights} {self.mesh}".replace(" ", "-").replace("×", "by")

    def settings(self) -> list[str]:
        """Return the settings over the recipe `arithmetic-tiny`, or over `sft-tiny`."""
        optimizer = "optimizer" if self.algorithm == "SFT" else "actor_optimizer"
        return [
            *(f"model.mesh.{axis}={size}" for axis, size in MESHES[self.mesh].items()),
            f"model.lora.rank={self.rank}",
            *SETTINGS,
            f"training.{optimizer}.learning_rate=1e-3",
            f"training.{optimizer}.schedule=constant",
            f"training.{optimizer}.warmup_ratio=0",
            *OF_ALGORITHM[self.algorithm],
        ]


SETTINGS = (
    "model.source=scratch:arithmetic-tiny@0",
    f"training.max_steps={STEPS}",
    "training.checkpoint_every_n_steps=1",
    f"training.max_to_keep={STEPS}",
    "training.eval_every_n_steps=0",
    "training.row_length=64",
    "training.max_tokens_per_micro_batch=256",
    "rollout.slots=8",
    "rollout.temperature=1",
    "rollout.max_prompt_length=6",
    "evaluation.prompts=3",
)
OF_RL = (
    "rewards=benchmarks.layouts:digits",
    "rollout.max_new_tokens=6",
    "training.prompts_per_step=6",
    "grpo.num_generations=4",
    "grpo.max_sampling_rounds=1",
    "evaluation.temperature=1",
)
OF_ALGORITHM = {
    "GRPO": (*OF_RL, "grpo.beta=0.1"),
    "PPO": (*OF_RL, "grpo.algorithm=ppo"),
    "SFT": ("training.batch_size=16", "evaluation.answers=0"),
}
CASES = [
    Case("GRPO", 4, "fsdp 4"),
    Case("GRPO", 0, "fsdp 2 × tp 2"),
    Case("GRPO", 4, "data 2 × fsdp 2"),
    Case("PPO", 0, "fsdp 4"),
    Case("PPO", 4, "fsdp 2 × tp 2"),
    Case("PPO", 0, "data 2 × fsdp 2"),
    Case("SFT", 4, "fsdp 4"),
    Case("SFT", 0, "fsdp 2 × tp 2"),
    Case("SFT", 4, "data 2 × fsdp 2"),
]
"""A covering set: every two of algorithm, weights and mesh come together with each of their values."""


def digits(completions: Sequence[str]) -> list[float]:
    """Reward each completion by its even digits, and by a quarter for each different character."""
    return [sum(c in "02468" for c in text) + 0.25 * len(set(text)) for text in completions]


# What the processes do.


def work(folder: Path, layout: str, cases: Sequence[Case]) -> None:
    """Train each case, and resume the run of another layout at step 1 as `<other>-to-<layout>`."""
    from covey import recipes
    from covey.parallel import processes

    with processes.start():
        connect(cases)
        for case in cases:
            place = folder / case.name
            if case.algorithm == "SFT":
                recipes.train(recipe.load("sft-tiny", case.settings(), recipe.SFTRecipe), place / layout)
            else:
                recipes.train(recipe.load("arithmetic-tiny", case.settings()), place / layout)
            (place / f"{layout}.ended").touch()
            for one in (one for one, other in resumes(case) if other == layout):
                out = place / f"{one}-to-{layout}"
                copy_for_resuming(place, one, out)
                recipes.resume(out)


def connect(cases: Sequence[Case]) -> None:
    """Let the devices of all processes connect. Behind long compilations gloo would give up after 30 seconds when one
    process comes later than another, as on a machine that is busy with other work.
    """
    import jax
    from jax.sharding import PartitionSpec

    from covey.config.schema import MeshConfig
    from covey.parallel import mesh_from_config, processes

    processes.here().all_gather(None, "connect")
    for sizes in {case.mesh: MESHES[case.mesh] for case in cases}.values():
        mesh = mesh_from_config(MeshConfig(**sizes))
        assert mesh is not None
        for axes in [mesh.axis_names, *((axis,) for axis in mesh.axis_names)]:
            count = lambda axes=axes: jax.lax.psum(jax.lax.axis_index(axes), axes)  # noqa: E731
            processes.here().all_gather(None, "connect")
            jax.jit(jax.shard_map(count, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))().block_until_ready()


def resumes(case: Case) -> list[tuple[str, str]]:
    """Return whose checkpoint is resumed in which layout: round all of them, every other case the other way round."""
    names = list(LAYOUTS)
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    return pairs if CASES.index(case) % 2 == 0 else [(other, one) for one, other in pairs]


def copy_for_resuming(place: Path, layout: str, to: Path) -> None:
    """Wait until the run of another layout has ended; copy it as it was after step 1, in the first process."""
    from covey.parallel import processes

    if processes.here().is_first:
        while not (place / f"{layout}.ended").exists():
            time.sleep(0.5)
        shutil.copytree(place / layout, to)
        for step in range(2, STEPS + 1):
            shutil.rmtree(to / CHECKPOINTS / f"{step:08d}")
    processes.here().broadcast(None, "copy of a run")


# Starting them, and looking at what they did.


def train_all(folder: Path, cases: Sequence[Case]) -> None:
    """Run `work` in the processes of all layouts. Process 0 of each writes to the terminal, the others into `logs`.

    Raises:
        RuntimeError: a process has failed.
    """
    names = ",".join(str(CASES.index(case)) for case in cases)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        waiting = {}
        for layout, (processes, devices) in LAYOUTS.items():
            os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
            words = [sys.executable, "-m", "benchmarks.layouts", "work", str(folder), layout, "--only", names]
            logs = folder / "logs" / layout
            logs.mkdir(parents=True)
            attempt = stack.enter_context(Attempt(words, LocalOptions(processes=processes), logs, 0))
            waiting[pool.submit(attempt.wait)] = layout
        for done in as_completed(waiting):
            if (failure := done.result()) is not None:
                raise RuntimeError(f"layout {waiting[done]}: {failure}; see {folder / 'logs' / waiting[done]}")


def compared(folder: Path, case: Case) -> dict[str, Any]:
    """Return the `difference` of every run of the case from that of one process."""
    first = folder / case.name / next(iter(LAYOUTS))
    runs = sorted(path for path in first.parent.iterdir() if path.is_dir() and path != first)
    return {run.name: difference(first, run) for run in runs}


def difference(one: Path, other: Path) -> dict[str, Any]:
    """Return whether two runs have the same samples, and the largest differences of losses, metrics and weights."""
    return {
        "samples": samples_of(one) == samples_of(other),
        "loss": largest(metric_differences(one, other, "loss")),
        "metrics": largest(metric_differences(one, other, "")),
        "weights": weight_difference(one, other),
    }


def samples_of(run: Path) -> list[Any]:
    """Return prompt, text, rewards and reason to end of every completion of a run, those of evaluations too."""
    names = [name for name in (SAMPLES, "before.jsonl", "after.jsonl") if (run / name).exists()]
    rows = [row for name in names for row in read_rows(run / name)]
    return [(row["prompt"], row["text"], row.get("rewards"), row["finish"]) for row in rows]


def metric_differences(first: Path, run: Path, ending: str) -> Iterator[float]:
    """Yield the difference of each metric whose name ends so; relative where the metric is larger than 1."""
    for one, other in zip(read_rows(first / METRICS), read_rows(run / METRICS), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if not name.startswith(OWN) and name.endswith(ending) and isinstance(value, float | int):
                yield abs(value - other[name]) / max(1.0, abs(value))


def weight_difference(first: Path, run: Path) -> float:
    """Return the largest difference of a parameter after the last step, relative to the largest parameter."""
    left, right = ({k: v for k, v in last_arrays(f).items() if "params" in k} for f in (first, run))
    assert left.keys() == right.keys()
    scale = max(float(np.abs(x).max()) for x in left.values())
    return largest(float(np.abs(left[name] - right[name]).max()) / scale for name in left)


def largest(values: Iterator[float]) -> float:
    """Return the largest value in two digits; NaN if one is."""
    return float(f"{max(values, key=lambda x: (x != x, x), default=0.0):.1e}")


def table(found: Mapping[str, Mapping[str, Any]], cases: Sequence[Case]) -> str:
    """Return a table in Markdown with a row for each case."""
    head = ["", "weights", "mesh", "samples", "loss, straight", "loss, resumed", "metrics", "weights"]
    rows = [head, ["---"] * len(head)]
    for case in cases:
        runs = found[case.name]
        straight = [value for name, value in runs.items() if "-to-" not in name]
        resumed = [value for name, value in runs.items() if "-to-" in name]
        same = sum(value["samples"] for value in runs.values())
        most = lambda of, what: f"{max((v[what] for v in of), default=0.0):.1e}"  # noqa: E731
        row = [case.algorithm, case.weights, case.mesh, f"{same} of {len(runs)} the same"]
        row += [most(straight, "loss"), most(resumed, "loss"), most(runs.values(), "metrics")]
        rows.append([*row, most(runs.values(), "weights")])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(words: Sequence[str] | None = None) -> int:
    """Compare the layouts that `words` (the command line by default) ask for; 1 when layouts differ."""
    asked = _parser().parse_args(words)
    cases = [CASES[int(number)] for number in asked.only.split(",")] if asked.only else CASES
    if asked.work:
        work(Path(asked.work[1]), asked.work[2], cases)
        return 0
    folder = asked.folder.absolute()
    if not asked.compare:
        folder.mkdir(parents=True)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        train_all(folder, cases)
    found = {case.name: compared(folder, case) for case in cases}
    print(table(found, cases))
    print(json.dumps(found))
    runs = [run for case in found.values() for run in case.values()]
    return int(not all(run["samples"] and run["loss"] <= TOLERANCE for run in runs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description=__doc__)
    parser.add_argument("work", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", metavar="N,N", help="numbers of cases, from 0")
    parser.add_argument("--compare", action="store_true", help="only compare what lies in the folder")
    parser.add_argument("--folder", type=Path, default=Path("runs/layouts"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
