"""A whole run of supervised training from its recipe: load, evaluate, train, evaluate, write down.

The folder is like that of an RL run: `recipe.yaml` says what was asked, `metrics.jsonl` what happened, `before.jsonl`
and `after.jsonl` hold answers to held-out prompts, `checkpoints/` how to go on, `summary.json` what came of it.
"""

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covey import recipe as recipes
from covey.data import source as data_source
from covey.errors import CoveyError
from covey.parallel import mesh_for
from covey.recipe import SFTRecipe
from covey.rl.rollout import RolloutWorker
from covey.run.opening import CHECKPOINTS, load_source, open_model, refuse_other_weights
from covey.run.use import answer_examples
from covey.train.checkpoint import Checkpointer
from covey.train.metrics import METRICS, SUMMARY, MetricsWriter, write_answers, write_summary
from covey.train.progress import Progress
from covey.train.sft import SFTLearner, StepRecord, total_steps
from covey.train.trackers import Tracked, Trackers
from covey.train.trainer import Trainer

ANSWERS = "after.jsonl"


def train(ready: SFTRecipe, out: Path) -> dict[str, Any]:
    """Runs `ready` in the new folder `out`; returns what `summary.json` says."""
    run = _Run(ready, out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(recipes.to_yaml(ready), encoding="utf-8")
    try:
        return run.go()
    except CoveyError:
        metrics = out / METRICS
        if not metrics.exists() or not metrics.stat().st_size:
            shutil.rmtree(out)  # nothing was learnt in it, and the corrected command will want the name
        raise


def resume(folder: Path) -> dict[str, Any]:
    """Goes on from the last checkpoint in `folder` (from the start when there is none); the result is that of a run
    never stopped.
    """
    return _Run(recipes.load(folder, (), SFTRecipe), folder, resuming=True).go()


def evaluate(source: str, ready: SFTRecipe) -> dict[str, Any]:
    """The held-out loss of the model or run at `source` and some of its answers; prints and returns the figures."""
    held_out = data_source.load_examples(ready.data).test
    with Progress(0) as progress:
        model, tokenizer = open_model(source, ready.model, progress.phase)
        progress.phase("evaluating")
        learner = SFTLearner(model=model, tokenizer=tokenizer, config=ready.training, observers=[])
        chosen = learner.fit(held_out, HELD_OUT).examples[: ready.evaluation.prompts or None]
        figures = learner.held_out_loss(chosen) | {"examples": len(chosen)}
        figures |= answer_examples(RolloutWorker(model, tokenizer, ready.rollout), chosen, ready, progress)[0]
        progress.evaluation(source, figures)
    return figures


class _Run:
    """One run in its folder."""

    def __init__(self, ready: SFTRecipe, out: Path, resuming: bool = False):
        self.recipe, self.out, self.resuming = ready, out, resuming
        self.started = time.monotonic()
        self.mesh = mesh_for(ready.model.mesh)
        self.data = data_source.load_examples(ready.data)

    def go(self) -> dict[str, Any]:
        training = self.recipe.training
        self.progress = Progress(0, headline="loss", show=training.show, answers=ANSWERS)
        with Checkpointer(self.out / CHECKPOINTS, training.max_to_keep) as self.saves:
            at = (self.saves.latest() or 0) if self.resuming else None
            tracked = Tracked(self.out, asdict(self.recipe), at)
            trackers = Trackers(self.recipe.tracking, tracked, self.progress.phase)
            with MetricsWriter(self.out, resume_at=at) as self.writer, self.progress, trackers as self.trackers:
                return self._go()

    def _go(self) -> dict[str, Any]:
        learner = self._learner()
        trainer = self._prepare(learner)
        self._restore(learner, trainer)
        summary = self._written() or self._beginning(learner)
        write_summary(self.out, summary)
        learner.train(self.loader, self.held_out)
        if self.saves.latest() != learner.step:
            self._save(learner, trainer)
        after = self._judged(learner, "after")
        seconds = time.monotonic() - self.started
        summary |= {"after": after, "steps": learner.step, "seconds": round(seconds, 1)}
        self.saves.wait()
        write_summary(self.out, summary)
        self.progress.done(summary, self.out)
        return summary

    def _learner(self) -> SFTLearner:
        ready, say = self.recipe, self.progress.phase
        model, tokenizer, self.origin = load_source(ready.model, ready.model.source, say, ready.seed, self.mesh)
        self.worker = RolloutWorker(model, tokenizer, ready.rollout)
        learner = SFTLearner(
            model=model,
            tokenizer=tokenizer,
            config=ready.training,
            mesh=self.mesh,
            seed=ready.seed,
            observers=[self._write, self._show],
            on_phase=say,
        )
        learner.observers.append(lambda record: self._save_when_due(learner, record))
        return learner

    def _prepare(self, learner: SFTLearner) -> Trainer:
        """Everything that depends on how many examples fit."""
        self.fitted = learner.fit(self.data.train)
        self.held_out = learner.fit(self.data.test, HELD_OUT).examples[: self.recipe.evaluation.prompts or None]
        self.loader = learner.loader(self.fitted.examples)
        self.progress.total = total_steps(self.recipe.training, len(self.loader))
        return learner.prepare(self.progress.total)

    def _beginning(self, learner: SFTLearner) -> dict[str, Any]:
        fitted = self.fitted
        data = {"examples": len(fitted.examples), "dropped": fitted.dropped, "truncated": fitted.truncated}
        if fitted.dropped or fitted.truncated:
            self.progress.phase(f"examples longer than max_length: {fitted.dropped} dropped, {fitted.truncated} cut")
        return {"model": self.origin, "data": data, "before": self._judged(learner, "before")}

    def _judged(self, learner: SFTLearner, name: str) -> dict[str, Any]:
        """The figures before or after training; the answers go to a file."""
        self.progress.phase(f"evaluating {name} training")
        assert learner.trainer is not None
        self.worker.update_params(learner.trainer.params)
        answered, groups = answer_examples(self.worker, self.held_out, self.recipe, self.progress)
        figures = learner.held_out_loss(self.held_out) | {"examples": len(self.held_out)} | answered
        self.progress.evaluation(name, figures)
        self.trackers.log(learner.step, {f"eval/{what}": value for what, value in figures.items()})
        write_answers(self.out, name, groups)
        return figures

    def _write(self, record: StepRecord) -> None:
        self.writer.step(record.metrics)
        self.trackers.log(record.step, record.metrics)

    def _show(self, record: StepRecord) -> None:
        self.progress.step(record.metrics)

    def _save_when_due(self, learner: SFTLearner, record: StepRecord) -> None:
        if record.due(self.recipe.training.checkpoint_every_n_steps):
            assert learner.trainer is not None
            self._save(learner, learner.trainer)

    def _save(self, learner: SFTLearner, trainer: Trainer) -> None:
        seconds = time.monotonic() - self.started
        extra = {"data": self.loader.state(), "model": self.origin, "seconds": seconds}
        self.saves.save(learner.step, trainer.state(), extra)

    def _restore(self, learner: SFTLearner, trainer: Trainer) -> None:
        if not self.resuming:
            return
        if self.saves.latest() is None:
            self.progress.phase("no checkpoint was written yet: starting from the beginning")
            return
        state, extra = self.saves.restore(target=trainer.state())
        refuse_other_weights(extra["model"], self.origin, self.out)
        self.started -= extra["seconds"]
        learner.step = self.saves.latest() or 0
        trainer.load_state(state, learner.step)
        self.loader.restore(extra["data"])

    def _written(self) -> dict[str, Any] | None:
        path = self.out / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if self.resuming and path.is_file() else None


HELD_OUT = "held-out data"
