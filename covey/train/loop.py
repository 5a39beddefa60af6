"""Parts that reinforcement learning and supervised training share: the record of a step and its observers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from covey.config.schema import RLTrainingConfig, SFTConfig
from covey.errors import NumbersError
from covey.types import Group


@dataclass(frozen=True)
class StepRecord:
    """Record of a step, passed to observers.

    Attributes:
        step: number of optimizer updates made or skipped so far, `updates` of them on this batch, of `total` in the
            run.
        metrics: metrics by name; `time/...` are seconds.
        groups: every completion that the step sampled, with its rewards and advantage; none in supervised training.
    """

    step: int
    updates: int
    total: int
    metrics: dict[str, float]
    groups: Sequence[Group] = ()

    def due(self, every: int) -> bool:
        """Return True when this step reached or passed a multiple of `every`; never when `every` is 0."""
        return bool(every) and self.step // every > (self.step - self.updates) // every


Observer = Callable[[StepRecord], None]

OnBadBatch = Callable[[int, Sequence[Group], Mapping[str, np.ndarray], NumbersError], None]
"""Function of (step of an update that is not finite, its groups, the arrays of its batch by name, the error)."""


def total_steps(config: RLTrainingConfig | SFTConfig, batches: int, updates_per_batch: int = 1) -> int:
    """Return the optimizer updates of a whole run over data of `batches` batches per epoch."""
    return config.max_steps or batches * config.num_epochs * updates_per_batch


def print_step(record: StepRecord, names: Iterable[str]) -> None:
    """Print one line with the metrics of `names` that the step has."""
    numbers = "  ".join(f"{name} {record.metrics[name]:.4g}" for name in names if name in record.metrics)
    print(f"step {record.step}/{record.total}  {numbers}", flush=True)
