"""Execute a supervised run from its recipe: load, evaluate, train, evaluate, write the results. `base.Run` has the
loop.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from covey.config.recipe import SFTRecipe
from covey.config.recipe import load as load_recipe
from covey.data import Dataset
from covey.data import sources as data_source
from covey.data.rows import Row
from covey.display import show_log
from covey.monitor.progress import Progress
from covey.monitor.record import StepRecord, total_steps
from covey.monitor.run_files import AFTER, METRICS
from covey.monitor.writer import Correct
from covey.parallel import distributed
from covey.parallel.sharding import on_own_devices
from covey.rewards import check_evaluation_columns
from covey.run.base import Run, RunResources
from covey.run.inference import (
    answer_examples,
    answering_worker,
    console_of_process,
    refuse_other_inputs,
    select_answerable,
)
from covey.run.load_model import available_mesh, load_for
from covey.sft.learner import SFTLearner
from covey.train.json_lines import require_entry
from covey.train.trainer import Trainer
from covey.types import Group


def train(recipe: SFTRecipe, out: Path) -> dict[str, Any]:
    """Run `recipe` in the new folder `out`; return the content of `summary.json`."""
    return SFTRun.start(recipe, out)


def resume(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Resume from the last checkpoint in `folder` (from the start when there is none); the result equals that of an
    uninterrupted run. `overrides` change its recipe, where changes are allowed (`settings`).
    """
    return SFTRun.resume(load_recipe(folder, overrides, SFTRecipe), folder)


def evaluate(source: str, recipe: SFTRecipe) -> dict[str, Any]:
    """Evaluate the held-out loss of the model or run at `source` and some answers; print and return the metrics.

    The loss is computed on the mesh of all processes. Each answers its share of the examples, with a copy of the model
    on its devices.
    """
    held_out = SFTRun.load_data(recipe).test
    refuse_other_inputs(recipe, held_out)
    with Progress(0, console_of_process()) as progress, show_log(progress.phase, progress.message):
        mesh = available_mesh(recipe.model.mesh)
        model, tokenizer, origin = load_for(recipe, mesh, source)
        distributed.refuse_differences("model", lambda: origin, "the same weights for all of them")
        progress.phase("evaluating")
        learner = SFTLearner(model=model, tokenizer=tokenizer, config=recipe.training, mesh=mesh, observers=[])
        chosen = learner.fit(held_out, HELD_OUT).examples[: recipe.evaluation.prompts or None]
        metrics = learner.held_out_loss(chosen) | {"examples": len(chosen)}
        del learner  # on accelerators it has stacks of the model's layers
        worker = answering_worker(model, tokenizer, recipe.rollout)
        answerable = select_answerable(worker, chosen, recipe.evaluation.answers)
        if answerable:
            worker.update_params(on_own_devices(worker.params))
        metrics |= answer_examples(worker, answerable, recipe, progress)[0]
        progress.evaluation(source, metrics)
    return metrics


class SFTLearnerRun(Run[SFTRecipe]):
    """A supervised run in its folder, wherever its learner comes from: a recipe or a script.

    Attributes:
        learner: trains; a subclass makes it or gets it.
        trainer: the learner's trainer.
        held_out: examples of the held-out loss.
    """

    headline, answers, step_files = "loss", AFTER, (METRICS,)
    learner: SFTLearner
    trainer: Trainer
    held_out: Sequence[Row]

    def train(self) -> None:
        self.learner.train(self.loader, self.held_out or None)

    @property
    def step(self) -> int:
        return self.learner.step

    def state(self) -> Any:
        return self.trainer.state()

    def state_shapes(self) -> Any:
        return self.trainer.state_shapes()

    def checkpoint_metadata(self) -> dict[str, Any]:
        return {"skipped": self.learner.nonfinite_guard.skipped}

    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        self.learner.step, self.learner.nonfinite_guard.skipped = step, require_entry(extra, "skipped", int)
        self.trainer.load_state(state, step)

    def show(self, record: StepRecord) -> None:
        """Show a step."""
        self.progress.step(record.metrics)


class SFTRun(SFTLearnerRun):
    """A supervised run by its recipe."""

    def __init__(self, recipe: SFTRecipe, data: Dataset, mesh: Mesh | None, resources: RunResources):
        super().__init__(recipe, data, mesh, resources)
        model, tokenizer, self.origin = load_for(recipe, mesh)
        distributed.refuse_differences("model", lambda: self.origin, "the same weights for all of them")
        self.learner = SFTLearner(
            model=model,
            tokenizer=tokenizer,
            config=recipe.training,
            mesh=mesh,
            seed=recipe.seed,
            observers=[self.write, self.show, self.after_step],
            on_phase=self.phase,
            on_bad_batch=self.folder.keep_bad_batch,
        )
        self.worker = answering_worker(self.learner.program_model, tokenizer, recipe.rollout)
        self.fitted = self.learner.fit(data.train)
        self.held_out = self.learner.fit(data.test, HELD_OUT).examples[: recipe.evaluation.prompts or None]
        self.answerable = select_answerable(self.worker, self.held_out, recipe.evaluation.answers)
        self.loader = self.learner.loader(self.fitted.examples)
        self.total = total_steps(recipe.training, len(self.loader))
        self.trainer = self.learner.prepare(self.total)

    @classmethod
    def load_data(cls, recipe: SFTRecipe) -> Dataset:
        data = data_source.load_examples(recipe.data)
        if recipe.evaluation.answers:
            check_evaluation_columns(recipe.evaluation, data.test)
        return data

    def initial_summary(self) -> dict[str, Any]:
        fitted = self.fitted
        if fitted.dropped or fitted.truncated:
            self.phase(f"examples longer than max_length: {fitted.dropped} dropped, {fitted.truncated} cut")
        data = {"examples": len(fitted.examples), "dropped": fitted.dropped, "truncated": fitted.truncated}
        return {"model": self.origin, "data": data}

    def evaluate(self, name: str) -> dict[str, Any]:
        self.phase(f"evaluating {name} training")
        answered, groups, correct = self._answer()
        metrics = self.learner.held_out_loss(self.held_out) | {"examples": len(self.held_out)} | answered
        self.progress.evaluation(name, metrics)
        self.resources.trackers.log(self.step, {f"eval/{what}": value for what, value in metrics.items()})
        self.folder.write_answers(name, groups, correct)
        return metrics

    def _answer(self) -> tuple[dict[str, Any], Sequence[Group], Correct]:
        """Answer held-out examples with the current weights; several processes have copies of them meanwhile."""
        params = self.trainer.params
        self.worker.update_params(on_own_devices(params) if self.answerable else params)
        answers = answer_examples(self.worker, self.answerable, self.recipe, self.progress)
        self.worker.update_params(params)
        return answers


HELD_OUT = "held-out data"
