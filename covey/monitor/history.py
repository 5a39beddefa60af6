"""Metrics of a learner's steps, in memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from covey.errors import CoveyError

if TYPE_CHECKING:
    import pandas


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
