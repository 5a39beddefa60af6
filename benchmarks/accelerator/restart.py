"""A run that is killed and resumed against the same run left alone, bit for bit."""

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import soak
from benchmarks.accelerator.checks import Context
from benchmarks.accelerator.results import Row
from benchmarks.common import with_python_path
from benchmarks.layouts import Case

STEPS, KILLS = 12, (5,)
"""Number of steps of a run, and the steps behind which it is killed."""
VARIANTS = {"adapters": (), "all weights": ("model.lora.rank=0",)}
"""Name → further settings. The gradient of an embedding adds up rows of equal tokens."""
IN_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"
"""Flag with which XLA leaves out what a GPU may add in any order."""


def compare(context: Context) -> Iterator[Row]:
    """Train twice from random weights, once with a kill, and count what differs: weights and optimizer, metrics,
    completions. Where something differs the flag is tried that should mend it. All are processes of their own, so this
    one must not have begun JAX before they end.
    """
    folder = context.folder / "restart"
    shutil.rmtree(folder, ignore_errors=True)
    for name, more in VARIANTS.items():
        apart = _differences(folder / name.replace(" ", "-"), more, "", context)
        yield Row(f"{name}: arrays and files that differ", apart, 0, bound=True)
        if apart:
            apart = _differences(folder / f"{name.replace(' ', '-')}-in-order", more, IN_ORDER, context)
            yield Row(f"{name}, {IN_ORDER}: arrays and files that differ", apart, 0, bound=True)


def _differences(folder: Path, more: Sequence[str], flag: str, context: Context) -> int:
    """Return the number of arrays and files in which two runs differ."""
    folder.mkdir(parents=True)
    straight, killed = folder / "straight", folder / "killed"
    train = ["train", "arithmetic-tiny", *(f"--{setting}" for setting in (*settings(), *more))]
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()} if flag else {}
    environment = with_python_path({**os.environ, **flags})
    context.tell(f"{STEPS} steps {' '.join((*more, flag))}")
    soak.left_alone([*train, "--out", str(straight)], straight, environment)
    context.tell(f"the same, killed behind step {KILLS[0]} and resumed")
    words = [*train, "--out", str(killed)]
    kills = soak.killed(words, killed, KILLS, random.Random(0), environment=environment, linger=0.2)
    assert kills == len(KILLS), f"the run ended before it was killed: {kills}"
    return len(soak.differences(straight, killed))


def settings() -> list[str]:
    """Return the settings of a run on one device, over the recipe `arithmetic-tiny`."""
    of_case = [word for word in Case("GRPO", 4, "fsdp 4").settings() if not word.startswith("model.mesh")]
    return [*of_case, f"training.max_steps={STEPS}"]
