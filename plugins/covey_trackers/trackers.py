"""Send metrics to experiment trackers: TensorBoard, Weights & Biases, trackio.

A recipe names them (`tracking`), and each package is optional. A tracker that is missing or fails is logged once and
disabled: none of them stops a run. The metrics and the recipe are sent, and completions only where the caller hands
them over; no terminal output and no environment. The values of variables that look like secrets are masked wherever
they occur.

Weights & Biases no longer has anonymous runs: without a login the metrics stay in the run folder, and `wandb sync`
sends them later.
"""

import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from covey.display import mask_secrets, secret_mask
from covey.files import folder_below, has_file, open_below
from covey.monitor.writer import sample_rows
from covey.registry import install_command
from covey.types import Group
from covey_trackers.run_files import TENSORBOARD, TRACKING, WANDB

PROJECT = "covey"
COMPLETIONS = "completions"
"""Name of the table of completions in a tracker."""
log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows


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


class CompletionTable(NamedTuple):
    """A table of completions with their scores. A number that is not finite is None.

    Attributes:
        columns: `step`, `prompt`, `completion`, `reward`, `rewards/NAME` for each reward function, and `advantage`.
        rows: values of the columns, a list per completion.
    """

    columns: list[str]
    rows: list[list[Any]]


class Tracker(NamedTuple):
    """An open tracker; both functions may raise.

    Attributes:
        log: function of a step, its metrics and its completions, which are None at most steps.
        close: sends the remaining data.
    """

    log: Callable[[int, dict[str, float], CompletionTable | None], object]
    close: Callable[[], object]


class Trackers(AbstractContextManager["Trackers"]):
    """The trackers of a run behind one interface. A context manager.

    Args:
        names: keys of `TRACKERS`.
        run: the run to track.
    """

    def __init__(self, names: Iterable[str], run: Tracked):
        self.run = Tracked(run.folder, mask_secrets(run.settings), run.resume_at)
        self._mask = secret_mask()
        self._open: dict[str, Tracker] = {}
        for name in names:
            self._attempt(name, partial(self._start, name))

    def log(
        self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group] = (), num_completions: int = 16
    ) -> None:
        """Log the finite numbers of `metrics` at optimizer step `step`, and completions as a table.

        Args:
            groups: scored groups, such as those of a `StepRecord`; without any, no table is sent.
            num_completions: rows of the table: the first groups, as far as they go. Prompts and completions leave the
                machine.
        """
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "step"
        }
        table = completion_table(step, groups, num_completions, self._mask) if groups and self._open else None
        for name, tracker in list(self._open.items()):
            self._attempt(name, partial(tracker.log, step, numbers, table))

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


def completion_table(
    step: int, groups: Iterable[Group], count: int, mask: Callable[[Any], Any] = mask_secrets
) -> CompletionTable:
    """Return the first `count` completions of `groups`, without the secrets that `mask` masks."""
    samples = list(islice(sample_rows(step, groups), count))
    names = list(dict.fromkeys(name for sample in samples for name in sample["rewards"]))
    columns = ["step", "prompt", "completion", "reward", *(f"rewards/{name}" for name in names), "advantage"]
    rows = []
    for sample in samples:
        numbers = [sample["reward"], *(sample["rewards"].get(name) for name in names), sample["advantage"]]
        rows.append([step, mask(sample["prompt"]), mask(sample["text"]), *map(_finite, numbers)])
    return CompletionTable(columns, rows)


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def open_tensorboard(run: Tracked) -> Tracker:
    """Write scalars and texts to the folder `tensorboard` of the run."""
    purge = {} if run.resume_at is None else {"purge_step": run.resume_at + 1}
    writer = import_module("tensorboardX").SummaryWriter(logdir=str(folder_below(run.folder, TENSORBOARD)), **purge)

    def log_step(step: int, metrics: dict[str, float], completions: CompletionTable | None) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        if completions:
            writer.add_text(COMPLETIONS, _markdown(completions), step)

    return Tracker(log_step, lambda: writer.close())


def _markdown(table: CompletionTable) -> str:
    """Return a table of completions as Markdown. TensorBoard shows Markdown, so the texts, which are not trusted, are
    blocks of code: every line of them is indented.
    """
    parts = []
    for row in table.rows:
        named = dict(zip(table.columns, row, strict=True))
        texts = [_code(named.pop(name)) for name in ("prompt", "completion")]
        numbers = "  ".join(f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in named.items())
        parts += [_code(numbers), "prompt", texts[0], "completion", texts[1], "---"]
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


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
    return _as_tracker(wandb_run, wandb.Table)


def open_trackio(run: Tracked) -> Tracker:
    """Log to the trackio project `covey`, in trackio's own folder."""
    trackio = import_module("trackio")
    trackio.init(
        project=PROJECT,
        name=f"{run.folder.name}-{run.identity()}",
        config=dict(run.settings),
        resume="never" if run.resume_at is None else "allow",
    )
    return _as_tracker(trackio, trackio.Table)


def _as_tracker(run: Any, make_table: Callable[..., Any]) -> Tracker:
    """Return the tracker of a W&B run, or of the module trackio, which has the methods of one, with its tables."""

    def log_step(step: int, metrics: dict[str, float], completions: CompletionTable | None) -> None:
        table = {COMPLETIONS: make_table(columns=completions.columns, data=completions.rows)} if completions else {}
        run.log({**metrics, **table}, step=step)

    return Tracker(log_step, lambda: run.finish())


TRACKERS: dict[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}
"""Map from the name in a recipe to the function that opens the tracker."""
