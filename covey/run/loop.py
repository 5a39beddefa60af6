"""The loop over steps of every run: of reinforcement or supervised learning, by a recipe or a script, with a folder or
without.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from covey.run.outputs import Outputs

if TYPE_CHECKING:
    from covey.run.trainee import Trainee


def train(learner: "Trainee", loader: Any, held_out: Sequence[Any], outputs: Outputs) -> None:
    """Train `learner` on the batches of `loader`, and evaluate `held_out` before, during and after that.

    Args:
        learner: a learner of `rl` or `sft`.
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
        with outputs.training(), closing(learner.steps(loader, total)) as records:
            for record in records:
                learner.evaluate_due(record, held_out)
                learner.history.rows.append(record.metrics)
                outputs.step(record)
        if held_out:
            evaluate(learner, held_out, "after")
        outputs.end()
    finally:
        learner.outputs = former


def evaluate(learner: "Trainee", held_out: Sequence[Any], name: str) -> None:
    """Evaluate the weights before or after training."""
    learner.on_phase(f"evaluating {name} training")
    measured = learner.evaluate_rows(held_out)
    learner.evaluations = {**learner.evaluations, name: measured.metrics}
    learner.outputs.evaluation(name, measured)
