"""The loop over steps of every run: of reinforcement or supervised learning, by a recipe or a script, with a folder or
without.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

from covey.monitor.record import History, StepRecord
from covey.run.outputs import Measured, Outputs


class Trainee(Protocol):
    """A learner as the loop knows it. Attributes and methods are those of `rl.learner.Learner`."""

    step: int
    training: Any
    history: History
    outputs: Outputs
    evaluations: Any

    def begin(self, loader: Any, held_out: Sequence[Any]) -> int: ...
    def start(self, loader: Any, total: int) -> None: ...
    def steps(self, loader: Any, total: int) -> Iterator[StepRecord]: ...
    def measure(self, held_out: Sequence[Any], during_training: bool = False) -> Measured: ...
    def on_phase(self, name: str) -> None: ...


def train(learner: Trainee, loader: Any, held_out: Sequence[Any], outputs: Outputs) -> None:
    """Train `learner` on the batches of `loader`, and evaluate `held_out` before, during and after that.

    Args:
        loader: batches of training rows; its position is that of the run.
        held_out: rows of the evaluations; without any nothing is evaluated.
        outputs: what is told of the run; that of a folder restores the learner.
    """
    former, learner.outputs, learner.evaluations = learner.outputs, outputs, {}
    try:
        total = learner.begin(loader, held_out)
        if not outputs.restore(total):
            return
        learner.start(loader, total)
        if held_out and outputs.needs_before():
            evaluate(learner, held_out, "before")
        outputs.begin()
        with outputs.training(), closing(learner.steps(loader, total)) as records:  # type: ignore[type-var]
            for record in records:
                if held_out and record.due(learner.training.eval_every_n_steps):
                    record.metrics.update(evaluate_step(learner, held_out))
                learner.history.rows.append(record.metrics)
                outputs.step(record)
        if held_out:
            evaluate(learner, held_out, "after")
        outputs.end()
    finally:
        learner.outputs = former


def evaluate(learner: Trainee, held_out: Sequence[Any], name: str) -> None:
    """Evaluate the weights before or after training."""
    learner.on_phase(f"evaluating {name} training")
    measured = learner.measure(held_out)
    learner.evaluations = {**learner.evaluations, name: measured.metrics}
    learner.outputs.evaluation(name, measured)


def evaluate_step(learner: Trainee, held_out: Sequence[Any]) -> dict[str, float]:
    """Evaluate the weights of a step; return the metrics under the names that they have in its row."""
    learner.on_phase("evaluate")
    metrics = learner.measure(held_out, during_training=True).metrics
    return {f"eval/{name}": float(value) for name, value in metrics.items() if value is not None}
