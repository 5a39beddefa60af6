"""`python -m benchmarks.restarts`: kill random processes of a run of several, and compare it with one left alone.

`covey launch local --max-restarts` runs both. A process of random rank gets SIGKILL a random moment behind a random
step, every other time while a checkpoint is written. Told at the end, in one line of JSON: the kills, and whether the
two runs are equal bit for bit; with `--min-processes`, when the run goes on with fewer, how large the differences are.
Further settings are those of the recipe, as in `--training.off_policy_steps=1 --role_to_mesh.rollout.data=2`, with
which each process draws ahead on a device of its own.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.layouts import FLAGS, Case, difference
from benchmarks.soak import differences, steps_of
from covey.config.processes import COUNT, NUMBER
from covey.monitor.run_files import CHECKPOINTS, SUMMARY

POLL_SECONDS = 0.02


class Kill(NamedTuple):
    """Moment of a kill, and the rank that it hits.

    Attributes:
        step: number of steps behind which.
        saving: whether it waits for a checkpoint to be begun.
        seconds: seconds behind that.
    """

    step: int
    rank: int
    saving: bool
    seconds: float


def command(asked: argparse.Namespace, out: Path, kills: int) -> list[str]:
    """Return the words behind `covey` of a run in `out` that is restarted so many times at most."""
    words = ["launch", "local", "-n", str(asked.processes), "--max-restarts", str(kills)]
    words += ["--min-processes", str(asked.min_processes)] if kills and asked.min_processes else []
    mesh = f"model.mesh.fsdp={asked.processes}"
    steps = [f"training.max_steps={asked.steps}", f"training.checkpoint_every_n_steps={asked.every}"]
    case = [word for word in Case("GRPO", 0, "fsdp 4").settings() if not word.startswith("model.mesh")]
    settings = [*(f"--{word}" for word in [*case, mesh, *steps]), *asked.settings]
    return [*words, "train", "arithmetic-tiny", *settings, f"--out={out}"]


def run(words: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start `covey` with the words `words` and its output in a file."""
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "covey", *words], stdout=file, stderr=subprocess.STDOUT)


def killed(words: Sequence[str], out: Path, kills: Sequence[Kill], log: Path) -> list[dict[str, Any]]:
    """Run `covey` with the words `words`, and kill one of its processes each time.

    Args:
        kills: the kills; a rank counts round those that there are.

    Returns:
        step, rank and whether a checkpoint was being written, of each kill.
    """
    done: list[dict[str, Any]] = []
    with run(words, log) as launcher:
        before: set[int] = set()
        for kill in kills:
            members, since = wait_for_members(launcher, before), time.time()
            while launcher.poll() is None and (
                steps_of(out) < kill.step or (kill.saving and not is_saving(out, since))
            ):
                time.sleep(POLL_SECONDS)
            time.sleep(kill.seconds)
            if launcher.poll() is not None:
                break
            rank = kill.rank % len(members)
            done.append({"step": steps_of(out), "rank": rank, "saving": is_saving(out, since)})
            os.kill(members[rank], signal.SIGKILL)
            before |= set(members.values())
        launcher.wait()
    if launcher.returncode:
        raise RuntimeError(f"exit code {launcher.returncode}; see {log}")
    if len(done) < len(kills):
        raise RuntimeError(f"the run has ended behind {len(done)} of {len(kills)} kills: ask for more --steps")
    return done


def wait_for_members(launcher: "subprocess.Popen[bytes]", before: set[int]) -> dict[int, int]:
    """Return the process id of each rank, once the launcher has started processes that are not of those `before`."""
    while launcher.poll() is None:
        found, count = dict[int, int](), -1
        for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
            with suppress(OSError, KeyError):
                words = dict(
                    w.split("=", 1) for w in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in w
                )
                found[int(words[NUMBER])], count = int(child), int(words[COUNT])
        if len(found) == count and not before & set(found.values()):
            return found
        time.sleep(POLL_SECONDS)
    raise RuntimeError("the run has ended before all kills")


def is_saving(out: Path, since: float) -> bool:
    """Return whether a checkpoint of the run is being written that was begun after the time `since`."""
    with suppress(OSError):  # it may be in place by now
        return any(path.stat().st_mtime > since for path in (out / CHECKPOINTS).glob("*.partial"))
    return False


def draw_kills(asked: argparse.Namespace) -> list[Kill]:
    """Draw the kills: steps in rising order, ranks, seconds; every other one while a checkpoint is written."""
    draw = random.Random(asked.seed)
    steps = sorted(draw.randrange(1, asked.steps) for _ in range(asked.kills))
    ranks = [draw.randrange(asked.processes) for _ in steps]
    longest = [asked.linger if number % 2 == 0 else asked.linger / 5 for number in range(asked.kills)]
    return [
        Kill(step, rank, number % 2 == 1, draw.uniform(0, longest[number]))
        for number, (step, rank) in enumerate(zip(steps, ranks, strict=True))
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Kill and compare as `words` (the command line by default) ask for; 1 when the two runs differ."""
    asked, asked.settings = _parser().parse_known_args(words)
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    flags = f"{FLAGS} --xla_force_host_platform_device_count={asked.processes}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    name = "-".join([f"{asked.processes}-processes-{asked.steps}-steps-{asked.every}", *asked.settings])
    straight, out = folder / f"straight-{name}", folder / f"killed-{name}-seed-{asked.seed}"
    if out.exists():
        raise SystemExit(f"{out} is from an earlier call; remove it, or name another --folder or --seed")
    if not (straight / SUMMARY).exists():
        log = folder / f"{straight.name}.log"
        with run(command(asked, straight, 0), log) as process:
            if process.wait():
                raise RuntimeError(f"exit code {process.returncode}; see {log}")
    done = killed(command(asked, out, asked.kills), out, draw_kills(asked), folder / f"{out.name}.log")
    bits = differences(straight, out)
    told = {"processes": asked.processes, "steps": asked.steps, "kills": done, "differences": bits[:10]}
    if asked.min_processes:
        told |= {"min_processes": asked.min_processes, **difference(straight, out)}
    print(json.dumps(told))
    return int(bool(bits) and not asked.min_processes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restarts", description=__doc__)
    parser.set_defaults(settings=())
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--min-processes", type=int)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=2, help="steps between two checkpoints")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--linger", type=float, default=1.0, help="longest time behind a step, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--folder", type=Path, default=Path("runs/restarts"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
