"""A run that is killed and resumed against the same run left alone, bit for bit."""

import os
import random
import shutil
from collections.abc import Iterator

from benchmarks import soak
from benchmarks.accelerator.checks import Context
from benchmarks.accelerator.results import Row
from benchmarks.common import with_python_path
from benchmarks.layouts import Case

STEPS, KILLS = 12, (5,)
"""Number of steps of a run, and the steps behind which it is killed."""


def compare(context: Context) -> Iterator[Row]:
    """Train twice from random weights, once with a kill, and count what differs: weights and optimizer, metrics,
    completions. All are processes of their own, so this one must not have begun JAX before they end.
    """
    folder = context.folder / "restart"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    straight, killed = folder / "straight", folder / "killed"
    train = ["train", "arithmetic-tiny", *(f"--{setting}" for setting in settings())]
    environment = with_python_path(os.environ)
    context.tell(f"{STEPS} steps")
    soak.left_alone([*train, "--out", str(straight)], straight, environment)
    context.tell(f"the same, killed behind step {KILLS[0]} and resumed")
    words = [*train, "--out", str(killed)]
    kills = soak.killed(words, killed, KILLS, random.Random(0), environment=environment, linger=0.2)
    yield Row("kills", kills)
    yield Row("arrays and files that differ", len(soak.differences(straight, killed)), 0, bound=True)


def settings() -> list[str]:
    """Return the settings of a run on one device, over the recipe `arithmetic-tiny`."""
    of_case = [word for word in Case("GRPO", 4, "fsdp 4").settings() if not word.startswith("model.mesh")]
    return [*of_case, f"training.max_steps={STEPS}"]
