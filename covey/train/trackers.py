"""Metrics for those who watch from elsewhere: TensorBoard, Weights & Biases, trackio.

A recipe names them (`tracking`), and each package is optional. A tracker that is missing or fails is said so once and
left out from then on: none of them stops a run. What goes out is the metrics and the recipe; no sample, no output of
the terminal, nothing of the environment. The values of variables that look like secrets are masked wherever they occur.

Weights & Biases has given up anonymous runs: without a login the metrics stay in the run folder, and `wandb sync` sends
them later.
"""

import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from covey.display import masked
from covey.extras import install

PROJECT = "covey"
ID = "tracking-id"
"""The file in the run folder that tells trackers which run to go on with."""


@dataclass(frozen=True)
class Tracked:
    """The run that is tracked.

    Attributes:
        folder: where it lies; its name is the run's.
        settings: the recipe, as nested dicts.
        resume_at: the step it goes on from; None for a new one.
    """

    folder: Path
    settings: Mapping[str, Any]
    resume_at: int | None = None

    def identity(self) -> str:
        """The same for every part of a run that was stopped and resumed, and for no other run."""
        file = self.folder / ID
        if not file.exists():
            file.write_text(secrets.token_hex(4), encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()


class Tracker(Protocol):
    """What a tracker must offer; any of it may raise."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """The trackers a run asked for, as one. A context manager.

    Args:
        names: keys of `TRACKERS`.
        run: what is tracked.
        say: is told what cannot be tracked, and where to look.
    """

    def __init__(self, names: Iterable[str], run: Tracked, say: Callable[[str], None]):
        self.run, self.say = Tracked(run.folder, masked(run.settings), run.resume_at), say
        self._open: dict[str, Tracker] = {}
        for name in names:
            self._attempt(name, partial(self._start, name))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The finite numbers of `metrics` at optimizer step `step`."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "step"
        }
        for name, tracker in list(self._open.items()):
            self._attempt(name, partial(tracker.log, step, numbers))

    def close(self) -> None:
        """Lets every tracker finish what it has to send."""
        for name, tracker in list(self._open.items()):
            self._attempt(name, tracker.close)
        self._open.clear()

    def _start(self, name: str) -> None:
        self._open[name] = TRACKERS[name](self.run, self.say)

    def _attempt(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # other people's services: none of their troubles is worth a run
            self._open.pop(name, None)
            reason = masked(next(iter(str(error).splitlines()), ""))
            fix = f"; {install('track')} brings it" if isinstance(error, ImportError) else ""
            self.say(f"not tracked by {name}: {type(error).__name__}: {reason}{fix}")

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoard:
    """Scalars in the folder `tensorboard` of the run."""

    def __init__(self, run: Tracked, say: Callable[[str], None]):
        again = {} if run.resume_at is None else {"purge_step": run.resume_at + 1}
        self.writer = import_module("tensorboardX").SummaryWriter(logdir=str(run.folder / "tensorboard"), **again)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of the project `covey`: online after `wandb login`, else kept in the run folder. WANDB_MODE overrules."""

    def __init__(self, run: Tracked, say: Callable[[str], None]):
        wandb = import_module("wandb")
        online = bool(wandb.api.api_key)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.identity(),
            dir=str(run.folder),
            config=dict(run.settings),
            mode=None if "WANDB_MODE" in os.environ else "online" if online else "offline",  # never asks for a login
            resume=None if run.resume_at is None else "allow",
            settings={"console": "off", "disable_git": True, "save_code": False, "silent": True, "init_timeout": 30.0},
        )
        address = getattr(self.run, "url", None)
        say(f"wandb: {address}" if address else f"wandb: not logged in, kept in {run.folder / 'wandb'}")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A run of the project `covey` in trackio's own folder."""

    def __init__(self, run: Tracked, say: Callable[[str], None]):
        name = f"{run.folder.name}-{run.identity()}"
        resume = "never" if run.resume_at is None else "allow"
        self.trackio = import_module("trackio")
        self.trackio.init(project=PROJECT, name=name, config=dict(run.settings), resume=resume)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.trackio.log(metrics, step=step)

    def close(self) -> None:
        self.trackio.finish()


TRACKERS: dict[str, Callable[[Tracked, Callable[[str], None]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""Name in a recipe → tracker."""
