"""The step of '2B recipe' by TRL, with `generate` of transformers: what a user without vLLM gets on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.accelerator.checks import Context
from benchmarks.accelerator.results import NotTriedError, Row
from benchmarks.common import with_python_path

NEEDED = ("torch", "transformers", "trl", "peft", "datasets")


def measure(context: Context) -> Iterator[Row]:
    """Measure it in a process of its own.

    Raises:
        NotTriedError: a package is missing.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise NotTriedError(f"{', '.join(missing)} not installed")
    words = [sys.executable, "-m", "benchmarks.accelerator.trl_step", str(context.folder / "trl")]
    done = subprocess.run(words, stdout=subprocess.PIPE, env=with_python_path(dict(os.environ)), check=True)
    for what, (value, unit) in json.loads(done.stdout.splitlines()[-1]).items():
        yield Row(what, value, None, unit)
