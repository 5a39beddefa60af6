"""A whole RL run from its recipe: load, evaluate, train, evaluate, write down.

The run folder is the run: `recipe.yaml` says what was asked, `metrics.jsonl` and `samples.jsonl` what happened,
`before.jsonl` and `after.jsonl` what it answered to held-out prompts, `checkpoints/` how to go on, `summary.json` what
came of it. Of several processes the first writes it, and shows progress; all read it to go on.
"""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from covey import recipe as recipes
from covey.algorithms import algorithm_of
from covey.data import source as data_source
from covey.data.loader import PromptLoader
from covey.errors import CoveyError
from covey.evaluate import Evaluation, during_training
from covey.models.decoder import Decoder
from covey.models.heads import ValueModel, load_value_model, value_model
from covey.models.lora import with_lora, without_lora
from covey.parallel import distributed, mesh_for
from covey.recipe import Recipe
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner, StepRecord, total_steps
from covey.rl.ppo import PPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.run.opening import CHECKPOINTS, load_source, refuse_other_weights
from covey.run.use import fitting, judge_held_out
from covey.train.checkpoint import Checkpointer
from covey.train.metrics import METRICS, SUMMARY, MetricsWriter, prompt_text, write_answers, write_summary
from covey.train.progress import Progress, SampleLine
from covey.train.trackers import Tracked, Trackers
from covey.types import Group


def train(ready: Recipe, out: Path) -> dict[str, Any]:
    """Runs `ready` in the new folder `out`; returns what `summary.json` says."""
    run = _Run(ready, out)
    if run.writes:
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.yaml").write_text(recipes.to_yaml(ready), encoding="utf-8")
    try:
        return run.go()
    except CoveyError:
        if run.writes and not (out / METRICS).stat().st_size:
            shutil.rmtree(out)  # nothing was learnt in it, and the corrected command will want the name
        raise


def resume(folder: Path) -> dict[str, Any]:
    """Goes on from the last checkpoint in `folder` (from the start when there is none); the result is that of a run
    never stopped.
    """
    return _Run(recipes.load(folder), folder, resuming=True).go()


class _Run:
    """One run in its folder."""

    def __init__(self, ready: Recipe, out: Path, resuming: bool = False):
        self.recipe, self.out, self.resuming = ready, out, resuming
        self.started, self.writes = time.monotonic(), distributed.is_first()
        distributed.refuse_differences("recipe", lambda: recipes.to_yaml(ready), "the same command for all")
        distributed.refuse_uneven(ready.training.prompts_per_step)
        self.mesh = mesh_for(ready.model.mesh)
        self.data = data_source.load(ready.data)
        self.loader = PromptLoader(self.data.train, ready.training.prompts_per_step, seed=ready.seed)

    def go(self) -> dict[str, Any]:
        training = self.recipe.training
        with Checkpointer(self.out / CHECKPOINTS, training.max_to_keep, read_only=not self.writes) as self.saves:
            self.last = distributed.agreed(self.saves.latest(), "last checkpoint")
            at = (self.last or 0) if self.resuming else None
            with MetricsWriter(self.out, resume_at=at) if self.writes else nullcontext() as self.writer:
                return self._go()

    def _go(self) -> dict[str, Any]:
        with (
            Progress(0, None if self.writes else Console(quiet=True), show=self.recipe.training.show) as self.progress,
            self._trackers() as self.trackers,
        ):
            cluster, origin = self._cluster()
            dropped = self._drop_too_long(cluster)
            learner = self._learner(cluster)
            total = total_steps(self.recipe.training, self.recipe.grpo, len(self.loader))
            learner.prepare(total)
            self.progress.total = total
            self.origin = origin
            learner.check_prompts(self.loader.rows)
            self._restore(learner)
            written = distributed.agreed(self._written(), "summary")
            beginning = {"model": origin, "data": {"prompts": len(self.loader.rows), "dropped": dropped}}
            summary = written or beginning | {"before": self._judged(learner, "before").summary()}
            self._summarise(summary)
            learner.train(self.loader, self.data.test)
            if self.saves.latest() != learner.step:
                self._save(learner)
            after = self._judged(learner, "after").summary()
            seconds = time.monotonic() - self.started
            summary |= {"after": after, "steps": learner.step, "seconds": round(seconds, 1)}
            self.saves.wait()
            self._summarise(summary)
            self.progress.done(summary, self.out)
        return summary

    def _cluster(self) -> tuple[RLCluster, str]:
        ready, say = self.recipe, self.progress.phase
        model, tokenizer, origin = load_source(ready.model, ready.model.source, say, ready.seed, self.mesh)
        reward = load_value_model(ready.reward_model, say=say).model if ready.reward_model else None
        critic = self._critic(model) if algorithm_of(ready.grpo).has_critic else None
        config = ClusterConfig({} if self.mesh is None else {Role.ACTOR: self.mesh}, ready.training, ready.rollout)
        return RLCluster(actor=model, critic=critic, reward=reward, tokenizer=tokenizer, cluster_config=config), origin

    def _critic(self, actor: Decoder) -> ValueModel:
        """The critic that the recipe names, or the actor's base with a new head; with adapters where the actor has
        some.
        """
        ready, options = self.recipe, self.recipe.model
        if ready.critic:
            base = load_value_model(
                ready.critic,
                new_head=True,
                say=self.progress.phase,
                param_dtype=options.dtype,
                compute_dtype=options.compute_dtype,
                remat=options.remat,
                scan_layers=options.scan_layers,
            ).model
        else:
            base = value_model(without_lora(actor), share=bool(options.lora.rank))
        return with_lora(base, options.lora, seed=ready.seed + 1) if options.lora.rank else base

    def _learner(self, cluster: RLCluster) -> Learner:
        ready = self.recipe
        common: dict[str, Any] = {
            "rl_cluster": cluster,
            "reward_fns": ready.rewards,
            "on_phase": self.progress.phase,
            "eval_config": during_training(ready.evaluation),
            "observers": [self._write, self._show] if self.writes else [],
        }
        learner: Learner
        if algorithm_of(ready.grpo).has_critic:
            learner = PPOLearner(ppo_config=ready.grpo, **common)
        else:
            learner = GRPOLearner(grpo_config=ready.grpo, **common)
        learner.observers.append(lambda record: self._save_when_due(learner, record))
        return learner

    def _drop_too_long(self, cluster: RLCluster) -> int:
        """Leaves rows out whose prompt is too long, where the recipe says so; hands back how many."""
        train, test = (fitting(rows, cluster.tokenizer, self.recipe) for rows in (self.data.train, self.data.test))
        if dropped := len(self.data.train) + len(self.data.test) - len(train) - len(test):
            self.progress.phase(f"{dropped} prompts longer than rollout.max_prompt_length are left out")
            self.loader = PromptLoader(train, self.recipe.training.prompts_per_step, seed=self.recipe.seed)
            self.data = replace(self.data, train=train, test=test)
        return dropped

    def _trackers(self) -> Trackers:
        at = (self.last or 0) if self.resuming else None
        names = self.recipe.tracking if self.writes else ()
        return Trackers(names, Tracked(self.out, asdict(self.recipe), at), self.progress.phase)

    def _judged(self, learner: Learner, name: str) -> Evaluation:
        self.progress.phase(f"evaluating {name} training")
        found = judge_held_out(learner.cluster, self.data.test, self.recipe, self.progress)
        self.progress.evaluation(name, found.summary(), _lines(found.groups))
        if self.writes:
            self.trackers.log(learner.step, {f"eval/{what}": value for what, value in found.summary().items()})
            write_answers(self.out, name, found.groups)
            for preset, other in found.others.items():
                write_answers(self.out, f"{name}-{preset}", other.groups)
        return found

    def _summarise(self, summary: dict[str, Any]) -> None:
        if self.writes:
            write_summary(self.out, summary)

    def _write(self, record: StepRecord) -> None:
        assert self.writer is not None, "the first process observes steps"
        self.writer.step(record.metrics)
        self.writer.samples(record.step, record.groups)
        self.trackers.log(record.step, record.metrics)

    def _show(self, record: StepRecord) -> None:
        self.progress.step(record.metrics, _lines(record.groups), record.updates)

    def _save_when_due(self, learner: Learner, record: StepRecord) -> None:
        if record.due(self.recipe.training.checkpoint_every_n_steps):
            learner.refuse_other_weights()
            self._save(learner)

    def _save(self, learner: Learner) -> None:
        if not self.writes:
            return
        seconds = time.monotonic() - self.started
        extra = {"data": self.loader.state(), "model": self.origin, "seconds": seconds, "learner": learner.state()}
        self.saves.save(learner.step, learner.cluster.state(), extra)

    def _restore(self, learner: Learner) -> None:
        if not self.resuming:
            return
        if self.last is None:
            self.progress.phase("no checkpoint was written yet: starting from the beginning")
            return
        state, extra = self.saves.restore(self.last, target=learner.cluster.state())
        refuse_other_weights(extra["model"], self.origin, self.out)
        self.started -= extra["seconds"]
        learner.cluster.load_state(state, self.last)
        learner.load_state(extra["learner"], self.last)
        self.loader.restore(extra["data"])

    def _written(self) -> dict[str, Any] | None:
        path = self.out / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if self.resuming and path.is_file() else None


def _lines(groups: Sequence[Group]) -> list[SampleLine]:
    """Scored completions as the terminal shows them."""
    return [
        SampleLine(prompt_text(g.prompt), c.text, float(r))
        for g in groups
        if g.rewards is not None
        for c, r in zip(g.completions, g.rewards, strict=True)
    ]
