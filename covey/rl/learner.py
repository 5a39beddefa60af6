"""Training loop shared by GRPO and PPO.

Per step: sample a group of completions for each prompt, score them, compute advantages, pack the completions into rows
with the log-probs that the loss needs (all this in the experience builder), update, give the new weights to the
rollout. Observers log, print and save the results of each step. Several processes run the loop in lockstep
(`parallel.distributed`): each samples and scores a share, and the rest of the step is the same in all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from covey.config.algorithms import algorithm_of
from covey.config.base import Keywords
from covey.config.schema import EvalConfig, GRPOConfig
from covey.data.loader import PromptLoader
from covey.data.rows import as_rows
from covey.envs import rehearsal
from covey.errors import RecipeError
from covey.losses.policy import Surrogate
from covey.losses.shaping import adapt_beta
from covey.parallel import distributed, order
from covey.rewards import RewardFn, RewardRunner, check_columns, environment_reward, function_names, resolve
from covey.rl.batch import TrainBatch, arrays_of
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import Evaluation, evaluate, evaluation_functions
from covey.rl.experience import Clock, Experience, ExperienceBuilder, StepLog, Take, gather_step_log
from covey.rl.metrics import combine_updates, group_metrics, sampling_metrics, work_metrics
from covey.rl.queue import DataQueue, produce
from covey.rl.roles import Role
from covey.rl.stage_sizes import stage_sizes
from covey.rl.token_values import TokenScorer
from covey.train.checkpoint import require_entry
from covey.train.history import History
from covey.train.loop import Observer, OnBadBatch, StepLines, StepRecord, is_due, total_steps
from covey.train.optimizers import last_learning_rate
from covey.train.trainer import Metrics, NonFiniteGuard
from covey.types import Group

RewardFns = Sequence[RewardFn | str] | RewardFn | str
"""Reward functions, or names of built-in ones, or a single one."""


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
        on_phase: called with the name of each phase as it begins.
        eval_config: settings of the evaluations during training.
        reward_runner: sets where reward functions run and how their failures are handled. When not given, they run in
            this process and the first failure is raised.
        on_bad_batch: called with the batch of an update whose loss or gradient is not finite, and the error.

    Attributes:
        history: metrics of the steps.
        token_values_every: interval of the steps that compute token values for the observers; 0, the default, is never.

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
        self.cluster, self.config, self.surrogate_fn = rl_cluster, config, surrogate_fn
        show = ("reward", "completions/mean_length", *rl_cluster.config.training_config.show, "grad_norm", "step_time")
        standard = [StepLines(show)] if distributed.is_first() else []
        self.observers: list[Observer] = list(standard if observers is None else observers)
        self.history = History()
        self.on_phase, self.on_bad_batch, self.eval_config = on_phase, on_bad_batch, eval_config or EvalConfig()
        self.step, self._prompts, self._prompts_checked, self._rehearsed = 0, 0, False, False
        self.token_values_every = 0
        self.algorithm = algorithm_of(config)
        training = rl_cluster.config.training_config
        self._nonfinite_guard = NonFiniteGuard(training.skip_nonfinite)
        self.beta, self.sizes = self.algorithm.beta, stage_sizes(training, config.num_generations)
        self._refuse_threads()
        self.reward_fns = self._reward_fns(_only_one(reward_fns, reward_funcs))
        self.runner = reward_runner or RewardRunner()
        self.runner.check(dict(zip(function_names(self.reward_fns), self.reward_fns, strict=True)))

    @abstractmethod
    def estimate(self, experience: Experience, beta: float) -> Experience:
        """Compute advantages, and returns if there is a critic."""

    def update(self, batches: Iterable[TrainBatch]) -> Metrics:
        """Make one optimizer step on all of `batches`, which may be an iterator of batches that are not made yet."""
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
        loader, held_out = self.loader(train_ds), None if eval_ds is None else as_rows(eval_ds)
        total = self._begin(loader, held_out)
        while self.step < total and (examples := next(loader, None)) is not None:
            builder = self._experience_builder(examples, loader.take)
            # Lazy: a service batch passes through these lines before the next is sampled. Asynchronous training runs
            # them in a thread, ahead of the update; in several processes only the first three, which launch nothing
            # over several of them.
            groups = map(builder.sample, builder.service_batches())
            groups = map(builder.score, groups)
            groups = map(builder.replace_tied, groups)
            count = min(self.config.num_iterations, total - self.step)
            scorer = TokenScorer(self.cluster, self.algorithm, self._scores_tokens(count))
            with self._sampled_ahead(groups) as scored:
                experience = map(builder.compute_logps, scored)
                experience = map(builder.estimate_advantages, experience)
                with (
                    self._queued(builder.micro_batches(experience)) as micro_batches,
                    builder.clock("update"),
                    order.phase("update", self.step, lambda: _shapes(micro_batches)),
                ):
                    updates = self._update_repeatedly(scorer.watch(micro_batches), count)
                    scorer.score_again()
            with builder.clock("sync"), order.phase("sync", self.step):
                self.cluster.sync_weights()
            self.step, self._prompts = self.step + len(updates), loader.position
            record = self._record(builder, updates, total, scorer)
            self._adapt_to_kl(record)
            self._report(record, held_out)
        return self.cluster

    def _begin(self, loader: PromptLoader, held_out: Sequence[Any] | None) -> int:
        """Check the data, build what the algorithm needs and return the updates of the whole run."""
        training = self.cluster.config.training_config
        check_columns(self.reward_fns, loader.rows)
        if held_out is not None and training.eval_every_n_steps:
            check_columns((*self.reward_fns, *evaluation_functions(self.eval_config)), held_out)
        total = total_steps(training, len(loader), self.config.num_iterations)
        self.prepare(total)
        self.check_prompts(loader.rows)
        self._refuse_differences(loader, total)
        self.rehearse(loader.rows)
        return total

    def rehearse(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rehearse the environment of a run that begins, once; a run that goes on has done so. `train` does so too.

        Raises:
            EpisodeError: it depends on more than its row and its replies.
        """
        environments, first = self.cluster.rollout.environments, self.step == 0 and not self._rehearsed
        self._rehearsed = True
        if environments and first and rehearsal.is_due(environments):
            self.on_phase("rehearsing the environment")
            rehearsal.rehearse(environments, rows)

    def prepare(self, total_steps: int) -> None:
        """Build the trainers and models that the algorithm needs; `train` does so too."""
        self.cluster.prepare(self.config, total_steps, self.surrogate_fn)

    def check_prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Refuse training data with a prompt that cannot be sampled; `train` does so too, once."""
        if not self._prompts_checked:
            self.cluster.rollout.check_prompts(rows, "training data")
        self._prompts_checked = True

    def state(self) -> dict[str, Any]:
        """Return the state of the loop for a checkpoint, without the cluster's arrays; JSON-serialisable."""
        return {
            "beta": self.beta,
            "prompts": self._prompts,
            "skipped": self._nonfinite_guard.skipped,
            "failed": dict(self.runner.failed),
            "env_failed": environments.failed if (environments := self.cluster.rollout.environments) else 0,
        }

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore a checkpoint's `state()` at update `step`."""
        self.step, self.beta = step, require_entry(state, "beta", float)
        self._prompts = require_entry(state, "prompts", int)
        self._nonfinite_guard.skipped = require_entry(state, "skipped", int)
        failed = require_entry(state, "failed", dict)
        self.runner.failed = {name: require_entry(failed, name, int) for name in failed}
        if environments := self.cluster.rollout.environments:
            environments.failed = require_entry(state, "env_failed", int) if "env_failed" in state else 0

    def _experience_builder(self, examples: Sequence[Mapping[str, Any]], take: Take) -> ExperienceBuilder:
        """Return the builder of a step on `examples`; `take` returns more prompts."""
        return ExperienceBuilder(
            cluster=self.cluster,
            reward_fns=self.reward_fns,
            config=self.config,
            algorithm=self.algorithm,
            sizes=self.sizes,
            estimate=self.estimate,
            beta=self.beta,
            examples=examples,
            take=take,
            step=self.step,
            runner=self.runner,
            clock=Clock(phase=self.on_phase),
            in_thread=self._asynchronous and distributed.count() > 1,
        )

    @contextmanager
    def _sampled_ahead(self, groups: Iterable[list[Group]]) -> Iterator[Iterable[list[Group]]]:
        """Provide the step's groups: as they are, or in several processes as a queue that a thread fills during
        training. Only this thread launches programs over several processes.
        """
        if not (self._asynchronous and distributed.count() > 1):
            yield groups
            return
        with produce(groups, DataQueue(self._num_micro_batches + 2)) as queue:
            yield queue

    @contextmanager
    def _queued(self, batches: Iterator[TrainBatch]) -> Iterator[Iterable[TrainBatch]]:
        """Provide the step's micro-batches: as a list, or as a queue that a thread fills during training; in several
        processes, where `_sampled_ahead` has the queue, as they are made.
        """
        if not self._asynchronous:
            yield list(batches)
        elif distributed.count() > 1:
            yield self._in_order(batches)
        else:
            with produce(batches, DataQueue(self._num_micro_batches + 2)) as queue:
                yield queue

    @property
    def _num_micro_batches(self) -> int:
        return -(-self.cluster.config.training_config.prompts_per_step // self.sizes.train)

    def _in_order(self, batches: Iterable[TrainBatch]) -> Iterator[TrainBatch]:
        """Yield `batches`, each after it has been compared with that of the other processes."""
        for number, batch in enumerate(batches):
            with order.phase(f"micro-batch {number}", self.step, batch.shapes):
                pass
            yield batch

    def _update_repeatedly(self, batches: Iterable[TrainBatch], count: int) -> list[Metrics]:
        """Make `count` updates on the same micro-batches; the first consumes them as they are made."""
        seen: list[TrainBatch] = []
        first = self._update_or_skip(self.step + 1, tee(batches, seen), seen)
        return [first, *(self._update_or_skip(self.step + 1 + later, seen, seen) for later in range(1, count))]

    def _update_or_skip(self, step: int, batches: Iterable[TrainBatch], seen: Sequence[TrainBatch]) -> Metrics:
        """Make the update `step`; skip it, with weights unchanged, if it is not finite and `skip_nonfinite` allows it.

        Args:
            step: number of the update in the run.
            batches: micro-batches of the update.
            seen: the micro-batches made so far.
        """
        return self._nonfinite_guard.guard(
            lambda: self.update(batches),
            lambda error: self.on_bad_batch(step, [g for batch in seen for g in batch.groups], arrays_of(seen), error),
            self.cluster.skip_update,
        )

    @property
    def _asynchronous(self) -> bool:
        config = self.cluster.config
        return {"sync": False, "async": True, "auto": config.samples_apart}[config.training_config.queueing]

    def _refuse_threads(self) -> None:
        """Refuse to sample and train side by side on common devices in several processes: the programs of two threads
        would come in another order on each device, and wait for each other.
        """
        config = self.cluster.config
        if distributed.count() > 1 and self._asynchronous and not config.samples_apart:
            raise RecipeError(
                f"training.queueing is async in {distributed.count()} processes, and rollout and actor share devices",
                want="devices of its own for the rollout, and a reward model on those too",
                fix="role_to_mesh.rollout in the recipe; or training.queueing auto, which samples and trains in turn",
                where="training.queueing",
            )

    def _reward_fns(self, given: RewardFns) -> list[RewardFn]:
        several = [given] if callable(given) or isinstance(given, str) else given
        functions = [resolve(fn) if isinstance(fn, str) else fn for fn in several]
        if (environments := self.cluster.rollout.environments) is not None and environments.scores:
            functions.insert(0, environment_reward(environments.name))
        if self.cluster.inference.has(Role.REWARD):
            functions.append(self.reward_model)
        if not functions:
            want = "reward_fns=, an environment, or a reward model"
            raise RecipeError("no reward function: nothing would be learnt", want=want)
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
        seed = self.cluster.config.rollout_config.seed
        loader = PromptLoader(as_rows(train_ds), training.prompts_per_step, seed=seed)
        loader.take(self._prompts)  # skip the prompts that a resumed run has used
        return loader

    def _refuse_differences(self, loader: PromptLoader, total: int) -> None:
        """Refuse to begin when the processes' data or steps differ."""
        at = lambda: (self.step, total, loader.state())  # noqa: E731
        distributed.refuse_differences("training data or step", at, "give all of them the same data and run folder")

    def _scores_tokens(self, updates: int) -> bool:
        """Return whether token values are computed in a step of so many updates; only a run of one process does so,
        because all processes must launch the same programs.
        """
        return distributed.count() == 1 and is_due(self.step + updates, updates, self.token_values_every)

    def _record(
        self, builder: ExperienceBuilder, updates: list[Metrics], total: int, scorer: TokenScorer
    ) -> StepRecord:
        """Return the record of a step of all processes."""
        log, clock = gather_step_log(builder.log, builder.clock)
        metrics, values = self._metrics(updates, total, log, clock), scorer.values(log)
        return StepRecord(self.step, len(updates), total, metrics, log.groups, values)

    def _metrics(self, updates: list[Metrics], total: int, log: StepLog, clock: Clock) -> dict[str, float]:
        training, trainer = self.cluster.config.training_config, self.cluster.trainer
        assert trainer is not None, "the cluster is prepared before the first step"
        dynamic, environments = self.algorithm.max_sampling_rounds > 1, self.cluster.rollout.environments
        groups_prompts = environments is not None and environments.config.different_prompts == "group"
        return {
            "step": self.step,
            **group_metrics(log.groups),
            **{f"rewards/{name}/failed": float(count) for name, count in log.failed.items()},
            **combine_updates(updates),
            **({"env/dropped": float(log.dropped)} if groups_prompts else {}),
            **(sampling_metrics(log.rounds, log.replaced, log.tied) if dynamic else {}),
            **({} if self.algorithm.kl_target is None else {"beta": self.beta}),
            "learning_rate": last_learning_rate(training.actor_optimizer, total, trainer.step),
            **work_metrics(log.stats, clock.seconds, clock.elapsed, float(np.mean(log.waste))),
        }

    def _report(self, record: StepRecord, held_out: Sequence[Any] | None) -> None:
        if held_out is not None and record.due(self.cluster.config.training_config.eval_every_n_steps):
            self.on_phase("evaluate")
            found = self.evaluate(held_out).summary()
            record.metrics.update({f"eval/{name}": float(value) for name, value in found.items() if value is not None})
        self.history.rows.append(record.metrics)
        for observer in self.observers:
            observer(record)

    def _adapt_to_kl(self, record: StepRecord) -> None:
        """Adapt β to the KL of this step, and update the reference if it is due."""
        a, kl = self.algorithm, record.metrics.get("kl")
        if a.kl_target is not None and kl is not None:
            samples = sum(len(g.completions) for g in record.groups)
            self.beta = adapt_beta(self.beta, kl=kl, target=a.kl_target, horizon=a.kl_horizon, samples=samples)
        if record.due(self.config.reference_every_n_updates):
            self.cluster.update_reference(self.config.reference_mixing)

    def evaluate(self, held_out: Sequence[Any], progress: Callable[[int, int], None] | None = None) -> Evaluation:
        """Evaluate the rollout's weights on held-out rows, as `eval_config` says.

        Args:
            held_out: rows with a `prompt` and the columns that the functions need.
            progress: called with the numbers of finished and of all completions.
        """
        rollout, weights = self.cluster.config.rollout_config, self.config.reward_weights
        return evaluate(
            self.cluster, held_out, self.eval_config, rollout, self.reward_fns, weights, progress, self.runner
        )


def _only_one(reward_fns: RewardFns | None, reward_funcs: RewardFns | None) -> RewardFns:
    if reward_fns is not None and reward_funcs is not None:
        raise RecipeError("both reward_fns and reward_funcs are given", want="one: they are two names for the same")
    given = reward_funcs if reward_fns is None else reward_fns
    return () if given is None else given


def _shapes(batches: Iterable[TrainBatch]) -> Any:
    """Return the shapes of micro-batches that are there already."""
    return [batch.shapes() for batch in batches] if isinstance(batches, list) else "as they are made"


def tee(batches: Iterable[TrainBatch], seen: list[TrainBatch]) -> Iterator[TrainBatch]:
    """Yield `batches` one by one and append each to `seen` for later passes."""
    for batch in batches:
        seen.append(batch)
        yield batch
