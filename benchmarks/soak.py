"""`python -m benchmarks.soak`: compare a run that is left alone with the same run killed and resumed at random.

Both are processes of their own, as a user starts them; what is read of them comes from /proc and from their folders.
Told at the end, in one line of JSON: whether the two are equal bit for bit (weights, optimizer, metrics, completions),
how the memory of the one left alone grew, and its threads and open files late against early.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.metrics import CLOCKS

WARM = 0.3
"""Fraction of the first steps that is ignored, because compilation happens in them."""


@dataclass(frozen=True)
class Look:
    """State of a process at one moment: steps written, resident memory in MB, threads, open files."""

    step: int
    memory: float
    threads: int
    files: int


def left_alone(command: Sequence[str], folder: Path, environment: dict[str, str]) -> list[Look]:
    """Run `covey` with the words `command` to its end; return its states, one per step or second."""
    seen: list[Look] = []
    with _started(command, environment) as process:
        while process.poll() is None:
            look = _look(process.pid, steps_of(folder))
            if look is not None and (not seen or look.step > seen[-1].step):
                seen.append(look)
            time.sleep(0.05)
    _refuse_failure(process)
    return seen


def killed(command: Sequence[str], folder: Path, kills: Sequence[int], draw: random.Random, **how: Any) -> int:
    """Run `covey` with the words `command`, kill it by SIGKILL a random moment behind each of the steps `kills`,
    takes it up again each time, and at last lets it end; how often it was killed.

    Args:
        how: `environment`; `linger`, the longest such moment in seconds.
    """
    environment, linger, done = how["environment"], how.get("linger", 1.0), 0
    words = command
    for step in sorted(kills):
        with _started(words, environment) as process:
            while process.poll() is None and steps_of(folder) < step:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, linger))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                done += 1
        if process.returncode != -signal.SIGKILL:
            _refuse_failure(process)
        words = [command[0], "--resume", str(folder)]
    with _started(words, environment) as process:
        process.wait()
    _refuse_failure(process)
    return done


def steps_of(folder: Path) -> int:
    """Return the number of steps in `metrics.jsonl` so far."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences between two run folders, bit for bit: weights and optimizer at the last step, metrics but
    for clocks, completions with their rewards, the evaluations.
    """
    found = [
        name for name in ("metrics.jsonl", "samples.jsonl", "after.jsonl") if _rows(one / name) != _rows(other / name)
    ]
    left, right = last_arrays(one), last_arrays(other)
    if left.keys() != right.keys():
        return [*found, "the names of the arrays"]
    return found + [name for name in left if left[name].tobytes() != right[name].tobytes()]


def growth(seen: Sequence[Look]) -> dict[str, Any]:
    """Return MB per 100 steps by least squares after the warm-up, and the fewest threads and files early and late."""
    warm = [look for look in seen if look.step > WARM * seen[-1].step] or list(seen)
    steps, memory = (np.array([getattr(look, name) for look in warm], float) for name in ("step", "memory"))
    slope = 100 * float(np.polyfit(steps, memory, 1)[0]) if len(warm) > 1 else 0.0
    third = max(1, len(warm) // 3)
    early, late = warm[:third], warm[-third:]
    least = lambda looks, name: min(getattr(look, name) for look in looks)  # noqa: E731  # a save opens some for a while
    return {
        "looks": len(warm),
        "memory_mb": [round(warm[0].memory), round(warm[-1].memory)],
        "slope_mb_per_100_steps": round(slope, 3),
        **{name: [least(early, name), least(late, name)] for name in ("threads", "files")},
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure as `words` (the command line by default) ask for; 1 when the two runs differ."""
    asked, settings = _parser().parse_known_args(words)
    draw, folder = random.Random(asked.seed), asked.folder
    environment = dict(os.environ) | {"JAX_COMPILATION_CACHE_DIR": caching(folder)}
    source = asked.model or str(folder / "sft")
    if not asked.model and not (folder / "sft").exists():
        left_alone(["sft", "sft-tiny", "--out", source], folder / "sft", environment)
    command = ["train", asked.recipe, "--model.source", source, "--training.max-steps", str(asked.steps)]
    command += ["--training.checkpoint-every-n-steps", str(asked.every), *settings]
    began = time.monotonic()
    seen = left_alone([*command, "--out", str(folder / "straight")], folder / "straight", environment)
    alone = time.monotonic() - began
    kills = [draw.randrange(1, asked.steps) for _ in range(asked.kills)]
    out = folder / "killed"
    done = killed([*command, "--out", str(out)], out, kills, draw, environment=environment, linger=asked.linger)
    other = differences(folder / "straight", out)
    told = {"steps": asked.steps, "kills": done, "seconds": round(alone), **growth(seen), "differences": other[:10]}
    print(json.dumps(told))
    return int(bool(other))


def caching(folder: Path) -> str:
    """Return the folder of compiled programs under `folder`, so that a resumed process does not compile anew."""
    return str(folder.absolute() / "compiled")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__, epilog=EPILOG)
    parser.add_argument("--recipe", default="arithmetic-tiny")
    parser.add_argument("--model", default="", help="its model; one that sft-tiny makes when not given")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--linger", type=float, default=2.0, help="seconds behind a step within which it is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    return parser


def _started(words: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "covey", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def _refuse_failure(process: "subprocess.Popen[bytes]") -> None:
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} of: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]


def _look(process: int, step: int) -> Look | None:
    """Return the state of the process; None if it has just ended."""
    place = Path(f"/proc/{process}")
    try:
        pages = int((place / "statm").read_text().split()[1])
        return Look(step, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, *map(_count(place), ("task", "fd")))
    except OSError:
        return None


def _count(place: Path) -> Callable[[str], int]:
    return lambda name: len(os.listdir(place / name))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in _lines(file)]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as lines:
        yield from map(json.loads, lines)


def last_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the last checkpoint, by name."""
    import jax

    from covey.parallel import flatten
    from covey.train.checkpoint import Checkpointer

    data = lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        return {name: np.asarray(data(leaf)) for name, leaf in flatten(saves.restore()[0]).items()}


EPILOG = "Further words go to `covey train` as they are, for both runs."

if __name__ == "__main__":
    sys.exit(main())
