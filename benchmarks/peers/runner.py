"""The peers, and their workers' processes, which take one step at a time when they are asked."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.checkpoint import write
from benchmarks.peers.work import Work

ROOT = Path(__file__).parents[2]
OURS = "covey"


@dataclass(frozen=True)
class Peer:
    """One row of the table: a worker, the interpreter it runs in (from the repository's root), and its options."""

    worker: str
    python: str
    options: Mapping[str, Any]


class PeerError(Exception):
    """A worker that cannot run, with what to do about it."""


class Runner:
    """A worker's process, asked for one step at a time.

    Args:
        name: a row of `PEERS`.
        python: interpreter of its environment.
        work, folder: what to do, and the checkpoint.
        log: takes what its library prints.
        cache: folder for its compiled programs; None keeps none.

    Attributes:
        facts: its answer once it is set up.
        start: seconds from the start of the process to that answer.
        steps: the measurements of each step.
    """

    def __init__(self, name: str, python: str, work: Work, folder: Path, log: Path, cache: Path | None = None):
        self.name, self.log, self.steps = name, log, list[dict[str, Any]]()
        peer, began = PEERS[name], time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{peer.worker}"],
                cwd=ROOT,
                env=_environment(peer.worker, cache),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        asked = {"work": work.json(), "folder": str(folder), "options": dict(peer.options)}
        self.facts = self._answer(asked)
        self.start = time.perf_counter() - began

    def step(self) -> dict[str, Any]:
        """Let it take a step, and return its measurements; `steps` gathers them."""
        self.steps.append(self._answer("step"))
        return self.steps[-1]

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe(self._process.stdout).close()

    def _answer(self, request: Any) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has ended, and its log says why
            print(json.dumps(request), file=self._pipe(self._process.stdin), flush=True)
        line = self._pipe(self._process.stdout).readline()
        if not line:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
            raise PeerError(f"{self.name} ended with {self._process.wait()}; the last that it said:\n{last}")
        return json.loads(line)

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@contextmanager
def prepared(work: Work, shape: Mapping[str, Any], pythons: Mapping[str, str]) -> Iterator[Path]:
    """Give a temporary folder with the checkpoint in `model`, once every peer has its environment."""
    for name, python in pythons.items():
        _check(name, python)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        write(Path(folder) / "model", shape, work.stop_probability)
        yield Path(folder)


@contextmanager
def running(
    work: Work, folder: Path, pythons: Mapping[str, str], caches: Path | None = None
) -> Iterator[dict[str, Runner]]:
    """Start the peers one after the other, and end them with the block.

    Args:
        work: what a step is.
        folder: of `prepared`.
        pythons: the interpreter for each peer that takes part.
        caches: holds a folder of compiled programs for each; None keeps none.
    """
    with ExitStack() as stack:
        runners = {}
        for name, python in pythons.items():
            cache = caches and caches / name
            runners[name] = Runner(name, python, work, folder / "model", folder / f"{name}.log", cache)
            stack.callback(runners[name].close)
            print(f"{name}: ready after {runners[name].start:.1f} s", file=sys.stderr, flush=True)
        yield runners


def turns(steps: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yield the number of a step, from 0, and who takes it: in turn, backwards every other time.

    Args:
        steps: how many steps each takes; who has taken all of them is left out.
    """
    for number in range(max(steps.values())):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            if number < steps[name]:
                yield number, name


def show(number: int, name: str, step: Mapping[str, Any]) -> None:
    """Print a line about a step that is over, to standard error."""
    kind, tokens = f"round {number}" if number else "first step", sum(step["lengths"])
    print(
        f"{kind}: {name} {step['seconds']:.2f} s, {tokens} tokens, others use {step['others']:.1f} cores",
        file=sys.stderr,
        flush=True,
    )


def _check(name: str, python: str) -> None:
    if not Path(python).is_file():
        raise PeerError(
            f"{name} has no environment: {python} is not there.\n"
            f"  make bench-peers  makes it; or leave {name} out of --peers, or name another with "
            f"--{PEERS[name].python}-python"
        )


def _environment(worker: str, cache: Path | None) -> dict[str, str]:
    """Return the environment of a worker, with compiled programs in the folder `cache`; None: none are kept.

    A library that has a cache keeps every program in it, however short its compilation: Covey's default, set for all.
    """
    known = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"JAX_PLATFORMS": "cpu"}
    if cache is None:
        return known | {"JAX_COMPILATION_CACHE_DIR": ""}
    kept = {CACHES[worker]: str(cache)} if worker in CACHES else {}
    return known | kept | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


PYTHONS = {
    "covey": sys.executable,
    "tunix": str(ROOT / ".venv-tunix/bin/python"),
    "trl": str(ROOT / ".venv-parity/bin/python"),
}
"""Interpreter of each environment."""

PEERS = {
    "covey": Peer("covey_worker", "covey", {}),
    "tunix": Peer("tunix_worker", "tunix", {}),
    "tunix-exact": Peer("tunix_worker", "tunix", {"max_prompt_length": 64}),
    "trl": Peer("trl_worker", "trl", {}),
    "covey-bf16": Peer("covey_worker", "covey", {"model": {"compute_dtype": "bfloat16"}}),
    "trl-bf16": Peer("trl_worker", "trl", {"bf16": True}),
}
"""Peers by name. tunix-exact has the prompts' exact length as its maximum, which a user seldom knows. Of those with
bf16 the weights are float32 and the operands of products bfloat16.
"""

CACHES = {"covey_worker": "COVEY_CACHE", "tunix_worker": "JAX_COMPILATION_CACHE_DIR"}
"""Variable that names the folder of compiled programs. TRL's library, PyTorch, keeps none."""

DEFAULT = ("covey", "tunix", "tunix-exact", "trl")
