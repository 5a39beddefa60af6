"""Memory by phase and by part: resident memory of a `covey train` process, read every 0.2 s.

The process writes down when each phase begins, how many bytes of JAX arrays are live at that moment, and the most
temporary memory that XLA plans for a program of the phase (`memory_events`). The parts are those of the update's peak:
weights, optimizer, gradients and temporary memory are its floor; the rest is Python, libraries, compiled programs,
and what the allocator keeps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.common import Settings, tell_json, with_python_path
from benchmarks.sizes import SIZES
from covey.config.schema import LoRAConfig
from covey.errors import CoveyError
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, with_lora

EVERY = 0.2
"""Seconds between two readings."""


@dataclass(frozen=True)
class Phase:
    """One phase of a run; memory in MB.

    Attributes:
        begin, peak: resident memory at the first reading, and the most.
        live: JAX arrays at its end; None where the process ended.
        temporary: the most that a program made ready in it plans beside arguments and results.
    """

    name: str
    seconds: float
    begin: float
    peak: float
    live: float | None
    temporary: float


def main(settings: Settings) -> None:
    """Measure the run of a recipe, and print each phase at its first time and at its highest peak."""
    if settings.size in SIZES:
        raise CoveyError("memory is that of a recipe's run", fix="python -m benchmarks memory --recipe quickstart")
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        words = [settings.size, "--lora.rank", str(settings.lora), *settings.overrides]
        phases = measure(words, Path(folder))
    for phase in selected(phases):
        live = "" if phase.live is None else f"  live {phase.live:6.0f}"
        told = f"{phase.seconds:6.1f} s  begin {phase.begin:6.0f}  peak {phase.peak:6.0f}{live}"
        print(f"{phase.name:<28.28} {told}  temporary {phase.temporary:5.0f}")
    found = {"phases": [vars(phase) for phase in phases], "parts": parts(settings, phases)}
    print(", ".join(f"{name} {megabytes}" for name, megabytes in found["parts"].items()))
    tell_json("memory", settings, found)


def measure(words: Sequence[str], folder: Path) -> list[Phase]:
    """Train with these words of `covey train` in a fresh process; return its phases in order.

    Raises:
        CoveyError: the process failed.
    """
    events, log = folder / "events", folder / "log"
    command = [sys.executable, "-m", "benchmarks.memory_events", str(events), "train", *words]
    readings: list[tuple[float, float]] = []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--out", str(folder / "run")],
            stdout=output,
            stderr=output,
            env=with_python_path(os.environ),
        )
        while process.poll() is None:
            readings.append((time.time(), _resident(process.pid)))
            time.sleep(EVERY)
    if process.returncode:
        raise CoveyError(f"exit code {process.returncode}: " + log.read_text(errors="replace")[-1000:])
    return _phases([json.loads(line) for line in events.read_text().splitlines()], readings)


def selected(phases: Sequence[Phase]) -> list[Phase]:
    """Return the first phase of each name, and the one with the highest peak, in order."""
    names = dict.fromkeys(phase.name for phase in phases)
    same = {name: [phase for phase in phases if phase.name == name] for name in names}
    chosen = [phase for each in same.values() for phase in (each[0], max(each, key=lambda phase: phase.peak))]
    return [phase for phase in phases if any(phase is other for other in chosen)]


def parts(settings: Settings, phases: Sequence[Phase]) -> dict[str, int]:
    """Return the parts of the highest update in MB."""
    updates = [phase for phase in phases if phase.name == "update"]
    weights, trained = _parameter_megabytes(settings)
    live = max(phase.live or 0.0 for phase in updates)
    temporary = max(phase.temporary for phase in updates)
    found = {"weights": weights, "optimizer": live - weights, "gradients": trained, "temporary": temporary}
    floor, peak = sum(found.values()), max(phase.peak for phase in updates)
    found |= {"floor": floor, "rest": peak - floor, "peak": peak}
    return {name: round(megabytes) for name, megabytes in found.items()}


def _phases(events: Sequence[dict[str, Any]], readings: Sequence[tuple[float, float]]) -> list[Phase]:
    start, end = ({"time": at, "phase": "imports", "live": None} for at in (readings[0][0], readings[-1][0]))
    events = [start, *events, end | {"temporary": 0}]
    phases = []
    for event, following in pairwise(events):
        held = [resident for at, resident in readings if event["time"] <= at <= following["time"]]
        live = None if following["live"] is None else following["live"] / 1e6
        seconds = following["time"] - event["time"]
        if held:  # a phase shorter than the time between two readings may have none
            phases.append(Phase(event["phase"], seconds, held[0], max(held), live, following["temporary"] / 1e6))
    return phases


def _parameter_megabytes(settings: Settings) -> tuple[float, float]:
    """Return the size of the weights with their adapters, and of a float32 gradient of those that are trained."""

    def build() -> Decoder:
        model = Decoder(settings.shape.model, rngs=nnx.Rngs(0), param_dtype=settings.dtype)
        return with_lora(model, LoRAConfig(rank=settings.lora)) if settings.lora else model

    model = nnx.eval_shape(build)
    every, trained = jax.tree.leaves(nnx.state(model)), jax.tree.leaves(split_trainable(model)[1])
    return sum(x.size * x.dtype.itemsize for x in every) / 1e6, sum(4 * x.size for x in trained) / 1e6


def _resident(process: int) -> float:
    """Return the resident memory of a process in MB; 0 when it has just ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
