"""Execute runs of supervised training, and make one from its recipe. `base.Run` has the loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from jax.sharding import Mesh

from covey.config.recipe import SFTRecipe
from covey.data import Dataset
from covey.data import sources as data_source
from covey.data.rows import Row
from covey.display import show_log
from covey.files import require_entry
from covey.monitor.progress import Progress
from covey.monitor.record import StepRecord, total_steps
from covey.monitor.run_files import AFTER, METRICS
from covey.parallel.sharding import on_local_devices
from covey.rewards import check_evaluation_columns
from covey.rl.rollout import RolloutWorker
from covey.run.base import Run, RunResources
from covey.run.inference import (
    answer_examples,
    answering_worker,
    check_same_inputs,
    console_of_process,
    count_plain,
    select_answerable,
)
from covey.run.load_model import available_mesh, load_for, load_to_train
from covey.sft.learner import SFTLearner


def evaluate(source: str, recipe: SFTRecipe) -> dict[str, Any]:
    """Evaluate the held-out loss of the model or run at `source` and some answers; print and return the metrics.

    The loss is computed on the mesh of all processes. Each answers its share of the examples, with a copy of the model
    on its devices.
    """
    held_out = SFTRun.load_data(recipe).test
    check_same_inputs(recipe, held_out)
    with Progress(0, console_of_process()) as progress, show_log(progress.phase, progress.message):
        mesh = available_mesh(recipe.model.mesh)
        model, tokenizer, _ = load_for(recipe, mesh, source)
        progress.phase("evaluating")
        learner = SFTLearner(model=model, tokenizer=tokenizer, config=recipe.training, mesh=mesh, observers=[])
        chosen = learner.fit(held_out, HELD_OUT).examples[: recipe.evaluation.prompts or None]
        metrics = learner.held_out_loss(chosen) | {"examples": len(chosen)}
        del learner  # on accelerators it has stacks of the model's layers
        worker = answering_worker(model, tokenizer, recipe.rollout)
        answerable = select_answerable(worker, chosen, recipe.evaluation.answers)
        if answerable:
            worker.update_params(on_local_devices(worker.params))
        metrics |= answer_examples(worker, answerable, recipe, progress)[0]
        progress.evaluation(source, metrics)
    return metrics


@dataclass(eq=False)
class SFTRun(Run[SFTRecipe]):
    """A run of supervised training; `held_out` has the examples of the held-out loss.

    Attributes:
        worker: answers held-out examples; None in a script's run.
        answerable: examples that it answers.
    """

    headline, answers, step_files = "loss", AFTER, (METRICS,)
    learner: SFTLearner
    worker: RolloutWorker | None = None
    answerable: Sequence[Row] = ()

    @classmethod
    def load_data(cls, recipe: SFTRecipe) -> Dataset:
        data = data_source.load_data(recipe.data)
        if recipe.evaluation.answers:
            check_evaluation_columns(recipe.evaluation, data.test)
        return data

    @classmethod
    def from_recipe(cls, recipe: SFTRecipe, data: Dataset, mesh: Mesh | None, resources: RunResources) -> Self:
        model, tokenizer, origin = load_to_train(recipe, mesh, resources.folder)
        learner = SFTLearner(
            model=model, tokenizer=tokenizer, config=recipe.training, mesh=mesh, seed=recipe.seed, observers=[]
        )
        worker = answering_worker(learner.program_model, tokenizer, recipe.rollout)
        fitted = learner.fit(data.train)
        if fitted.dropped or fitted.truncated:
            resources.phase(f"examples longer than max_length: {fitted.dropped} dropped, {fitted.truncated} cut")
        held_out = learner.fit(data.test, HELD_OUT).examples[: recipe.evaluation.prompts or None]
        answerable = select_answerable(worker, held_out, recipe.evaluation.answers)
        counts = {"examples": len(fitted.examples), "dropped": fitted.dropped, "truncated": fitted.truncated}
        loader = learner.loader(fitted.examples)
        return cls(recipe, resources, learner, loader, held_out, origin, counts, worker, answerable)

    def prepare(self) -> int:
        total = total_steps(self.recipe.training, len(self.loader))
        self.trained = self.learner.prepare(total)
        self.tokenizer, self.model_config = self.learner.tokenizer, self.learner.program_model.config
        self.counts = {**self.counts, "plain": count_plain(self.loader.rows, self.tokenizer)}
        return total

    def measure(self, name: str) -> dict[str, Any]:
        answered = {} if self.worker is None else self._answer(name, self.worker)
        metrics = self.learner.held_out_loss(self.held_out) | {"examples": len(self.held_out)} | answered
        self.progress.evaluation(name, metrics)
        return metrics

    def _answer(self, name: str, worker: RolloutWorker) -> dict[str, Any]:
        """Answer held-out examples with the current weights, of which several processes have copies meanwhile; write
        the answers, and return their metrics.
        """
        params = self.trained.params
        worker.update_params(on_local_devices(params) if self.answerable else params)
        metrics, groups, correct = answer_examples(worker, self.answerable, self.recipe, self.progress)
        worker.update_params(params)
        self.folder.write_answers(name, groups, correct)
        return metrics

    def show(self, record: StepRecord) -> None:
        self.progress.step(record.metrics)

    def checkpoint_metadata(self) -> dict[str, Any]:
        return {"skipped": self.learner.nonfinite_guard.skipped}

    def load_metadata(self, extra: Mapping[str, Any], step: int) -> None:
        self.learner.step, self.learner.nonfinite_guard.skipped = step, require_entry(extra, "skipped", int)


HELD_OUT = "held-out data"
