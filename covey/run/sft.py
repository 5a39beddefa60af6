"""Execute a supervised run from its recipe: load, evaluate, train, evaluate, write the results. `base.Run` has the
loop.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config.recipe import SFTRecipe
from covey.config.recipe import load as load_recipe
from covey.data import Dataset
from covey.data import sources as data_source
from covey.display import show_log
from covey.rewards import check_columns
from covey.rl.evaluate import judges
from covey.run.base import Run
from covey.run.inference import answer_examples, answerable, answering_worker
from covey.run.load_model import load_source, mesh_at_hand, open_model
from covey.sft.learner import SFTLearner
from covey.train.loop import StepRecord, total_steps
from covey.train.metrics import METRICS, write_answers
from covey.train.progress import Progress


def train(ready: SFTRecipe, out: Path) -> dict[str, Any]:
    """Run `ready` in the new folder `out`; return the content of `summary.json`."""
    return SFTRun(ready, out).begin()


def resume(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Resume from the last checkpoint in `folder` (from the start when there is none); the result equals that of an
    uninterrupted run. `overrides` change its recipe, where changes are allowed (`settings`).
    """
    return SFTRun(load_recipe(folder, overrides, SFTRecipe), folder, resuming=True).take_up()


def evaluate(source: str, ready: SFTRecipe) -> dict[str, Any]:
    """Evaluate the held-out loss of the model or run at `source` and some answers; print and return the metrics."""
    held_out = _data(ready).test
    with Progress(0) as progress, show_log(progress.phase, progress.message):
        mesh = mesh_at_hand(ready.model.mesh)
        model, tokenizer = open_model(source, ready.model, mesh)
        progress.phase("evaluating")
        learner = SFTLearner(model=model, tokenizer=tokenizer, config=ready.training, mesh=mesh, observers=[])
        chosen = learner.fit(held_out, HELD_OUT).examples[: ready.evaluation.prompts or None]
        figures = learner.held_out_loss(chosen) | {"examples": len(chosen)}
        worker = answering_worker(model, tokenizer, ready.rollout)
        asked = answerable(worker, chosen, ready.evaluation.answers)
        figures |= answer_examples(worker, asked, ready, progress)[0]
        progress.evaluation(source, figures)
    return figures


class SFTRun(Run[SFTRecipe]):
    """A supervised run in its folder."""

    headline, answers, rows = "loss", "after.jsonl", (METRICS,)

    def __init__(self, ready: SFTRecipe, out: Path, resuming: bool = False):
        super().__init__(ready, out, resuming)
        self.data = _data(ready)

    def prepare(self) -> int:
        ready = self.recipe
        model, tokenizer, self.origin = load_source(ready.model, ready.model.source, ready.seed, self.mesh)
        self.worker = answering_worker(model, tokenizer, ready.rollout)
        self.learner = SFTLearner(
            model=model,
            tokenizer=tokenizer,
            config=ready.training,
            mesh=self.mesh,
            seed=ready.seed,
            observers=[self.write, self._show, self.after_step],
            on_phase=self.phase,
            on_bad_batch=self.keep_bad_batch,
        )
        self.fitted = self.learner.fit(self.data.train)
        self.held_out = self.learner.fit(self.data.test, HELD_OUT).examples[: ready.evaluation.prompts or None]
        self.asked = answerable(self.worker, self.held_out, ready.evaluation.answers)
        self.loader = self.learner.loader(self.fitted.examples)
        total = total_steps(ready.training, len(self.loader))
        self.trainer = self.learner.prepare(total)
        return total

    def beginning(self) -> dict[str, Any]:
        fitted = self.fitted
        if fitted.dropped or fitted.truncated:
            self.phase(f"examples longer than max_length: {fitted.dropped} dropped, {fitted.truncated} cut")
        data = {"examples": len(fitted.examples), "dropped": fitted.dropped, "truncated": fitted.truncated}
        return {"model": self.origin, "data": data}

    def judged(self, name: str) -> dict[str, Any]:
        self.phase(f"evaluating {name} training")
        self.worker.update_params(self.trainer.params)
        answered, groups = answer_examples(self.worker, self.asked, self.recipe, self.progress)
        figures = self.learner.held_out_loss(self.held_out) | {"examples": len(self.held_out)} | answered
        self.progress.evaluation(name, figures)
        self.trackers.log(self.step, {f"eval/{what}": value for what, value in figures.items()})
        write_answers(self.out, name, groups)
        return figures

    def steps(self) -> None:
        self.learner.train(self.loader, self.held_out)

    @property
    def step(self) -> int:
        return self.learner.step

    def state(self) -> Any:
        return self.trainer.state()

    def remembers(self) -> dict[str, Any]:
        return {"skipped": self.learner.nonfinite_guard.made}

    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        self.learner.step, self.learner.nonfinite_guard.made = step, int(extra["skipped"])
        self.trainer.load_state(state, step)

    def _show(self, record: StepRecord) -> None:
        self.progress.step(record.metrics)


def _data(ready: SFTRecipe) -> Dataset:
    data = data_source.load_examples(ready.data)
    if ready.evaluation.answers:
        check_columns(judges(ready.evaluation), data.test)
    return data


HELD_OUT = "held-out data"
