"""Execute an RL run from its recipe: load, evaluate, train, evaluate, write the results. `base.Run` has the loop.

In addition to the files of every run, `samples.jsonl` holds each completion with its scores.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe
from covey.config.recipe import load as load_recipe
from covey.data import sources as data_source
from covey.data.loader import PromptLoader
from covey.models.decoder import Decoder
from covey.models.lora import with_lora, without_lora
from covey.models.value_model import ValueModel, load_value_model, value_model
from covey.parallel import distributed
from covey.rewards import RewardRunner, check_columns
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import Evaluation, during_training, judges
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner
from covey.rl.ppo import PPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.run.advice import ZeroAdvantageWarning
from covey.run.base import Run
from covey.run.inference import fitting, judge_held_out
from covey.run.load_model import CHECKPOINTS, decoder_options, load_source, refuse_other_weights, with_digest
from covey.run.settings import may_need_earlier_values, with_earlier_values
from covey.train.checkpoint import Checkpointer
from covey.train.loop import Observer, StepRecord, total_steps
from covey.train.metrics import prompt_text, write_answers
from covey.train.progress import SampleLine
from covey.types import Group

log = logging.getLogger(__name__)


def train(ready: Recipe, out: Path) -> dict[str, Any]:
    """Run `ready` in the new folder `out`; return the content of `summary.json`."""
    return RLRun(ready, out).begin()


def resume(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Resume from the last checkpoint in `folder` (from the start when there is none); the result equals that of an
    uninterrupted run. `overrides` change its recipe, where changes are allowed (`settings`).
    """
    ready = load_recipe(folder, overrides)
    with Checkpointer(folder / CHECKPOINTS, read_only=True) as saves:
        if may_need_earlier_values(ready) and saves.latest() is not None:
            ready = with_earlier_values(ready, saves.restore(target={}, subset=True)[1]["settings"])
    return RLRun(ready, folder, resuming=True).take_up()


class RLRun(Run[Recipe]):
    """An RL run in its folder."""

    def __init__(self, ready: Recipe, out: Path, resuming: bool = False):
        super().__init__(ready, out, resuming)
        distributed.refuse_uneven(ready.training.prompts_per_step)
        self.data = data_source.load(ready.data)
        check_columns(ready.rewards, self.data.train)
        check_columns((*ready.rewards, *judges(ready.evaluation)), self.data.test)
        self.loader = PromptLoader(self.data.train, ready.training.prompts_per_step, seed=ready.seed)
        self._other_models: dict[str, str] = {}

    def prepare(self) -> int:
        cluster, self.origin = self._cluster()
        self._fit_prompts(cluster)
        self.learner = self._learner(cluster)
        total = total_steps(self.recipe.training, len(self.loader), self.recipe.grpo.num_iterations)
        self.learner.prepare(total)
        self.learner.check_prompts(self.loader.rows)
        return total

    def beginning(self) -> dict[str, Any]:
        return {"model": self.origin, "data": {"prompts": len(self.loader.rows), **self._unfit}}

    def steps(self) -> None:
        self.learner.train(self.loader, self.data.test)

    @property
    def step(self) -> int:
        return self.learner.step

    def state(self) -> Any:
        return self.learner.cluster.state()

    def remembers(self) -> dict[str, Any]:
        return {"learner": self.learner.state(), "other_models": self._other_models}

    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        self.learner.cluster.load_state(state, step)
        self.learner.load_state(extra["learner"], step)

    def save(self) -> None:
        self.learner.refuse_other_weights()
        super().save()

    def refuse_another_run(self, extra: Mapping[str, Any]) -> None:
        super().refuse_another_run(extra)
        then = extra.get("other_models")
        for role, now in self._other_models.items():
            if then is None:
                log.warning(f"the run did not note what its {role} was: taking that at {now} for the same")
            elif role in then:
                refuse_other_weights(then[role], now, self.out, role)

    def _cluster(self) -> tuple[RLCluster, str]:
        ready = self.recipe
        model, tokenizer, origin = load_source(ready.model, ready.model.source, ready.seed, self.mesh)
        reward = self._value_model("reward_model", ready.reward_model) if ready.reward_model else None
        critic = self._critic(model) if algorithm_of(ready.grpo).has_critic else None
        config = ClusterConfig({} if self.mesh is None else {Role.ACTOR: self.mesh}, ready.training, ready.rollout)
        return RLCluster(actor=model, critic=critic, reward=reward, tokenizer=tokenizer, cluster_config=config), origin

    def _critic(self, actor: Decoder) -> ValueModel:
        """Return the critic that the recipe names, or the actor's base with a new value head; with adapters if the
        actor has some.
        """
        ready, options = self.recipe, self.recipe.model
        if ready.critic:
            how = decoder_options(options)
            base = self._value_model("critic", ready.critic, new_head=True, **how)
        else:
            base = value_model(without_lora(actor), share=bool(options.lora.rank))
        return with_lora(base, options.lora, seed=ready.seed + 1) if options.lora.rank else base

    def _value_model(self, role: str, source: str, **how: Any) -> ValueModel:
        """Load the model that the recipe names for `role`; record its origin, so that no resume uses another model."""
        loaded = load_value_model(source, **how)
        self._other_models[role] = with_digest(loaded.origin)
        return loaded.model

    def _learner(self, cluster: RLCluster) -> Learner:
        ready = self.recipe
        common: dict[str, Any] = {
            "rl_cluster": cluster,
            "reward_fns": ready.rewards,
            "on_phase": self.phase,
            "eval_config": during_training(ready.evaluation),
            "observers": [self._note, self._show, *self._advisers(), self.after_step],
            "on_bad_batch": self.keep_bad_batch,
            "reward_runner": self.opened(RewardRunner(ready.reward_safety, self.progress.message)),
        }
        if algorithm_of(ready.grpo).has_critic:
            return PPOLearner(ppo_config=ready.grpo, **common)
        return GRPOLearner(grpo_config=ready.grpo, **common)

    def _advisers(self) -> list[Observer]:
        """Return the observers of the steps. With a critic, groups of equal rewards still give a learning signal."""
        return [] if algorithm_of(self.recipe.grpo).has_critic else [ZeroAdvantageWarning()]

    def _fit_prompts(self, cluster: RLCluster) -> None:
        """Leave out or cut prompts that are too long, if the recipe allows it, and count them."""
        train, test = (fitting(rows, cluster.tokenizer, self.recipe) for rows in (self.data.train, self.data.test))
        self._unfit = {name: getattr(train, name) + getattr(test, name) for name in ("dropped", "truncated")}
        if any(self._unfit.values()):
            counts = " and ".join(f"{count} {name}" for name, count in self._unfit.items() if count)
            log.warning(f"prompts longer than rollout.max_prompt_length: {counts}")
            self.loader = PromptLoader(train.rows, self.recipe.training.prompts_per_step, seed=self.recipe.seed)
            self.data = replace(self.data, train=train.rows, test=test.rows)

    def judged(self, name: str) -> dict[str, Any]:
        self.phase(f"evaluating {name} training")
        found = judge_held_out(self.learner.cluster, self.data.test, self.recipe, self.progress, self.learner.runner)
        summary = found.summary()
        self.progress.evaluation(name, summary, _lines(found.groups))
        if self.writes:
            self.trackers.log(self.step, {f"eval/{what}": value for what, value in summary.items()})
            self._write_answers(name, found)
        return summary

    def _write_answers(self, name: str, found: Evaluation) -> None:
        write_answers(self.out, name, found.groups)
        for preset, other in found.others.items():
            write_answers(self.out, f"{name}-{preset}", other.groups)

    def _note(self, record: StepRecord) -> None:
        self.write(record)
        if self.writer is not None:
            self.writer.samples(record.step, record.groups)

    def _show(self, record: StepRecord) -> None:
        self.progress.step(record.metrics, _lines(record.groups), record.updates)


def _lines(groups: Sequence[Group]) -> list[SampleLine]:
    """Convert scored completions to the lines that the terminal shows."""
    return [
        SampleLine(prompt_text(g.prompt), c.text, float(r))
        for g in groups
        if g.rewards is not None
        for c, r in zip(g.completions, g.rewards, strict=True)
    ]
