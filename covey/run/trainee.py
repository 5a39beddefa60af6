"""Base class of the learners of reinforcement and supervised learning, as the loop and a run folder know it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config.base import Keywords
from covey.config.recipe import Recipe, SFTRecipe
from covey.config.schema import ModelOptions
from covey.monitor.display import make_step_lines
from covey.monitor.record import History, Observer, OnBadBatch, StepRecord
from covey.parallel import processes
from covey.run import loop
from covey.run.outputs import Measured, Outputs
from covey.run.saved_run import ReadyRun, SavedRun
from covey.run.script import train_from_script, warn_of_unwritten


class Trainee(Keywords, ABC):
    """A learner as the loop and a run folder know it.

    Args:
        training: its settings, of `RLTrainingConfig` or `SFTConfig`.
        show: metrics on the line of a step.
        observers, on_phase, on_bad_batch: see `Learner` of `rl`.

    Attributes:
        training: see above.
        step: optimizer updates made.
        history: metrics of the steps.
        evaluations: metrics of the held-out rows `before` and `after` the last call of `train`; empty if it got no such
            rows.
        outputs: what the loop tells of the run.
        settings: the settings as a recipe, which checks and records them.
        initial_weights: checksum of the weights before the first step; empty until a run needs it.
    """

    settings: Recipe | SFTRecipe

    def __init__(
        self,
        training: Any,
        show: Sequence[str],
        observers: Sequence[Observer] | None,
        on_phase: Callable[[str], None],
        on_bad_batch: OnBadBatch,
    ):
        standard = [make_step_lines(show)] if processes.here().is_first else []
        self.observers: list[Observer] = list(standard if observers is None else observers)
        self.history, self.evaluations = History(), dict[str, Mapping[str, Any]]()
        self.step, self.outputs, self.initial_weights = 0, Outputs([]), ""
        self.training, self._on_phase, self._on_bad_batch = training, on_phase, on_bad_batch

    def on_phase(self, name: str) -> None:
        """Tell of a phase that begins, in the thread in which it does."""
        self.outputs.phase(name)
        self._on_phase(name)

    def on_bad_batch(self, *batch: Any) -> None:
        """Tell of the batch of an update that is not finite; arguments as of `OnBadBatch`."""
        self.outputs.bad_batch(*batch)
        self._on_bad_batch(*batch)

    def train_on(
        self,
        loader: Any,
        held_out: Sequence[Any],
        out: str | Path | None,
        model: Callable[[], ModelOptions],
        ready: Callable[[SavedRun], ReadyRun],
    ) -> None:
        """Train on batches, and evaluate held-out rows before, during and after that.

        Args:
            loader, held_out: the data.
            out: the run folder, if there is one.
            model: returns what the run records of the model.
            ready: returns the run for the folder.
        """
        if out is None:
            warn_of_unwritten(self.training)
            loop.train(self, loader, held_out, Outputs(self.observers))
        else:
            train_from_script(self, replace(self.settings, model=model()), out, ready)

    def evaluate_due(self, record: StepRecord, held_out: Sequence[Any]) -> None:
        """Evaluate the weights of a step if that is due, and add the metrics to the record of the step."""
        if held_out and record.due(self.training.eval_every_n_steps):
            self.on_phase("evaluate")
            metrics = self.evaluate_rows(held_out, during_training=True).metrics
            record.metrics.update({f"eval/{name}": float(x) for name, x in metrics.items() if x is not None})

    @abstractmethod
    def begin(self, loader: Any, held_out: Sequence[Any]) -> int:
        """Check the data, build what trains, and return the number of updates of the whole run."""

    def start(self, loader: Any, total: int) -> None:
        """Refuse to begin, after a restore, when the processes' data or steps differ."""
        at = lambda: (self.step, total, loader.state())  # noqa: E731
        processes.here().check_same("training data or step", at, "give all of them the same data and run folder")

    @abstractmethod
    def steps(self, loader: Any, total: int) -> Generator[StepRecord]:
        """Train to step `total`, and yield the record of each step."""

    @abstractmethod
    def evaluate_rows(self, held_out: Sequence[Any], during_training: bool = False) -> Measured:
        """Evaluate held-out rows: whole, or as it is done during training."""

    @abstractmethod
    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays of a checkpoint, and its JSON values."""

    @abstractmethod
    def checkpoint_shapes(self, saved: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the shapes of these arrays, of a checkpoint that has the shapes `saved()`."""

    @abstractmethod
    def load_checkpoint(
        self, arrays: dict[str, Any], extra: Mapping[str, Any], step: int, changed: Mapping[str, str]
    ) -> None:
        """Restore a checkpoint made at update `step`, with which the settings `changed` differ."""
