"""Send metrics to experiment trackers: TensorBoard, Weights & Biases, trackio.

A recipe names them (`tracking`), and each package is optional. A tracker that is missing or fails is logged once and
disabled: none of them stops a run. Only the metrics and the recipe are sent; no samples, no terminal output, no
environment. The values of variables that look like secrets are masked wherever they occur.

Weights & Biases no longer has anonymous runs: without a login the metrics stay in the run folder, and `wandb sync`
sends them later.
"""

import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from covey.display import mask_secrets
from covey.files import folder_below, has_file, open_below
from covey.monitor.run_files import TENSORBOARD, TRACKING, WANDB
from covey.registry import install_command

PROJECT = "covey"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tracked:
    """The run that is tracked.

    Attributes:
        folder: the run folder; its name is the name of the run.
        settings: the recipe, as nested dicts.
        resume_at: the step it resumes from; None for a new run.
    """

    folder: Path
    settings: Mapping[str, Any]
    resume_at: int | None = None

    def identity(self) -> str:
        """Return an identifier unique to this run, which stays the same when the run is stopped and resumed."""
        if not has_file(self.folder, TRACKING):
            with open_below(self.folder, TRACKING, "xb") as file:
                file.write(secrets.token_hex(4).encode())
        with open_below(self.folder, TRACKING) as file:
            return file.read().decode().strip()


class Tracker(NamedTuple):
    """An open tracker; both functions may raise.

    Attributes:
        log: function of a step and its metrics.
        close: sends the remaining data.
    """

    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


class Trackers(AbstractContextManager["Trackers"]):
    """The trackers of a run behind one interface. A context manager.

    Args:
        names: keys of `TRACKERS`.
        run: the run to track.
    """

    def __init__(self, names: Iterable[str], run: Tracked):
        self.run = Tracked(run.folder, mask_secrets(run.settings), run.resume_at)
        self._open: dict[str, Tracker] = {}
        for name in names:
            self._attempt(name, partial(self._start, name))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the finite numbers of `metrics` at optimizer step `step`."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "step"
        }
        for name, tracker in list(self._open.items()):
            self._attempt(name, partial(tracker.log, step, numbers))

    def close(self) -> None:
        """Close every tracker, after it has sent its remaining data."""
        for name, tracker in list(self._open.items()):
            self._attempt(name, tracker.close)
        self._open.clear()

    def _start(self, name: str) -> None:
        self._open[name] = TRACKERS[name](self.run)

    def _attempt(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # a failure of an external service must not stop a run
            self._open.pop(name, None)
            reason = mask_secrets(next(iter(str(error).splitlines()), ""))
            fix = f"; {install_command('track')} brings it" if isinstance(error, ImportError) else ""
            log.warning(f"not tracked by {name}: {type(error).__name__}: {reason}{fix}")

    def __exit__(self, *_: object) -> None:
        self.close()


def open_tensorboard(run: Tracked) -> Tracker:
    """Write scalars to the folder `tensorboard` of the run."""
    purge = {} if run.resume_at is None else {"purge_step": run.resume_at + 1}
    writer = import_module("tensorboardX").SummaryWriter(logdir=str(folder_below(run.folder, TENSORBOARD)), **purge)

    def log_scalars(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Tracker(log_scalars, lambda: writer.close())


def open_wandb(run: Tracked) -> Tracker:
    """Log to the W&B project `covey`: online after `wandb login`, else in the run folder. WANDB_MODE overrides."""
    folder_below(run.folder, WANDB)
    wandb = import_module("wandb")
    online = bool(wandb.api.api_key)
    wandb_run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.folder.name,
        id=run.identity(),
        dir=str(run.folder),
        config=dict(run.settings),
        mode=None if "WANDB_MODE" in os.environ else "online" if online else "offline",  # never asks for a login
        resume=None if run.resume_at is None else "allow",
        settings={"console": "off", "disable_git": True, "save_code": False, "silent": True, "init_timeout": 30.0},
    )
    address = getattr(wandb_run, "url", None)
    log.info(f"wandb: {address}" if address else f"wandb: not logged in, kept in {run.folder / WANDB}")
    return _as_tracker(wandb_run)


def open_trackio(run: Tracked) -> Tracker:
    """Log to the trackio project `covey`, in trackio's own folder."""
    trackio = import_module("trackio")
    trackio.init(
        project=PROJECT,
        name=f"{run.folder.name}-{run.identity()}",
        config=dict(run.settings),
        resume="never" if run.resume_at is None else "allow",
    )
    return _as_tracker(trackio)


def _as_tracker(run: Any) -> Tracker:
    """Return the tracker of a W&B run, or of the module trackio, which has the methods of one."""
    return Tracker(lambda step, metrics: run.log(metrics, step=step), lambda: run.finish())


TRACKERS: dict[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}
"""Map from the name in a recipe to the function that opens the tracker."""
