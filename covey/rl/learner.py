"""Training loop shared by GRPO and PPO.

Per step: sample a group of completions for each prompt, score them, replace groups without a signal, compute the
log-probs that the loss needs, estimate advantages, update, give the new weights to the rollout. Each of these is a
method, and each takes and returns data (`experience`); a debugger can stop after any of them. The first three may run
ahead of the rest, within a step (`run_ahead`) and over steps (`drawn_steps`). Observers log, print and save the results
of each step.

Several processes run the loop in lockstep (`parallel.distributed`): each samples and scores a share. All know the
numbers of tokens and the rewards of all groups (`group_table`), by which they decide alike. Each computes what belongs
to a token for its own share, and has the rows of its own devices (`packed_groups`).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from covey.config.algorithms import algorithm_of, off_policy_problems, with_correction
from covey.config.base import Keywords
from covey.config.schema import EvalConfig, GRPOConfig
from covey.data.loader import PromptLoader
from covey.data.rows import as_rows
from covey.errors import EpisodeError, NumbersError, raise_together
from covey.files import require_entry
from covey.losses.policy import Surrogate
from covey.losses.shaping import adapt_beta
from covey.monitor.record import History, Observer, OnBadBatch, StepLines, StepRecord, total_steps
from covey.packing.rows import Layout, make_layout
from covey.parallel import checks, distributed, order
from covey.rewards import (
    RewardFn,
    RewardFns,
    RewardRunner,
    check_columns,
    environment_reward,
    function_names,
    no_reward_error,
    only_one,
    resolve_reward_fns,
    score,
)
from covey.rl.cluster import RLCluster
from covey.rl.drawn_steps import Drawing, DrawnStep, Finish, RolloutsAhead, rollouts_ahead
from covey.rl.evaluate import Evaluation, during_training, evaluate
from covey.rl.experience import (
    Experience,
    NextPrompts,
    PromptBatch,
    RolloutBatch,
    make_train_batch,
    penalize_length,
    prompt_batches,
    split_by_reward_variance,
)
from covey.rl.group_table import GroupTable, gather_table
from covey.rl.metrics import Clock
from covey.rl.micro_batches import AGREEMENT, TrainBatch, gather_batches, slices
from covey.rl.packed_groups import PackedGroups
from covey.rl.roles import Role
from covey.rl.run_ahead import Replay, run_ahead
from covey.rl.stage_sizes import stage_sizes
from covey.rl.step_stats import FailureCounts, StepStats, gather_step_stats, step_metrics
from covey.sampling.model_runner import SamplerStats
from covey.train.trainer import Metrics, NonFiniteGuard
from covey.types import Group

log = logging.getLogger(__name__)


class Learner(Keywords, ABC):
    """Train the cluster's actor; `GRPOLearner` and `PPOLearner` define the algorithm.

    Args:
        config: the algorithm.
        rl_cluster: the models.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or the names of built-in
            ones. The reward of the cluster's environment is added before them, its reward model after them.
        reward_funcs: alias of `reward_fns`, as in TRL.
        surrogate_fn: `fn(ratio, logps, advantage, algorithm)`, instead of the algorithm's surrogate.
        observers: called with a `StepRecord` after each step, in order. When not given, one line per step is printed.
        on_phase: called with the name of each phase as it begins, in the thread in which it does.
        eval_config: settings of the evaluations.
        reward_runner: sets where reward functions run and how their failures are handled. When not given, they run in
            this process and the first failure is raised.
        on_bad_batch: called with the batch of an update whose loss or gradient is not finite, and the error.

    Attributes:
        history: metrics of the steps.
        drawn: steps whose samples a checkpoint has, and which are not drawn again.
        before_update: called with each experience whose advantages are estimated, before the updates on it.

    Raises:
        RecipeError: settings contradict each other, a stage size is invalid, or a reward is unknown.
    """

    def __init__(
        self,
        config: GRPOConfig,
        /,
        *,
        rl_cluster: RLCluster,
        reward_fns: RewardFns | None = None,
        reward_funcs: RewardFns | None = None,
        surrogate_fn: Surrogate | None = None,
        observers: Sequence[Observer] | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        eval_config: EvalConfig | None = None,
        reward_runner: RewardRunner | None = None,
        on_bad_batch: OnBadBatch = lambda step, groups, arrays, error: None,
    ):
        self.lead = rl_cluster.config.training_config.off_policy_steps
        config = with_correction(config, self.lead)
        self.cluster, self.config, self.surrogate_fn = rl_cluster, config, surrogate_fn
        show = ("reward", "completions/mean_length", *rl_cluster.config.training_config.show, "grad_norm", "step_time")
        standard = [StepLines(show)] if distributed.is_first() else []
        self.observers: list[Observer] = list(standard if observers is None else observers)
        self.history = History()
        self.on_phase, self.on_bad_batch, self.eval_config = on_phase, on_bad_batch, eval_config or EvalConfig()
        self.step, self._prompts, self._prompts_checked, self._rehearsed = 0, 0, False, False
        self._staleness = 0
        self.before_update: Callable[[Experience], None] = lambda experience: None
        self._ahead: RolloutsAhead | None = None
        self.drawn: Sequence[DrawnStep] = ()
        self.algorithm = algorithm_of(config)
        self.stats = StepStats()
        training = rl_cluster.config.training_config
        self._nonfinite_guard = NonFiniteGuard(training.skip_nonfinite)
        self.beta, self.sizes = self.algorithm.beta, stage_sizes(training, config.num_generations)
        if self.lead and self.algorithm.correction == "none":
            log.warning("grpo.correction is none: updates take samples of earlier weights for those of the last ones")
        self.reward_fns = self._reward_fns(only_one(reward_fns, reward_funcs))
        self.runner = reward_runner or RewardRunner()
        self.runner.check(dict(zip(function_names(self.reward_fns), self.reward_fns, strict=True)))
        self._failures = FailureCounts(self.runner, rl_cluster.rollout.environments)

    @abstractmethod
    def estimate_advantages(self, experience: Experience) -> Experience:
        """Compute advantages, and returns if there is a critic."""

    def update(self, batches: Iterable[TrainBatch]) -> Metrics:
        """Make one optimizer step on all of `batches`, some of which may still have to be made (`Replay`)."""
        return self.cluster.update_actor(batches)

    def train(self, train_ds: Any, eval_ds: Any = None) -> RLCluster:
        """Train for `max_steps` updates, or through the data `num_epochs` times, or until a finite loader ends.

        Args:
            train_ds: rows with a `prompt` and any other columns, in any of the forms `data.loader.as_rows` takes, or a
                ready `PromptLoader` (whose position a resumed run has restored).
            eval_ds: rows for the held-out evaluation every `eval_every_n_steps`.

        Raises:
            DataError: the rows have an unknown form, or a prompt cannot be sampled.
            RewardError: a reward function needs a column that the data lack.
        """
        return self.train_steps(self.loader(train_ds), None if eval_ds is None else as_rows(eval_ds))

    def train_steps(self, loader: PromptLoader, held_out: Sequence[Any] | None = None) -> RLCluster:
        """Train as `train` does, on ready batches and rows, and do nothing before or after the steps."""
        total = self._begin(loader, held_out)
        with closing(self._steps_ahead(loader, total) if self.lead else self._steps(loader, total)) as records:
            for record in records:
                self._prompts = loader.position
                self._adapt_to_kl(record)
                self._report(record, held_out)
        return self.cluster

    def _steps(self, loader: PromptLoader, total: int) -> Generator[StepRecord]:
        """Train step by step, each on samples of the last weights."""
        while self.step < total and (examples := next(loader, None)) is not None:
            yield self.train_step(examples, loader.take, total)

    def _steps_ahead(self, loader: PromptLoader, total: int) -> Generator[StepRecord]:
        """Train step by step, each on samples that may be `off_policy_steps` steps old."""
        rows = copy(loader)
        rows.take(len(self.drawn) * self._prompts_of_step)
        steps = range(self.step + len(self.drawn), total)
        draw, on_phase = partial(self._draw_step, rows), self.on_phase
        with rollouts_ahead(draw, self.lead, steps, self.drawn, self.cluster, on_phase) as ahead:
            self._ahead, self.drawn = ahead, ()
            try:
                while self.step < total:
                    self._begin_step(total)
                    with self.stats.clock("sync") if ahead.takes_copies else nullcontext():
                        ahead.offer(self.step)
                    with self.stats.clock("wait"):
                        drawn = ahead.take()
                    if drawn is None:
                        return
                    loader.take(self._prompts_of_step)
                    self._staleness = self.step - drawn.version
                    yield self._end_step(self._make_updates([drawn.rollout], 1), total)
            finally:
                self._ahead = None

    def _draw_step(self, rows: PromptLoader, step: int, version: int, drawing: Drawing) -> Finish | None:
        """Sample a step, and return what scores it. It has prompts of its own for what dynamic sampling replaces, so
        that no step waits for the rewards of another; those that it does not need are not used.
        """
        own, count = rows.take(self._prompts_of_step), self.cluster.config.training_config.prompts_per_step
        if not own:
            return None
        prompts, reserve = PromptBatch(step, 0, own[:count]), iter(own[count:])
        with drawing():
            sampled = self.sample(prompts)

        def finish() -> DrawnStep:
            scored = self.score(sampled)
            rollout = self.replace_tied(scored, prompts, lambda missing: list(islice(reserve, missing)), drawing)
            return DrawnStep(version, rollout, *self._failures.agree(rollout.env_failed))

        return finish

    @property
    def _prompts_of_step(self) -> int:
        """Number of prompts of a step whose samples are drawn ahead, those that may replace others included."""
        return self.cluster.config.training_config.prompts_per_step * self.algorithm.max_sampling_rounds

    def train_step(self, examples: Sequence[Mapping[str, Any]], next_prompts: NextPrompts, total: int) -> StepRecord:
        """Make the updates of one batch of prompts, at most `num_iterations`.

        Args:
            examples: data rows with a prompt, for all processes.
            next_prompts: returns more of them, for groups that dynamic sampling replaces.
            total: updates of the whole run.
        """
        count = self._begin_step(total)
        parts = prompt_batches(examples, self.step, self.sizes, self.algorithm.needs_whole_step)
        with run_ahead(partial(self.rollout, next_prompts=next_prompts), parts, self._depth) as rollouts:
            updates = self._make_updates(rollouts, count)
        return self._end_step(updates, total)

    def _begin_step(self, total: int) -> int:
        """Begin the record of a step, and return the number of its updates."""
        count = min(self.config.num_iterations, total - self.step)
        self.stats = StepStats(Clock(on_phase=self.on_phase))
        return count

    def _make_updates(self, rollouts: Iterable[RolloutBatch], count: int) -> list[Metrics]:
        """Make `count` updates on the groups of these rollouts."""
        batches = Replay(self.make_batches(rollouts))
        if not self._depth:
            batches.make_all()
        return self._update_repeatedly(batches, count)

    def _end_step(self, updates: list[Metrics], total: int) -> StepRecord:
        """Give the rollout the new weights, and return the record of the step."""
        if self._ahead is None or not self._ahead.takes_copies:
            with self.stats.clock("sync"), order.phase("sync", self.step):
                self.cluster.sync_weights()
        self.step += len(updates)
        return self._record(updates, total)

    def collect(self, prompts: PromptBatch, next_prompts: NextPrompts) -> Experience:
        """Return the experience of some prompts; arguments as for `rollout`."""
        return self.make_experience(self.rollout(prompts, next_prompts))

    def rollout(self, prompts: PromptBatch, next_prompts: NextPrompts) -> RolloutBatch:
        """Sample and score a group of completions for each prompt. This may run in a thread while another one trains.

        Args:
            prompts: the prompts of all processes.
            next_prompts: returns more of them, for groups that dynamic sampling replaces.
        """
        rollout = self.sample(prompts)
        rollout = self.score(rollout)
        return self.replace_tied(rollout, prompts, next_prompts)

    def make_experience(self, rollout: RolloutBatch) -> Experience:
        """Compute log-probs, values and advantages of the groups to train on."""
        return self.estimate_advantages(self.compute_logps(rollout.trained))

    def sample(self, prompts: PromptBatch) -> RolloutBatch:
        """Sample a group of completions for each prompt of this process's share; the noise follows the prompt's number,
        whatever the slices and shares.
        """
        start, local = distributed.share(prompts.examples)
        groups, stats, clock = list[Group](), SamplerStats(), Clock(on_phase=self.on_phase)
        with clock("rollout"):
            first = prompts.first + start
            for part in slices(local, self.sizes.rollout):
                groups += self.cluster.generate(part, self.config.num_generations, step=prompts.step, first=first)
                first += len(part)
                stats += self.cluster.rollout.stats
        # Without a critic a completion has to be compared with another one of its prompt.
        comparable = [g for g in groups if self.algorithm.needs_critic or len(g.completions) > 1]
        dropped, failed = len(groups) - len(comparable), self._failures.take_sampled()
        return RolloutBatch(comparable, stats=stats, dropped=dropped, env_failed=failed, seconds=clock.seconds)

    def score(self, rollout: RolloutBatch) -> RolloutBatch:
        """Compute rewards; return the groups with the numbers of those of all processes. Advantages are 0 until they
        are estimated.
        """
        limit, failed = self.cluster.config.rollout_config.max_new_tokens, dict[str, int]()
        clock = Clock(dict(rollout.seconds), on_phase=self.on_phase)
        with clock("reward"):
            groups = score(rollout.groups, self.reward_fns, self.config.reward_weights, self.runner, failed)
            groups = [penalize_length(group, self.algorithm, limit) for group in groups]
            groups = [replace(group, advantages=np.zeros(len(group.completions))) for group in groups]
        return replace(rollout, groups=groups, table=gather_table(groups), failed=failed, seconds=clock.seconds)

    def replace_tied(
        self, rollout: RolloutBatch, prompts: PromptBatch, next_prompts: NextPrompts, drawing: Drawing = nullcontext
    ) -> RolloutBatch:
        """Replace groups whose rewards are all equal by new prompts (dynamic sampling; Yu et al., 2025, section 3.2),
        until there are as many other groups as prompts or the rounds are spent. With one round nothing is replaced.
        """
        if self.algorithm.max_sampling_rounds == 1:
            return rollout
        wanted = num_sampled = len(prompts.examples)
        while True:
            differing, tied = split_by_reward_variance(rollout.table)
            missing = max(wanted - len(differing), 0)
            may_go_on = missing and rollout.rounds + 1 < self.algorithm.max_sampling_rounds
            if not may_go_on or not (fresh := next_prompts(missing)):
                return replace(rollout, indices=differing + tied[:missing], tied=missing, replaced=num_sampled - wanted)
            more = PromptBatch(prompts.step, prompts.first + num_sampled, fresh)
            with drawing():
                sampled = self.sample(more)
            rollout = replace(rollout.joined(self.score(sampled)), rounds=rollout.rounds + 1)
            num_sampled += len(fresh)

    def compute_logps(self, x: Experience) -> Experience:
        """Compute the log-probs of the reference, those before the first update, and values: each only where the
        algorithm needs it.
        """
        cluster, sizes, a = self.cluster, self.sizes, self.algorithm
        with self.stats.clock("logps"), order.phase("logps", self.step, x.table.lengths.tolist):
            packed = PackedGroups(x.groups, x.table, self._layout, cluster.row_holders)
            ref = packed.map(cluster.get_ref_per_token_logps, sizes.ref_logps, "ref") if a.needs_reference else None
            old = packed.map(cluster.get_old_per_token_logps, sizes.old_logps, "old") if a.needs_old_logps else None
            values = packed.map(cluster.get_values, sizes.ref_logps, "values") if a.needs_critic else None
        return replace(x, ref_logps=ref, old_logps=old, values=values, packed=packed)

    def _layout(self, table: GroupTable) -> Layout:
        """Assign completions to rows."""
        training = self.cluster.config.training_config
        return make_layout(
            table.shapes,
            training.row_length,
            packing=training.packing,
            max_tokens=training.max_tokens_per_micro_batch,
            compile_cost=self.cluster.compile_cost,
        )

    def make_batches(self, rollouts: Iterable[RolloutBatch]) -> Iterator[TrainBatch]:
        """Yield training micro-batches of `sizes.train` prompts, each as soon as its rollout is there."""
        for rollout in rollouts:
            experience = self.make_experience(rollout)
            self.stats.add(rollout, experience.groups)
            for batch in self._split(experience):
                if self._depth:
                    self._check_order(batch)
                yield batch
        if not self.stats.waste:
            raise EpisodeError(
                f"all {self.stats.rollout.dropped} episodes of a step began with different prompts: there is nothing "
                "to compare",
                want="several samples with equal prompts",
                fix="more samples of a row (grpo.num_generations); or draw what differs from the row",
            )

    def _begin(self, loader: PromptLoader, held_out: Sequence[Any] | None) -> int:
        """Check the data, build trainers and models, and return the number of updates of the whole run."""
        training = self.cluster.config.training_config
        total = total_steps(training, len(loader), self.config.num_iterations)
        problems = off_policy_problems(self.lead, self.config, total_steps=total)
        raise_together([problem.error("") for problem in problems])
        if training.eval_every_n_steps and not held_out:
            log.warning("training.eval_every_n_steps is set, and there are no held-out rows: nothing is evaluated")
        self.check_data(loader.rows, held_out if training.eval_every_n_steps else ())
        self.prepare(total)
        self._check_same_start(loader, total)
        self.rehearse(loader.rows)
        return total

    def rehearse(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rehearse the environment of a run that begins, once; a run that goes on has done so. `train` does so too.

        Raises:
            EpisodeError: it depends on more than its row and its replies.
        """
        environments, first = self.cluster.rollout.environments, self.step == 0 and not self._rehearsed
        self._rehearsed = True
        if environments and first and environments.rehearses:
            self.on_phase("rehearsing the environment")
            environments.rehearse(rows)

    def prepare(self, total_steps: int) -> None:
        """Build the trainers and models that the algorithm needs; `train` does so too."""
        self.cluster.prepare(self.config, total_steps, self.surrogate_fn)

    def check_data(self, rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]] | None = ()) -> None:
        """Refuse rows that lack a column which a function needs, and, once, training rows with a prompt that cannot be
        sampled; `train` does so too.
        """
        check_columns(self.reward_fns, rows)
        if held_out:
            check_columns((*self.reward_fns, *self.eval_config.judges.values()), held_out)
        if not self._prompts_checked:
            self.cluster.rollout.check_prompts(rows, "training data")
        self._prompts_checked = True

    def state(self) -> dict[str, Any]:
        """Return the state of the loop for a checkpoint, without the cluster's arrays; JSON-serialisable."""
        drawn = self.drawn_ahead()
        failed, env_failed = (drawn[-1].failed, drawn[-1].env_failed) if drawn else self._failures.counts()
        return {
            "beta": self.beta,
            "prompts": self._prompts,
            "skipped": self._nonfinite_guard.skipped,
            "failed": dict(failed),
            "env_failed": env_failed,
        }

    def drawn_ahead(self) -> Sequence[DrawnStep]:
        """Return the next steps whose samples no later weights can draw, for a checkpoint; it may wait for them."""
        return self.drawn if self._ahead is None else self._ahead.waiting()

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore a checkpoint's `state()` at update `step`. β is that of the settings, but where it is adapted."""
        beta = require_entry(state, "beta", float)
        self.step, self.beta = step, self.beta if self.algorithm.kl_target is None else beta
        self._prompts = require_entry(state, "prompts", int)
        self._nonfinite_guard.skipped = require_entry(state, "skipped", int)
        failed = require_entry(state, "failed", dict)
        self.runner.failed = {name: require_entry(failed, name, int) for name in failed}
        if environments := self.cluster.rollout.environments:
            environments.failed = require_entry(state, "env_failed", int) if "env_failed" in state else 0
        self._failures.restart()

    def _split(self, x: Experience) -> Iterator[TrainBatch]:
        assert x.packed is not None, "compute_logps packs the groups"
        limit = self.cluster.config.rollout_config.max_new_tokens
        for indices in slices(range(len(x.table)), self.sizes.train):
            start, stop = indices[0], indices[-1] + 1
            packed, part = x.packed.slice(start, stop), x.between(start, stop)
            self.stats.waste.append(packed.layout.padding_fraction(self.cluster.rows_at_a_time(packed.rows)))
            self.before_update(part)
            keys = self.cluster.measures_agreement
            yield make_train_batch(part, packed, self.algorithm, self.beta, limit, with_keys=keys)

    def _check_order(self, batch: TrainBatch) -> None:
        """Compare a micro-batch with that of the other processes, before any of them launches a program on it."""
        with order.phase(f"micro-batch {len(self.stats.waste) - 1}", self.step, batch.shapes):
            pass

    def _update_repeatedly(self, batches: Replay[TrainBatch], count: int) -> list[Metrics]:
        """Make `count` updates on the same micro-batches; the first may make them."""
        shapes = lambda: [batch.shapes() for batch in batches.made]  # noqa: E731
        with self.stats.clock("update"), order.phase("update", self.step, shapes):
            updates = [self._update_or_skip(self.step + 1 + number, batches) for number in range(count)]
        for later in updates[1:]:  # their weights are no longer the sampler's
            later.pop(AGREEMENT, None)
        return updates

    def _update_or_skip(self, step: int, batches: Replay[TrainBatch]) -> Metrics:
        """Make the update `step` of the run; skip it, with weights unchanged, if it is not finite and `skip_nonfinite`
        allows it.
        """
        try:
            return self._nonfinite_guard.accept(self.update(batches))
        except NumbersError as error:
            self.on_bad_batch(step, *gather_batches(batches.made), error)
            metrics = self._nonfinite_guard.skip(error)
            self.cluster.skip_update()
            return metrics

    @property
    def _depth(self) -> int:
        """Number of rollouts that may wait for training; 0 where sampling and training take turns."""
        per_step = -(-self.cluster.config.training_config.prompts_per_step // self.sizes.train)
        return per_step + 2 if self.cluster.config.runs_ahead and not self.lead else 0

    def _reward_fns(self, reward_fns: RewardFns) -> list[RewardFn]:
        functions = resolve_reward_fns(reward_fns)
        if (environments := self.cluster.rollout.environments) is not None and environments.scores:
            functions.insert(0, environment_reward(environments.name))
        if self.cluster.inference.has(Role.REWARD):
            functions.append(self.reward_model)
        if not functions:
            raise no_reward_error()
        return functions

    def reward_model(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
        """Compute rewards with the cluster's reward model; this function's name is its name in the metrics."""
        return self.cluster.get_rewards(prompt_ids, completion_ids)

    reward_model.in_process = True  # type: ignore[attr-defined]  # the model lives here

    def loader(self, train_ds: Any) -> PromptLoader:
        """Return a loader of batches of the rows `train_ds`, behind the prompts that were used; see `train`."""
        if isinstance(train_ds, PromptLoader):
            return train_ds
        training = self.cluster.config.training_config
        loader = PromptLoader(
            as_rows(train_ds), training.prompts_per_step, seed=self.cluster.config.rollout_config.seed
        )
        loader.take(self._prompts)  # skip the prompts that a resumed run has used
        return loader

    def _check_same_start(self, loader: PromptLoader, total: int) -> None:
        """Refuse to begin when the processes' data or steps differ."""
        at = lambda: (self.step, total, loader.state())  # noqa: E731
        checks.check_same("training data or step", at, "give all of them the same data and run folder")

    def _record(self, updates: list[Metrics], total: int) -> StepRecord:
        """Return the record of a step of all processes."""
        stats = gather_step_stats(self.stats)
        if not self.lead:  # else as samples are drawn
            self._failures.agree(stats.rollout.env_failed)
        groups, numbers = stats.rollout.groups, stats.rollout.table.own.tolist()
        metrics = self._metrics(updates, stats)
        return StepRecord(self.step, len(updates), total, metrics, groups, numbers)

    def _metrics(self, updates: list[Metrics], stats: StepStats) -> dict[str, float]:
        trainer = self.cluster.trainer
        assert trainer is not None, "the cluster is prepared before the first step"
        return {
            "step": self.step,
            **step_metrics(stats, updates, self.algorithm, self.cluster.rollout.environments),
            **({} if self.algorithm.kl_target is None else {"beta": self.beta}),
            **({"sampling/staleness": float(self._staleness)} if self.lead else {}),
            "learning_rate": trainer.last_learning_rate,
        }

    def _report(self, record: StepRecord, held_out: Sequence[Any] | None) -> None:
        if held_out is not None and record.due(self.cluster.config.training_config.eval_every_n_steps):
            self.on_phase("evaluate")
            summary = self.evaluate(held_out, config=during_training(self.eval_config)).summary()
            record.metrics.update({f"eval/{name}": float(x) for name, x in summary.items() if x is not None})
        self.history.rows.append(record.metrics)
        for observer in self.observers:
            observer(record)

    def _adapt_to_kl(self, record: StepRecord) -> None:
        """Adapt β to the KL of this step, and update the reference if it is due."""
        a, kl = self.algorithm, record.metrics.get("kl")
        if a.kl_target is not None and kl is not None:
            samples = int(self.stats.rollout.table.sizes.sum())
            self.beta = adapt_beta(self.beta, kl=kl, target=a.kl_target, horizon=a.kl_horizon, samples=samples)
        if record.due(self.config.reference_every_n_updates):
            self.cluster.update_reference(self.config.reference_mixing)

    def evaluate(
        self,
        held_out: Sequence[Any],
        progress: Callable[[int, int], None] | None = None,
        config: EvalConfig | None = None,
    ) -> Evaluation:
        """Evaluate the rollout's weights on held-out rows.

        Args:
            held_out: rows with a `prompt` and the columns that the functions need.
            progress: called with the numbers of finished and of all completions.
            config: settings in place of `eval_config`.
        """
        with nullcontext() if self._ahead is None else self._ahead.paused():
            return evaluate(
                self.cluster,
                held_out,
                config or self.eval_config,
                self.cluster.config.rollout_config,
                self.reward_fns,
                self.config.reward_weights,
                progress,
                self.runner,
            )
