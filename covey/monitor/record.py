"""The record of a step, and the history of the metrics: for reinforcement and supervised learning."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from covey.config.schema import RLTrainingConfig, SFTConfig
from covey.errors import CoveyError, NumbersError
from covey.types import Group

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class StepRecord:
    """Record of a step, passed to observers.

    Attributes:
        step: number of optimizer updates made or skipped so far, `updates` of them on this batch, of `total` in the
            run.
        metrics: metrics by name; `time/...` are seconds.
        groups: completions that this process sampled in the step, with rewards and advantages; none in supervised
            training.
        numbers: number of each group among the groups of all processes.
    """

    step: int
    updates: int
    total: int
    metrics: dict[str, float]
    groups: Sequence[Group] = ()
    numbers: Sequence[int] = ()

    def due(self, every: int) -> bool:
        """Return True when this step reached or passed a multiple of `every`; never when `every` is 0."""
        return is_due(self.step, self.updates, every)


def is_due(step: int, updates: int, every: int) -> bool:
    """Return True when the last `updates` of `step` updates reached or passed a multiple of `every`; never when that is
    0.
    """
    return bool(every) and step // every > (step - updates) // every


Observer = Callable[[StepRecord], None]

OnBadBatch = Callable[[int, Sequence[Group], Mapping[str, np.ndarray], NumbersError], None]
"""Function of (step of an update that is not finite, its groups, the arrays of its batch by name, the error)."""


def total_steps(config: RLTrainingConfig | SFTConfig, batches: int, updates_per_batch: int = 1) -> int:
    """Return the optimizer updates of a whole run over data of `batches` batches per epoch."""
    return config.max_steps or batches * config.num_epochs * updates_per_batch


class History:
    """Metrics of the steps so far, by `config.metrics` names; `step` is the number of updates.

    Attributes:
        rows: metrics by name, one mapping per step.

    >>> history = History([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75, "kl": 0.1}])
    >>> history["reward"], history["kl"], len(history)
    ([0.5, 0.75], [0.1], 2)
    """

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()):
        self.rows: list[Mapping[str, float]] = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Sequence[float]:
        """Return the values of the metric `name`, of the steps that measured it."""
        return [row[name] for row in self.rows if name in row]

    def to_frame(self) -> "pandas.DataFrame":
        """Return a pandas frame with a row per step, indexed by `step`, and a column per metric.

        Raises:
            CoveyError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise CoveyError(
                "pandas is not installed, and a frame is one of its objects",
                fix="pip install pandas; or read history.rows, a list with one dict per step",
            ) from None
        frame = pandas.DataFrame([dict(row) for row in self.rows])
        return frame.set_index("step") if self.rows else frame
