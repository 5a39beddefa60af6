"""Training loop of reinforcement learning.

Per step: sample a group of completions for each prompt, score them, replace groups without a signal, compute the
log-probs that the loss needs, estimate advantages, update, give the new weights to the rollout. Each of these is a
method, and each takes and returns data (`step_data`); a debugger can stop after any of them. The first three may run
ahead of the rest (`rollouts`). Observers log, print and save the results of each step.

Several processes run the loop in lockstep (`parallel.processes`). Each samples and scores a part of the prompts, and
has the rows of its own devices (`batches`). All know the numbers of tokens and the rewards of all groups
(`step_data.GroupTable`), and decide alike.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from covey.config.algorithms import algorithm_of, off_policy_problems, with_correction
from covey.config.recipe import Recipe, validate
from covey.config.schema import DataConfig, EnvsConfig, EvalConfig, GRPOConfig, RewardSafetyConfig, RLTrainingConfig
from covey.config.schema.data import FROM_PYTHON
from covey.data.loader import FittedPrompts, PromptLoader, fit_prompts
from covey.data.rows import Row, as_rows
from covey.errors import EpisodeError, NumbersError, RecipeError, raise_together
from covey.files import require_entry
from covey.losses.policy import Surrogate
from covey.losses.shaping import adapt_beta
from covey.models.loading import sources
from covey.models.loading.weights import with_digest
from covey.monitor.record import Observer, OnBadBatch, StepRecord, total_steps
from covey.parallel import processes
from covey.parallel.arrays import stack_bytes
from covey.parallel.values import serialize
from covey.rewards.call import (
    RewardFn,
    RewardFns,
    check_columns,
    environment_reward,
    function_names,
    resolve_reward_fns,
)
from covey.rewards.scoring import RewardRunner, Scorer
from covey.rl.batches import AGREEMENT, PackedGroups, Replay, TrainBatch, gather_batches, make_train_batch
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import Evaluation, evaluate
from covey.rl.evaluate import during_training as during
from covey.rl.metrics import Clock, StepStats, gather_step_stats, step_metrics
from covey.rl.roles import ClusterConfig, Role
from covey.rl.rollout_worker import RolloutWorker
from covey.rl.rollouts import FailureCounts, Rollouts, SampledStep, SamplingContext, load_steps
from covey.rl.stage_sizes import stage_sizes
from covey.rl.step_data import (
    Experience,
    PromptBatch,
    RolloutBatch,
    gather_table,
    penalize_length,
    slices,
    split_by_reward_variance,
)
from covey.run.outputs import Measured
from covey.run.saved_run import ReadyRun, SavedRun
from covey.run.script import checksum, model_options
from covey.run.trainee import Trainee
from covey.sampling.logits import DRAW_VERSION
from covey.sampling.model_runner import SamplerStats
from covey.sampling.responder import ResponderFactory
from covey.train.trainer import Metrics, NonFiniteGuard
from covey.types import Group

log = logging.getLogger(__name__)


class Learner(Trainee):
    """Train the cluster's actor; a subclass such as `GRPOLearner` defines the algorithm.

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
        history, evaluations, settings: see `Trainee`.
        sampled: steps of a checkpoint that are sampled already.
        rollouts: rollouts of the steps; None outside of `steps`.
        base: origin of the weights that `train_grpo` loaded.

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
        training = rl_cluster.config.training_config
        show = ("reward", "completions/mean_length", *training.show, "grad_norm", "step_time")
        super().__init__(training, show, observers, on_phase, on_bad_batch)
        self.config = config = with_correction(config, training.off_policy_steps)
        self.cluster, self.surrogate_fn, self.base, self._prompts_used = rl_cluster, surrogate_fn, "", 0
        self.rollouts: Rollouts | None = None
        self.sampled: Sequence[SampledStep] = ()
        self.algorithm = a = algorithm_of(config)
        self.stats, self._nonfinite_guard = StepStats(), NonFiniteGuard(training.skip_nonfinite)
        self.beta, self.sizes = a.beta, stage_sizes(training, config.num_generations)
        if training.off_policy_steps and a.correction == "none":
            log.warning("grpo.correction is none: updates take samples of earlier weights for those of the last ones")
        functions = resolve_reward_fns(reward_fns, reward_funcs)
        self.reward_fns = all_functions(functions, rl_cluster)
        given = {"reward_model": Role.REWARD, "critic": Role.CRITIC}
        self.settings = as_recipe(
            rl_cluster.config,
            config,
            functions,
            rl_cluster.rollout.environments,
            reward_runner,
            eval_config,
            **{name: sources.FROM_PYTHON for name, role in given.items() if rl_cluster.inference.has(role)},
        )
        validate(self.settings)
        self.scorer = Scorer(self.reward_fns, config.reward_weights, reward_runner)
        self.failures = FailureCounts(self.scorer.runner, rl_cluster.rollout.environments)

    @abstractmethod
    def estimate_advantages(self, experience: Experience) -> Experience:
        """Compute advantages, and returns if there is a critic."""

    def update(self, batches: Iterable[TrainBatch]) -> Metrics:
        """Make one optimizer step on all of `batches`, some of which may still have to be made (`Replay`)."""
        return self.cluster.update_actor(batches)

    def train(self, train_ds: Any, eval_ds: Any = None, *, out: str | Path | None = None) -> RLCluster:
        """Train for `max_steps` updates, or through the data `num_epochs` times, or until a finite loader ends.

        Args:
            train_ds: rows with a `prompt` and any other columns, in any of the forms `data.loader.as_rows` takes, or a
                ready `PromptLoader` (whose position a resumed run has restored).
            eval_ds: held-out rows, in the same forms. They are evaluated before and after training (`evaluations` has
                the metrics) and every `eval_every_n_steps`.
            out: the run folder: metrics, completions, checkpoints and report go there. A run that is in it already is
                resumed from its last checkpoint, and gives the bits of a run that was never stopped. Without `out`
                nothing is written.

        Raises:
            DataError: the rows have an unknown form, or a prompt cannot be sampled.
            RewardError: a reward function needs a column that the data lack.
            ResumeError: the run in `out` was saved with other settings, data or weights.
            Stopped: a signal came (Ctrl-C, SIGTERM); the run in `out` is saved, and the same call resumes it.
        """
        ready = isinstance(train_ds, PromptLoader)
        rows, held_out, unfit = drop_long_prompts(
            self, [] if ready else as_rows(train_ds), [] if eval_ds is None else as_rows(eval_ds)
        )
        loader = self.loader(train_ds if ready else rows)
        model = partial(model_options, self.cluster.rollout.model, self.cluster.source, self.cluster.lora)
        self.train_on(loader, held_out, out, model, partial(ready_run, self, loader, held_out, unfit))
        return self.cluster

    def steps(self, loader: PromptLoader, total: int) -> Generator[StepRecord]:
        """Train step by step, each with at most `num_iterations` updates on the rollouts of its prompts.

        Args:
            loader: the prompts. After each step its position is that after the prompts of the step.
            total: updates of the whole run.
        """
        with Rollouts(self, loader, total).running() as rollouts:
            while self.step < total:
                self.stats = StepStats(Clock(on_phase=self.on_phase))
                if not (parts := rollouts.of_step(self.step)):
                    return  # the data have ended
                new_batches = self.make_batches(parts)
                batches = Replay(new_batches) if rollouts.within_step else list(new_batches)
                with self.phase("update"):
                    count = min(self.config.num_iterations, total - self.step)
                    updates = [self.update_or_skip(self.step + 1 + number, batches) for number in range(count)]
                rollouts.new_weights()
                self.step, self._prompts_used = self.step + count, loader.position
                yield self.record(updates, total)

    @contextmanager
    def phase(self, name: str, program: Any = "") -> Iterator[None]:
        """Measure the seconds of a phase of this step, in which all processes launch equal programs."""
        with self.stats.clock(name), processes.here().phase(name, self.step, program):
            yield

    def collect(self, prompts: PromptBatch) -> Experience:
        """Return the experience of some prompts of all processes."""
        return self.make_experience(self.rollout(prompts))

    def rollout(self, prompts: PromptBatch) -> RolloutBatch:
        """Sample and score a group of completions for each of some prompts of all processes."""
        return self.replace_tied(self.score(self.sample(prompts)), prompts)

    def make_experience(self, rollout: RolloutBatch) -> Experience:
        """Compute log-probs, values and advantages of the groups to train on."""
        return self.estimate_advantages(self.compute_logps(rollout.trained))

    def sample(self, prompts: PromptBatch) -> RolloutBatch:
        """Sample a group of completions for each prompt of this process's share; the noise follows the prompt's number,
        whatever the slices and shares.
        """
        start, local = processes.here().local_slice(prompts.examples)
        groups, stats, clock = list[Group](), SamplerStats(), Clock(on_phase=self.on_phase)
        with clock("rollout"):
            first = prompts.first + start
            for part in slices(local, self.sizes.rollout):
                groups += self.cluster.generate(part, self.config.num_generations, step=prompts.step, first=first)
                first += len(part)
                stats += self.cluster.rollout.stats
        # Without a critic a completion has to be compared with another one of its prompt.
        comparable = groups if self.algorithm.needs_critic else [g for g in groups if len(g.completions) > 1]
        dropped, failed = len(groups) - len(comparable), self.failures.take_sampled()
        return RolloutBatch(comparable, stats=stats, dropped=dropped, env_failed=failed, seconds=clock.seconds)

    def score(self, rollout: RolloutBatch) -> RolloutBatch:
        """Compute rewards, and gather the table of all processes. Advantages are 0 until they are estimated."""
        limit, failed = self.cluster.config.rollout_config.max_new_tokens, dict[str, int]()
        clock = Clock(dict(rollout.seconds), on_phase=self.on_phase)
        with clock("reward"):
            groups = self.scorer.score(rollout.groups, failed)
            penalized = [penalize_length(group, self.algorithm, limit) for group in groups]
            groups = [replace(group, advantages=np.zeros(len(group.completions))) for group in penalized]
        return replace(rollout, groups=groups, table=gather_table(groups), failed=failed, seconds=clock.seconds)

    def replace_tied(
        self, rollout: RolloutBatch, prompts: PromptBatch, sampling_context: SamplingContext = nullcontext
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
            if not may_go_on or not (fresh := prompts.more(missing)):
                return replace(rollout, indices=differing + tied[:missing], tied=missing, replaced=num_sampled - wanted)
            more = PromptBatch(prompts.step, prompts.first + num_sampled, fresh)
            with sampling_context():
                sampled = self.sample(more)
            rollout = replace(rollout.joined(self.score(sampled)), rounds=rollout.rounds + 1)
            num_sampled += len(fresh)

    def compute_logps(self, x: Experience) -> Experience:
        """Compute log-probs of the reference and before the first update, and values, if the algorithm needs them."""
        cluster, sizes, a = self.cluster, self.sizes, self.algorithm
        with self.phase("logps", x.table.lengths.tolist):
            packed = PackedGroups(x, cluster.row_sizes)
            ref = packed.map(cluster.get_ref_per_token_logps, sizes.ref_logps, "ref") if a.needs_reference else None
            old = packed.map(cluster.get_old_per_token_logps, sizes.old_logps, "old") if a.needs_old_logps else None
            values = packed.map(cluster.get_values, sizes.ref_logps, "values") if a.needs_critic else None
        return replace(x, ref_logps=ref, old_logps=old, values=values, packed=packed)

    def make_batches(self, rollouts: Iterable[RolloutBatch]) -> Iterator[TrainBatch]:
        """Yield training micro-batches of `sizes.train` prompts, each as soon as its rollout is there."""
        for rollout in rollouts:
            experience = self.make_experience(rollout)
            self.stats.add(rollout, experience.groups)
            for batch in self.split(experience):
                # Compare it among processes before any of them launches a program on it.
                with processes.here().phase(f"micro-batch {len(self.stats.waste) - 1}", self.step, batch.shapes):
                    pass
                yield batch
        if not self.stats.waste:
            raise EpisodeError(
                f"all {self.stats.rollout.dropped} episodes of a step began with different prompts: there is nothing "
                "to compare",
                want="several samples with equal prompts",
                fix="more samples of a row (grpo.num_generations); or draw what differs from the row",
            )

    def begin(self, loader: PromptLoader, held_out: Sequence[Any]) -> int:
        """Check the data, build trainers and models, and return the number of updates of the whole run."""
        total = total_steps(self.training, len(loader), self.config.num_iterations)
        problems = off_policy_problems(self.training.off_policy_steps, self.config, total_steps=total)
        raise_together([problem.error("") for problem in problems])
        if self.training.eval_every_n_steps and not held_out:
            log.warning("training.eval_every_n_steps is set, and there are no held-out rows: nothing is evaluated")
        check_columns(self.reward_fns, loader.rows)
        if held_out:
            check_columns((*self.reward_fns, *self.settings.evaluation.judges.values()), held_out)
        self.cluster.rollout.check_prompts(loader.rows, "training data")
        self.prepare(total)
        return total

    def start(self, loader: PromptLoader, total: int) -> None:
        """Refuse to begin when the processes' data or steps differ; rehearse the environment of a run that begins.

        Raises:
            EpisodeError: the environment depends on more than its row and its replies.
        """
        super().start(loader, total)
        environments = self.cluster.rollout.environments
        if environments and environments.rehearses and self.step == 0:
            self.on_phase("rehearsing the environment")
            environments.rehearse(loader.rows)

    def prepare(self, total_steps: int) -> None:
        """Build the trainers and models that the algorithm needs; `train` does so too."""
        self.cluster.prepare(self.config, total_steps, self.surrogate_fn)

    def state(self) -> dict[str, Any]:
        """Return the state of the loop for a checkpoint, without the cluster's arrays; JSON-serialisable."""
        ahead = self.sampled_ahead()
        failed, env_failed = (ahead[-1].failed, ahead[-1].env_failed) if ahead else self.failures.counts()
        return {
            "beta": self.beta,
            "prompts": self._prompts_used,
            "skipped": self._nonfinite_guard.skipped,
            "failed": dict(failed),
            "env_failed": env_failed,
        }

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays of a checkpoint, and its JSON values."""
        arrays = self.cluster.state()
        if self.training.off_policy_steps:
            steps = [step.without_times() for step in self.sampled_ahead()]
            arrays |= {SAMPLED: stack_bytes(serialize(steps))}
        return arrays, {"learner": self.state(), "draw_version": DRAW_VERSION}

    def checkpoint_shapes(self, saved: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the shapes of these arrays, of a checkpoint that has the shapes `saved()`."""
        of_steps = self.training.off_policy_steps and saved().get(SAMPLED)
        return self.cluster.state_shapes() | ({SAMPLED: of_steps} if of_steps else {})

    def load_checkpoint(
        self, arrays: dict[str, Any], extra: Mapping[str, Any], step: int, changed: Mapping[str, str]
    ) -> None:
        """Restore a checkpoint. Where a setting of the sampling was `changed`, the steps sampled ahead are sampled
        again.
        """
        if extra.get("draw_version", 1) != DRAW_VERSION:
            log.warning(
                "the run began with another draw of tokens (an inverse CDF, now Gumbel-max in two levels): it goes on"
                " with samples of the same distribution, but not with those that it would have drawn"
            )
        sampled = load_steps([row.tobytes() for row in np.asarray(arrays.pop(SAMPLED, ()))])
        self.sampled = [] if any(name.startswith(OF_SAMPLES) for name in changed) else sampled
        self.cluster.load_state(arrays, step)
        state = require_entry(extra, "learner", dict)
        self.load_state(state | ({"beta": self.beta} if "grpo.beta" in changed else {}), step)

    def sampled_ahead(self) -> Sequence[SampledStep]:
        """Return the next steps that no later weights can sample, for a checkpoint; it may wait for them."""
        return self.sampled if self.rollouts is None else self.rollouts.unused_steps()

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore a checkpoint's `state()` at update `step`. β comes from the settings, unless it is adapted."""
        beta = require_entry(state, "beta", float)
        self.step, self.beta = step, self.beta if self.algorithm.kl_target is None else beta
        self._prompts_used = require_entry(state, "prompts", int)
        self._nonfinite_guard.skipped = require_entry(state, "skipped", int)
        failed = require_entry(state, "failed", dict)
        self.scorer.runner.failed = {name: require_entry(failed, name, int) for name in failed}
        if environments := self.cluster.rollout.environments:
            environments.failed = require_entry(state, "env_failed", int) if "env_failed" in state else 0
        self.failures.restart()

    def split(self, x: Experience) -> Iterator[TrainBatch]:
        """Yield the micro-batches of an experience."""
        assert x.packed is not None, "compute_logps packs the groups"
        limit, row_sizes = self.cluster.config.rollout_config.max_new_tokens, self.cluster.row_sizes
        for indices in slices(range(len(x.table)), self.sizes.train):
            start, stop = indices[0], indices[-1] + 1
            packed, part = x.packed.slice(start, stop), x.part(start, stop)
            self.stats.waste.append(packed.layout.padding_fraction(row_sizes.rows_at_a_time(packed.rows)))
            self.outputs.before_update(part)
            keys = self.cluster.measures_agreement
            yield make_train_batch(part, packed, self.algorithm, self.beta, limit, with_keys=keys)

    def update_or_skip(self, step: int, batches: Iterable[TrainBatch]) -> Metrics:
        """Make the update `step` of the run; skip it, with weights unchanged, if it is not finite and `skip_nonfinite`
        allows it.
        """
        try:
            return self._nonfinite_guard.accept(self.update(batches))
        except NumbersError as error:
            self.on_bad_batch(step, *gather_batches(list(batches)), error)
            metrics = self._nonfinite_guard.skip(error)
            self.cluster.skip_update()
            return metrics

    def loader(self, train_ds: Any) -> PromptLoader:
        """Return a loader of batches of the rows `train_ds`, after the prompts that were used; see `train`."""
        if isinstance(train_ds, PromptLoader):
            return train_ds
        loader = PromptLoader(as_rows(train_ds), self.training.prompts_per_step, seed=self.settings.seed)
        loader.take(self._prompts_used)  # skip the prompts that a resumed run has used
        return loader

    def record(self, updates: list[Metrics], total: int) -> StepRecord:
        """Return the record of a step of all processes; then adapt β and the reference to it."""
        stats, trainer = gather_step_stats(self.stats), self.cluster.trainer
        assert trainer is not None, "the cluster is prepared before the first step"
        for later in updates[1:]:  # their weights are no longer the sampler's
            later.pop(AGREEMENT, None)
        metrics = {
            "step": self.step,
            **step_metrics(stats, updates, self.algorithm, self.cluster.rollout.environments),
            **({} if self.algorithm.kl_target is None else {"beta": self.beta}),
            **({"sampling/staleness": float(self.step - 1 - stats.version)} if self.training.off_policy_steps else {}),
            "learning_rate": trainer.last_learning_rate,
        }
        groups, numbers = stats.rollout.groups, stats.rollout.table.local_groups.tolist()
        record = StepRecord(self.step, len(updates), total, metrics, groups, numbers)
        self._adapt_to_kl(record)
        return record

    def _adapt_to_kl(self, record: StepRecord) -> None:
        """Adapt β to the KL of this step, and update the reference if it is due."""
        a, kl = self.algorithm, record.metrics.get("kl")
        if a.kl_target is not None and kl is not None:
            samples = int(self.stats.rollout.table.sizes.sum())
            self.beta = adapt_beta(self.beta, kl=kl, target=a.kl_target, horizon=a.kl_horizon, samples=samples)
        if record.due(self.config.reference_every_n_updates):
            self.cluster.update_reference(self.config.reference_mixing)

    def evaluate_rows(self, held_out: Sequence[Any], during_training: bool = False) -> Measured:
        """Evaluate held-out rows for the run: whole, or as it is done during training."""
        if during_training:
            return Measured(self.evaluate(held_out, config=during(self.settings.evaluation)).summary())
        found = self.evaluate(held_out, self.outputs.advance)
        others = {f"-{preset}": (other.groups, other.correct) for preset, other in found.others.items()}
        return Measured(found.summary(), {"": (found.groups, found.correct), **others}, found.groups)

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
        if self.rollouts is not None:
            self.rollouts.rest()
        return evaluate(
            self.cluster,
            held_out,
            config or self.settings.evaluation,
            self.cluster.config.rollout_config,
            self.reward_fns,
            self.config.reward_weights,
            progress,
            self.scorer.runner,
        )


SAMPLED = "drawn_ahead"
"""Array of a checkpoint with the serialized steps that earlier weights have sampled, a row from each process."""
OF_SAMPLES = (
    "rewards",
    "reward_model",
    "reward_safety.",
    "envs.",
    "rollout.",
    "grpo.max_sampling_rounds",
    "grpo.overlong_",
    "grpo.reward_weights",
)
"""Beginnings of the settings by which steps are sampled."""


def ready_run(
    learner: Learner, loader: PromptLoader, held_out: Sequence[Row], unfit: Mapping[str, int], run: SavedRun
) -> ReadyRun:
    """Return the run of a script in a folder. Its origin is the weights before `prepare`; older versions have recorded
    the weights after it.
    """
    cluster = learner.cluster

    def weights() -> str:
        return checksum([nnx.split(cluster.program_actor)[1], *cluster.inference.params.values()])

    learner.initial_weights = learner.initial_weights or weights()
    return ReadyRun(
        learner,
        loader,
        cluster.tokenizer,
        cluster.rollout.model.config,
        held_out,
        learner.initial_weights,
        {"prompts": len(loader.rows), **unfit},
        base=learner.base or with_digest(cluster.source),
        former_origin=weights,
    )


def drop_long_prompts(
    learner: Learner, train_rows: Sequence[Row], test_rows: Sequence[Row]
) -> tuple[Sequence[Row], Sequence[Row], dict[str, int]]:
    """Leave out or cut prompts that are too long, if the settings allow it; return training and held-out rows, and the
    numbers of the prompts that were dropped or truncated.
    """
    worker = learner.cluster.rollout
    train, test = (fit_rows(rows, worker, learner.training) for rows in (train_rows, test_rows))
    unfit = {name: getattr(train, name) + getattr(test, name) for name in ("dropped", "truncated")}
    if counts := " and ".join(f"{count} {name}" for name, count in unfit.items() if count):
        log.warning(f"prompts longer than rollout.max_prompt_length: {counts}")
    return train.rows, test.rows, unfit


def fit_rows(rows: Sequence[Row], worker: RolloutWorker, training: RLTrainingConfig) -> FittedPrompts:
    """Leave out or cut prompts that are too long, with the list of the tools if there are any."""
    encode = worker.environments and worker.environments.prompt_encoder(worker.tokenizer)
    limit = worker.config.max_prompt_length
    return fit_prompts(rows, encode or worker.tokenizer.encode_prompt, limit, training.too_long)


def all_functions(given: Sequence[RewardFn], cluster: RLCluster) -> list[RewardFn]:
    """Return the reward of the cluster's environment, the given functions, and the reward model, if there are any."""

    def reward_model(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
        return cluster.get_rewards(prompt_ids, completion_ids)

    reward_model.in_process = True  # type: ignore[attr-defined]  # the model lives here
    environments = cluster.rollout.environments
    first = [environment_reward(environments.name)] if environments is not None and environments.scores else []
    last = [reward_model] if cluster.inference.has(Role.REWARD) else []
    if not (functions := [*first, *given, *last]):
        raise RecipeError(
            "no reward function: nothing would be learnt",
            want="reward_fns= or reward_funcs=, an environment, or a reward model",
        )
    return functions


def as_recipe(
    config: ClusterConfig,
    algorithm: GRPOConfig | None,
    functions: Sequence[RewardFn],
    environments: ResponderFactory | None,
    runner: RewardRunner | None,
    evaluation: EvalConfig | None,
    **more: Any,
) -> Recipe:
    """Return the settings of a script's run as a recipe, which has the same checks and is recorded in a run folder;
    `more` are further settings.
    """
    own = getattr(environments, "config", None)
    named = EnvsConfig(environment=environments.name if environments else None)
    return Recipe(
        seed=config.rollout_config.seed,
        data=DataConfig(task=FROM_PYTHON),
        rewards=tuple(function_names(functions)),
        envs=own if isinstance(own, EnvsConfig) else named,
        reward_safety=runner.safety if runner else RewardSafetyConfig(),
        rollout=config.rollout_config,
        grpo=algorithm or GRPOConfig(),
        training=config.training_config,
        evaluation=evaluation or EvalConfig(),
        **more,
    )
