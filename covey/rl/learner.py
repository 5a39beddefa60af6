"""The loop that GRPO and PPO share, read as the algorithm.

Per step: sample a group of answers to each prompt, score them, turn scores into advantages, lay the samples out as rows
with the log-probs that the loss needs (all this is the feeder's), update, hand the new weights to the rollout. Beside
the loop, observers write, show and save what happened. Several processes go through it in step
(`parallel.distributed`): the updates are theirs together, and observers of each see what all of them did.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.config.algorithms import algorithm_of
from covey.config.keywords import Keywords
from covey.config.recipe import validate
from covey.config.schema import EvalConfig, GRPOConfig, RLTrainingConfig
from covey.data.loader import PromptLoader
from covey.data.rows import as_rows
from covey.errors import NumbersError, RecipeError
from covey.losses.policy import Surrogate
from covey.losses.shaping import adapted_beta
from covey.parallel import distributed
from covey.rewards import RewardFn, RewardRunner, check_columns, function_names, resolve
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import Evaluation, evaluate, judges
from covey.rl.experience import Clock, Experience, Feeder, StepLog
from covey.rl.metrics import group_metrics, over_updates, sampling_metrics, work_metrics
from covey.rl.microbatch import stage_sizes
from covey.rl.queue import DataQueue, produce
from covey.rl.roles import Role
from covey.rl.trainer import TrainBatch
from covey.train.trainer import Metrics, Skips
from covey.types import Group


@dataclass(frozen=True)
class StepRecord:
    """What observers see after each step.

    Attributes:
        step: optimizer updates made or left out so far, `updates` of them on this batch; `total` is what the run will
            make.
        metrics: numbers under their usual names; `time/...` are seconds.
        groups: every completion with its rewards and advantage.
    """

    step: int
    updates: int
    total: int
    metrics: dict[str, float]
    groups: Sequence[Group]

    def due(self, every: int) -> bool:
        """True when this step reached or passed a multiple of `every`; never when that is 0."""
        return bool(every) and self.step // every > (self.step - self.updates) // every


Observer = Callable[[StepRecord], None]


OnBadBatch = Callable[[int, Sequence[TrainBatch], NumbersError], None]
"""(step of the update, its micro-batches, what is wrong with them)"""


RewardFns = Sequence[RewardFn | str] | RewardFn | str
"""Reward functions, or names of built-in ones; one alone will do."""


@dataclass(frozen=True)
class _Settings:
    """The part of a recipe that a learner gets, under the name that `recipe.validate` knows."""

    grpo: GRPOConfig


class Learner(Keywords, ABC):
    """Trains the cluster's actor; `GRPOLearner` and `PPOLearner` say how.

    Args:
        config: the algorithm.
        rl_cluster: the models.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or the names of built-in
            ones. The cluster's reward model comes behind them.
        reward_funcs: TRL's name for the same.
        surrogate_fn: `fn(ratio, logps, advantage, algorithm)`, in place of the algorithm's surrogate.
        observers: called with a `StepRecord` after each step, in order. When not given, one line a step is printed.
        on_phase: called with the name of each phase as it begins.
        eval_config: how the evaluations during training are done.
        reward_runner: says where reward functions run and what becomes of their failures. When not given, here, and
            the first one is raised.
        on_bad_batch: is given the batch of an update whose loss or gradient is not finite, and the error.

    Raises:
        RecipeError: settings that contradict each other, sizes that no stage can work with, an unknown reward.
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
        on_bad_batch: OnBadBatch = lambda step, batches, error: None,
    ):
        self.cluster, self.config, self.surrogate_fn = rl_cluster, config, surrogate_fn
        standard = [self._print_line] if distributed.is_first() else []
        self.observers = standard if observers is None else list(observers)
        self.on_phase, self.on_bad_batch, self.eval_config = on_phase, on_bad_batch, eval_config or EvalConfig()
        self.step, self._prompts, self._checked = 0, 0, False
        validate(_Settings(config))
        self.algorithm = algorithm_of(config)
        training = rl_cluster.config.training_config
        self._skips = Skips(training.skip_nonfinite)
        sizes = stage_sizes(training, config.num_generations)
        distributed.refuse_uneven(training.prompts_per_step)
        self.reward_fns = self._reward_fns(_either(reward_fns, reward_funcs))
        self.runner = reward_runner or RewardRunner()
        self.runner.check(dict(zip(function_names(self.reward_fns), self.reward_fns, strict=True)))
        self.feeder = Feeder(
            cluster=rl_cluster,
            reward_fns=self.reward_fns,
            config=config,
            algorithm=self.algorithm,
            training=training,
            sizes=sizes,
            estimate=self.estimate,
            beta=self.algorithm.beta,
            runner=self.runner,
        )

    @abstractmethod
    def estimate(self, experience: Experience, beta: float) -> Experience:
        """Advantages, and returns where there is a critic."""

    def update(self, batches: Iterable[TrainBatch]) -> Metrics:
        """One optimizer step on all of `batches`, which may still be made while the first are trained on."""
        return self.cluster.update_actor(batches)

    def train(self, train_ds: Any, eval_ds: Any = None) -> RLCluster:
        """Runs to `max_steps` updates, or through the data `num_epochs` times, or until a finite loader ends.

        Args:
            train_ds: rows with a `prompt` and any other columns, in any of the forms `data.loader.as_rows` takes, or a
                ready `PromptLoader` (whose position a resumed run has restored).
            eval_ds: rows for the held-out evaluation every `eval_every_n_steps`.

        Raises:
            DataError: rows in none of the forms, or a prompt that cannot be sampled.
            RewardError: a reward function asks for a column that the data lack.
        """
        loader = self._loader(train_ds)
        held_out = None if eval_ds is None else as_rows(eval_ds)
        check_columns(self.reward_fns, loader.rows)
        if held_out is not None and self.cluster.config.training_config.eval_every_n_steps:
            check_columns((*self.reward_fns, *judges(self.eval_config)), held_out)
        total = total_steps(self.cluster.config.training_config, self.config, len(loader))
        self.prepare(total)
        self.check_prompts(loader.rows)
        self._refuse_differences(loader, total)
        while self.step < total and (examples := next(loader, None)) is not None:
            clock = Clock(phase=self.on_phase)
            with self._feeding(examples, loader, clock) as batches:
                metrics = self._updates(batches, min(self.config.num_iterations, total - self.step), clock)
            with clock("sync"):
                self.cluster.sync_weights()
            self.step, self._prompts = self.step + len(metrics), loader.position
            log, clock = self._of_all_processes(clock)
            record = StepRecord(self.step, len(metrics), total, self._metrics(metrics, log, clock), log.groups)
            self._move_reference(record)
            self._report(record, held_out)
        return self.cluster

    def prepare(self, total_steps: int) -> None:
        """Has the cluster build what the algorithm needs; `train` does so too."""
        self.cluster.prepare(self.config, total_steps, self.surrogate_fn)

    def check_prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Refuses training data with a prompt that cannot be sampled; `train` does so too, once."""
        if not self._checked:
            self.cluster.rollout.check_prompts(rows, "training data")
        self._checked = True

    def state(self) -> dict[str, Any]:
        """What the loop itself must remember beside the cluster's arrays, JSON-able."""
        failed = dict(self.runner.failed)
        return {"beta": self.feeder.beta, "prompts": self._prompts, "skipped": self._skips.made, "failed": failed}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Takes up a checkpoint's `state()` at update `step`."""
        self.step, self.feeder.beta, self._prompts = step, float(state["beta"]), int(state["prompts"])
        self._skips.made, self.runner.failed = int(state["skipped"]), dict(state["failed"])

    @contextmanager
    def _feeding(self, examples: Any, loader: PromptLoader, clock: Clock) -> Iterator[Iterable[TrainBatch]]:
        """The step's micro-batches: all there, or made in a thread while the first are trained on."""
        feed = self.feeder.feed(examples, loader.take, self.step, clock)
        if not self._asynchronous:
            yield list(feed)
            return
        accumulated = -(-len(examples) // self.feeder.sizes.train)
        with produce(feed, DataQueue(accumulated + 2)) as queue:
            yield queue

    def _updates(self, batches: Iterable[TrainBatch], count: int, clock: Clock) -> list[Metrics]:
        """`count` updates on the same micro-batches; the first takes them as they come."""
        seen: list[TrainBatch] = []
        with clock("update"):
            first = self._guarded(self.step + 1, remembered(batches, seen), seen)
            return [first, *(self._guarded(self.step + 1 + later, seen, seen) for later in range(1, count))]

    def _guarded(self, step: int, batches: Iterable[TrainBatch], seen: Sequence[TrainBatch]) -> Metrics:
        """The update `step`; one that is not finite is left out while `skip_nonfinite` allows it. Nothing moved by it.

        Args:
            step: its number in the run.
            batches: what it is made on.
            seen: those of them that were made so far.
        """
        return self._skips.guard(
            lambda: self.update(batches),
            lambda error: self.on_bad_batch(step, seen, error),
            self.cluster.skip_update,
        )

    @property
    def _asynchronous(self) -> bool:
        config = self.cluster.config
        apart = config.mesh(Role.ROLLOUT) != config.mesh(Role.ACTOR)
        return {"sync": False, "async": True, "auto": apart}[config.training_config.queueing]

    def _reward_fns(self, given: RewardFns) -> list[RewardFn]:
        several = [given] if callable(given) or isinstance(given, str) else given
        functions = [resolve(fn) if isinstance(fn, str) else fn for fn in several]
        if self.cluster.has_reward_model:
            functions.append(self.reward_model)
        if not functions:
            raise RecipeError("no reward function: nothing would be learnt", want="reward_fns=, or a reward model")
        return functions

    def reward_model(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
        """The cluster's reward model as a reward function; metrics know it by this name."""
        return self.cluster.get_rewards(prompt_ids, completion_ids)

    reward_model.in_process = True  # type: ignore[attr-defined]  # the model lives here

    def _loader(self, train_ds: Any) -> PromptLoader:
        if isinstance(train_ds, PromptLoader):
            return train_ds
        training = self.cluster.config.training_config
        seed = self.cluster.config.rollout_config.seed
        loader = PromptLoader(as_rows(train_ds), training.prompts_per_step, seed=seed)
        loader.take(self._prompts)  # those that a run taken up again has had
        return loader

    def _refuse_differences(self, loader: PromptLoader, total: int) -> None:
        """Processes that would not train the same model on the same data from the same step do not begin."""
        at = lambda: (self.step, total, loader.state())  # noqa: E731
        distributed.refuse_differences("training data or step", at, "give all of them the same data and run folder")
        self.refuse_other_weights()

    def refuse_other_weights(self) -> None:
        """Refuses to go on when the processes' copies of the weights are not equal, bit for bit."""
        held = lambda: distributed.fingerprint(self.cluster.state())  # noqa: E731
        fix = "the same weights for all, and machines of one kind; then resume from the last checkpoint"
        distributed.refuse_differences("state of weights and optimizer", held, fix)

    def _of_all_processes(self, clock: Clock) -> tuple[StepLog, Clock]:
        """What the step did in all of them, and how long each phase took in the slowest."""
        logs, seconds = zip(*distributed.gathered((self.feeder.log, clock.seconds), "step"), strict=True)
        phases = {phase: max(each.get(phase, 0.0) for each in seconds) for one in seconds for phase in one}
        return StepLog.of_all(logs), Clock(phases, started=clock.started)

    def _metrics(self, updates: list[Metrics], log: StepLog, clock: Clock) -> dict[str, float]:
        dynamic = self.algorithm.max_sampling_rounds > 1
        return {
            "step": self.step,
            **group_metrics(log.groups),
            **{f"rewards/{name}/failed": float(count) for name, count in log.failed.items()},
            **over_updates(updates),
            **(sampling_metrics(log.rounds, log.replaced, log.tied) if dynamic else {}),
            **({} if self.algorithm.kl_target is None else {"beta": self.feeder.beta}),
            "learning_rate": self.cluster.learning_rate(),
            **work_metrics(log.stats, clock.seconds, clock.elapsed, float(np.mean(log.waste))),
        }

    def _report(self, record: StepRecord, held_out: Sequence[Any] | None) -> None:
        if held_out is not None and record.due(self.cluster.config.training_config.eval_every_n_steps):
            self.on_phase("evaluate")
            found = self._evaluate(held_out).summary()
            record.metrics.update({f"eval/{name}": float(value) for name, value in found.items() if value is not None})
        for observer in self.observers:
            observer(record)

    def _move_reference(self, record: StepRecord) -> None:
        """The next step's β, which follows the KL of this one, and its reference where that moves."""
        a, kl = self.algorithm, record.metrics.get("kl")
        if a.kl_target is not None and kl is not None:
            samples = sum(len(g.completions) for g in record.groups)
            self.feeder.beta = adapted_beta(self.feeder.beta, kl, a.kl_target, a.kl_horizon, samples)
        if record.due(self.config.reference_every_n_updates):
            self.cluster.update_reference(self.config.reference_mixing)

    def _evaluate(self, held_out: Sequence[Any]) -> Evaluation:
        rollout, weights = self.cluster.config.rollout_config, self.config.reward_weights
        return evaluate(self.cluster, held_out, self.eval_config, rollout, self.reward_fns, weights, runner=self.runner)

    def _print_line(self, record: StepRecord) -> None:
        shown = [name for name in self.cluster.config.training_config.show if name in record.metrics]
        names = ("reward", "completions/mean_length", *shown, "grad_norm", "step_time")
        numbers = "  ".join(f"{name} {record.metrics[name]:.4g}" for name in names)
        print(f"step {record.step}/{record.total}  {numbers}", flush=True)


def total_steps(training: RLTrainingConfig, config: GRPOConfig, batches: int) -> int:
    """Optimizer updates of a whole run over data of so many batches an epoch."""
    return training.max_steps or batches * training.num_epochs * config.num_iterations


def _either(reward_fns: RewardFns | None, reward_funcs: RewardFns | None) -> RewardFns:
    if reward_fns is not None and reward_funcs is not None:
        raise RecipeError("both reward_fns and reward_funcs are given", want="one: they are two names for the same")
    given = reward_funcs if reward_fns is None else reward_fns
    return () if given is None else given


def remembered(batches: Iterable[TrainBatch], seen: list[TrainBatch]) -> Iterator[TrainBatch]:
    """`batches` one by one, each kept in `seen` for the passes that follow."""
    for batch in batches:
        seen.append(batch)
        yield batch
