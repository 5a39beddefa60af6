"""GRPO (Shao et al., 2024, DeepSeekMath): the loop reads as the algorithm.

Per step: sample a group of answers to each prompt, score them, compare each with its group, lay them out as rows, take
the log-probs the loss needs, update, hand the new weights to the rollout. Beside the loop, observers write, show and
save what happened.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from covey.configs import EvalConfig, GRPOConfig, RLTrainingConfig
from covey.data.loader import PromptLoader
from covey.data.rows import as_rows
from covey.evaluate import Evaluation, evaluate
from covey.recipe import validate
from covey.rewards.scoring import RewardFn, resolve, score
from covey.rl.advantages import group_zscore
from covey.rl.cluster import RLCluster
from covey.rl.losses import LossInputs, sequence_mean_weights
from covey.rl.metrics import group_metrics, over_updates, work_metrics
from covey.rl.rows import Rows, lay, pack, padding_waste, spread
from covey.train.trainer import Metrics
from covey.types import Group


@dataclass(frozen=True)
class StepRecord:
    """What observers see after each step.

    Attributes:
        step: optimizer updates made so far, `updates` of them on this batch; `total` is what the run will make.
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


@dataclass
class Clock:
    """Seconds spent in each phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    phase: Callable[[str], None] = lambda name: None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.phase(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class _Settings:
    """The part of a recipe that a learner gets, under the name that `recipe.validate` knows."""

    grpo: GRPOConfig


class GRPOLearner:
    """Trains the cluster's actor by GRPO.

    Args:
        rl_cluster: the models.
        reward_fns: functions `fn(prompts, completions, **columns) -> list[float | None]`, or the names of built-in
            ones.
        grpo_config: group size, updates per batch, β, clip range, reward weights.
        observers: called with a `StepRecord` after each step, in order. Without any, one line a step is printed.
        on_phase: called with the name of each phase as it begins.
        eval_config: how the evaluations during training are done.
    """

    def __init__(
        self,
        *,
        rl_cluster: RLCluster,
        reward_fns: Sequence[RewardFn | str] | RewardFn | str,
        grpo_config: GRPOConfig | None = None,
        observers: Sequence[Observer] | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        eval_config: EvalConfig | None = None,
    ):
        self.cluster = rl_cluster
        self.config = grpo_config or GRPOConfig()
        self.reward_fns = [reward_fns] if callable(reward_fns) or isinstance(reward_fns, str) else list(reward_fns)
        self.observers = [_print_line] if observers is None else list(observers)
        self.on_phase, self.eval_config = on_phase, eval_config or EvalConfig()
        self.step, self._checked = 0, False
        validate(_Settings(self.config))
        self.reward_fns = [resolve(fn) if isinstance(fn, str) else fn for fn in self.reward_fns]

    def train(self, train_ds: Any, eval_ds: Any = None) -> RLCluster:
        """Runs to `max_steps` updates, or through the data `num_epochs` times.

        Args:
            train_ds: rows with a `prompt` and any other columns, in any of the forms `data.loader.as_rows` takes, or a
                ready `PromptLoader` (whose position a resumed run has restored).
            eval_ds: rows for the held-out evaluation every `eval_every_n_steps`.
        """
        loader = self._loader(train_ds)
        total = total_steps(self.cluster.config.training_config, self.config, len(loader))
        if self.cluster.trainer is None:
            self.cluster.prepare(self.config, total)
        held_out = None if eval_ds is None else as_rows(eval_ds)
        self.check_prompts(loader.rows)
        while self.step < total:
            clock = Clock(phase=self.on_phase)
            examples = next(loader)
            with clock("rollout"):
                groups = self.cluster.generate(examples, self.config.num_generations, step=self.step)
            with clock("reward"):
                groups = score(groups, self.reward_fns, self.config.reward_weights)
                groups = with_advantages(groups)
            with clock("logps"):
                rows, lengths = self._rows(groups)
                inputs = self._log_probs(rows, lengths, groups)
            with clock("update"):
                metrics = [self.cluster.update_actor(rows, inputs) for _ in range(self._updates(total))]
            with clock("sync"):
                self.cluster.sync_weights()
            self.step += len(metrics)
            self._report(total, groups, rows, metrics, clock, held_out)
        return self.cluster

    def check_prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Refuses training data with a prompt that cannot be sampled; `train` does so too, once."""
        if not self._checked:
            self.cluster.rollout.check_prompts(rows, "training data")
        self._checked = True

    def _loader(self, train_ds: Any) -> PromptLoader:
        if isinstance(train_ds, PromptLoader):
            return train_ds
        training = self.cluster.config.training_config
        return PromptLoader(as_rows(train_ds), training.prompts_per_step, seed=self.cluster.config.rollout_config.seed)

    def _updates(self, total: int) -> int:
        return min(self.config.num_iterations, total - self.step)

    def _rows(self, groups: Sequence[Group]) -> tuple[Rows, list[int]]:
        training = self.cluster.config.training_config
        lengths = [len(c.tokens) for g in groups for c in g.completions]
        return pack(groups, training.row_length, training.packing, training.tokens_per_micro_batch), lengths

    def _log_probs(self, rows: Rows, lengths: list[int], groups: Sequence[Group]) -> LossInputs:
        """The loss's inputs; the old log-probs only when a batch is used more than once (otherwise they are the
        policy's own).
        """
        old = self.cluster.get_old_per_token_logps(rows, lengths) if self.config.num_iterations > 1 else None
        ref = self.cluster.get_ref_per_token_logps(rows, lengths)
        return LossInputs(
            advantage=spread(rows, np.concatenate([g.advantages for g in groups])),
            weight=spread(rows, sequence_mean_weights(np.array(lengths))),
            old_logps=None if old is None else lay(rows, old),
            ref_logps=None if ref is None else lay(rows, ref),
            sampled=lay(rows, [c.logps for g in groups for c in g.completions]),
        )

    def _report(
        self,
        total: int,
        groups: list[Group],
        rows: Rows,
        updates: list[Metrics],
        clock: Clock,
        held_out: Sequence[Any] | None,
    ) -> None:
        training, cluster = self.cluster.config.training_config, self.cluster
        metrics = {
            "step": self.step,
            **group_metrics(groups),
            **over_updates(updates),
            "learning_rate": cluster.learning_rate(self.step - 1),
            **work_metrics(cluster.rollout.stats, clock.seconds, padding_waste(rows)),
        }
        record = StepRecord(self.step, len(updates), total, metrics, groups)
        if held_out is not None and record.due(training.eval_every_n_steps):
            self.on_phase("evaluate")
            found = self._evaluate(held_out).summary()
            metrics.update({f"eval/{name}": float(value) for name, value in found.items() if value is not None})
        for observer in self.observers:
            observer(record)

    def _evaluate(self, held_out: Sequence[Any]) -> Evaluation:
        rollout, weights = self.cluster.config.rollout_config, self.config.reward_weights
        return evaluate(self.cluster, held_out, self.eval_config, rollout, self.reward_fns, weights)


def total_steps(training: RLTrainingConfig, grpo: GRPOConfig, batches: int) -> int:
    """Optimizer updates of a whole run over data of so many batches an epoch."""
    return training.max_steps or batches * training.num_epochs * grpo.num_iterations


def with_advantages(groups: Sequence[Group]) -> list[Group]:
    """The groups with each sample's advantage over its group."""
    advantages = [group_zscore(np.asarray(g.rewards)[None])[0].astype(np.float32) for g in groups]
    return [dataclasses.replace(g, advantages=a) for g, a in zip(groups, advantages, strict=True)]


def _print_line(record: StepRecord) -> None:
    names = ("reward", "completions/mean_length", "grad_norm", "step_time")
    numbers = "  ".join(f"{name.split('/')[-1]} {record.metrics[name]:.4g}" for name in names)
    print(f"step {record.step}/{record.total}  {numbers}", flush=True)
