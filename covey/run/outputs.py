"""Outputs and watchers of a run, which packages offer by entry points, and the observers of its learner."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from covey.errors import NumbersError
from covey.monitor.display import StepLines
from covey.monitor.record import Observer, StepRecord
from covey.monitor.writer import Correct
from covey.types import Group

if TYPE_CHECKING:
    from covey.run.saved_run import SavedRun

log = logging.getLogger(__name__)


class Output:
    """Output of a run in a folder; a base class whose methods do nothing. An output changes nothing of the run, and is
    left out once it raises. Packages offer outputs by the entry points `covey.outputs`.
    """

    def begin(self, run: "SavedRun", summary: Mapping[str, Any]) -> None:
        """Begin, after a restore and the evaluation before training; `summary` is the content of `summary.json`."""

    def before_update(self, experience: Any) -> None:
        """Look at an `Experience` with its advantages, before the updates on it; in reinforcement learning alone."""

    def step(self, record: StepRecord) -> None:
        """Look at a finished step."""

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Look at the evaluation `before` or `after` training."""

    def end(self, status: str) -> Mapping[str, str]:
        """End, "" of a finished run or the status of a stopped one; return facts for the last message, by name."""
        return {}


class Watcher:
    """Watcher of a run from its start, also while its model loads; a context manager whose methods do nothing. Packages
    offer functions of (recipe, folder, progress) that return a watcher by the entry points `covey.watchers`.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """End with the error that ends the run, if there is one."""

    def phase(self, name: str) -> None:
        """Look at a phase that begins, in the thread in which it does."""

    def step(self, record: StepRecord) -> None:
        """Look at a step before it is written; metrics may be added."""

    def summary(self) -> Mapping[str, Any]:
        """Return entries of the summary of a finished run."""
        return {}


class Measured(NamedTuple):
    """Evaluation of held-out rows.

    Attributes:
        metrics: metrics by name.
        answers: completions and which of them are right, by the ending of the name of their file.
        shown: completions of which the best and the worst are shown.
    """

    metrics: dict[str, Any]
    answers: Mapping[str, tuple[Sequence[Group], Correct]] = {}
    shown: Sequence[Group] = ()


class Outputs:
    """All outputs of a run: here of a script without a folder, the observers of its learner.

    Args:
        observers: called with each record.
    """

    def __init__(self, observers: Sequence[Observer]):
        self.observers = observers

    def restore(self, total: int) -> bool:
        """Restore a run of `total` steps if it goes on; return whether something is left to be done."""
        return True

    def needs_before(self) -> bool:
        """Return whether held-out rows are to be evaluated before training."""
        return True

    def begin(self) -> None:
        """Begin, after the evaluation before training."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Open a context for the time in which the run trains."""
        yield

    def phase(self, name: str) -> None:
        """Look at a phase that begins, in the thread in which it does."""

    def advance(self, done: int, total: int) -> None:
        """Look at the progress of a phase."""

    def bad_batch(
        self, step: int, groups: Sequence[Group], arrays: Mapping[str, np.ndarray], error: NumbersError
    ) -> None:
        """Look at the batch of an update that is not finite."""

    def before_update(self, experience: Any) -> None:
        """See `Output`."""

    def step(self, record: StepRecord) -> None:
        """Tell the observers of a step."""
        for observer in self.observers:
            observer(record)

    def evaluation(self, name: str, measured: Measured) -> None:
        """Show an evaluation where steps are shown as lines."""
        for observer in self.observers:
            if isinstance(observer, StepLines):
                observer.evaluation(name, measured.metrics)

    def end(self) -> None:
        """End, after the evaluation after training."""
