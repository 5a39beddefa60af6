"""The peers, and their workers' processes, which take one step at a time when they are asked."""

import json
import os
import subprocess
import sys
import tempfile
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
    """

    def __init__(self, name: str, python: str, work: Work, folder: Path, log: Path):
        self.name, self.log, self.steps = name, log, list[dict[str, Any]]()
        peer = PEERS[name]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{peer.worker}"],
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        asked = {"work": work.json(), "folder": str(folder), "options": dict(peer.options)}
        self.facts = self._answer(asked)

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
def running(work: Work, shape: Mapping[str, Any], pythons: Mapping[str, str]) -> Iterator[list[Runner]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        write(folder / "model", shape, work.stop_probability)
        runners = []
        for name, python in pythons.items():
            runner = Runner(name, python, work, folder / "model", folder / f"{name}.log")
            stack.callback(runner.close)
            runners.append(runner)
            print(f"{name}: ready after {runner.facts['setup']:.1f} s", file=sys.stderr, flush=True)
        yield runners


def check(name: str, python: str) -> None:
    if not Path(python).is_file():
        raise PeerError(
            f"{name} has no environment: {python} is not there.\n"
            f"  make bench-peers  makes it; or leave {name} out of --peers, or name another with "
            f"--{PEERS[name].python}-python"
        )


def _environment() -> dict[str, str]:
    """Return the environment without a cache of compiled programs: a first step compiles, in every library."""
    return {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"JAX_PLATFORMS": "cpu"}


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

DEFAULT = ("covey", "tunix", "tunix-exact", "trl")
