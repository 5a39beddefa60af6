"""Data of a training step, from prompts to micro-batches: rollout, rewards, log-probs, advantages, rows.

`Learner.train` chains these stages lazily: a service batch passes through all of them before the next is sampled, and a
thread may run them while the trainer works. Each stage has its own number of prompts at a time (`microbatch`); the
result does not depend on it. When several processes train, each samples and scores its share of the prompts; then they
exchange the groups, and all go on with the same ones (`parallel.distributed`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from covey.config.algorithms import Algorithm
from covey.config.schema import GRPOConfig, RLTrainingConfig
from covey.errors import EpisodeError
from covey.losses.advantages import has_reward_variance, reward_table
from covey.losses.policy import AGGREGATES, LossInputs
from covey.losses.shaping import overlong_penalty
from covey.losses.value import ValueInputs
from covey.packing.rows import Rows, pack, padding_fraction, scatter_to_rows
from covey.parallel import distributed, order
from covey.rewards import RewardFn, RewardRunner, score
from covey.rl.batch import TrainBatch
from covey.rl.cluster import RLCluster
from covey.rl.microbatch import merge, service_batches, slices
from covey.rl.stage_sizes import StageSizes
from covey.sampling.stats import SamplerStats
from covey.types import Completion, Group

OVERLONG = "overlong"
"""Name of the length penalty among the rewards."""


@dataclass
class Clock:
    """Seconds spent in each phase of a step; phases of two threads may overlap."""

    seconds: dict[str, float] = field(default_factory=dict)
    phase: Callable[[str], None] = lambda name: None
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.phase(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.started


@dataclass(frozen=True)
class Experience:
    """Groups with their per-token data; lists have one array per completion, in order.

    Attributes:
        groups: groups with rewards.
        ref_logps, old_logps, values: per token; None where the algorithm does not use them.
        advantages: per token.
        returns: per token; the targets of the critic.
        packed: rows of the groups.
    """

    groups: list[Group]
    ref_logps: list[np.ndarray] | None = None
    old_logps: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    advantages: list[np.ndarray] = field(default_factory=list)
    returns: list[np.ndarray] | None = None
    packed: "PackedGroups | None" = None

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each completion."""
        return np.array([len(c.tokens) for g in self.groups for c in g.completions])

    @property
    def sampled_masks(self) -> list[np.ndarray]:
        """Mask of each completion: True for the tokens that the model sampled."""
        return [sampled_mask(c) for g in self.groups for c in g.completions]

    @property
    def policy_logps(self) -> list[np.ndarray]:
        """Log-probs under the policy that sampled: the trainer's where they were computed, else the sampler's."""
        return self.old_logps or [c.logps for g in self.groups for c in g.completions]

    @property
    def rewards(self) -> np.ndarray:
        """Rewards, float64 [P, G]; NaN where no function scored the completion, and behind smaller groups."""
        return reward_table([np.asarray(g.rewards) for g in self.groups])

    @property
    def completion_rewards(self) -> np.ndarray:
        """Reward of each completion, float64 [B]; NaN where no function scored it."""
        return np.concatenate([np.zeros(0), *(np.asarray(g.rewards) for g in self.groups)])

    def between(self, start: int, stop: int) -> "Experience":
        """Return the experience of groups `start` to `stop`."""
        at = slice(*(sum(len(g.completions) for g in self.groups[:end]) for end in (start, stop)))
        lists = {name: value and value[at] for name, value in vars(self).items() if name not in ("groups", "packed")}
        return Experience(self.groups[start:stop], **lists)


@dataclass
class StepLog:
    """Log of how a step's data was made.

    Attributes:
        groups: all sampled groups, also those that dynamic sampling replaced (with advantages of 0).
        stats: statistics of sampling.
        rounds: number of prompt batches sampled.
        replaced: number of groups of equal rewards that were replaced by new prompts.
        tied: number of groups of equal rewards that were kept because the budget was spent.
        waste: fraction of padding in each micro-batch's rows.
        failed: number of failed completions by reward function, for functions with a failure policy.
        dropped: number of completions without another one of their prompt, which were left out.
    """

    groups: list[Group] = field(default_factory=list)
    stats: SamplerStats = field(default_factory=SamplerStats)
    rounds: int = 1
    replaced: int = 0
    tied: int = 0
    waste: list[float] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    dropped: int = 0

    def set_advantages(self, groups: Sequence[Group], with_advantages: Sequence[Group]) -> None:
        """Replace groups by the same groups with their advantages."""
        with_advantages_by_id = {id(old): new for old, new in zip(groups, with_advantages, strict=True)}
        self.groups = [with_advantages_by_id.get(id(group), group) for group in self.groups]


Estimate = Callable[[Experience, float], Experience]
"""Function (experience, β) → experience with advantages, and with returns if there is a critic."""
Take = Callable[[int], Sequence[Mapping[str, Any]]]
"""Function that returns the given number of new prompts."""


class PromptBatch(NamedTuple):
    """Prompts that are sampled and scored together.

    Attributes:
        first: number of the first prompt in the step.
        examples: data rows with a prompt.
    """

    first: int
    examples: Sequence[Mapping[str, Any]]


@dataclass
class ExperienceBuilder:
    """Make the training micro-batches of one step. `Learner.train` calls the methods in the order in which they stand.

    Attributes:
        cluster: the models, and the settings of training and sampling.
        reward_fns: reward functions.
        config, algorithm: settings of the algorithm.
        sizes: number of prompts at a time in each stage.
        estimate: computes advantages from rewards.
        beta: weight of the KL.
        examples: prompts of the step, for all processes.
        take: returns more prompts, for groups that dynamic sampling replaces.
        step: seeds the noise.
        runner: runs the reward functions.
        clock: measures the phases.
        in_thread: whether a thread samples and scores, while another one launches programs over several processes.
        log: filled while the step is made.
    """

    cluster: RLCluster
    reward_fns: Sequence[RewardFn]
    config: GRPOConfig
    algorithm: Algorithm
    sizes: StageSizes
    estimate: Estimate
    beta: float
    examples: Sequence[Mapping[str, Any]]
    take: Take
    step: int
    runner: RewardRunner = field(default_factory=RewardRunner)
    clock: Clock = field(default_factory=Clock)
    in_thread: bool = False
    log: StepLog = field(default_factory=StepLog)

    def service_batches(self) -> Iterator[PromptBatch]:
        """Yield the step's prompts, as many at a time as every stage needs to work in full slices."""
        first, batches = 0, service_batches(self.examples, self.sizes)
        if self.algorithm.needs_whole_step:
            batches = iter([list(slices(self.examples, self.sizes.train))])
        for micro_batches in batches:
            examples = merge(micro_batches)
            yield PromptBatch(first, examples)
            first += len(examples)

    def sample(self, prompts: PromptBatch) -> list[Group]:
        """Sample a group of completions for each prompt of this process's share; the noise follows the prompt's number,
        whatever the slices and shares.
        """
        start, own = distributed.share(prompts.examples)
        groups: list[Group] = []
        with self.clock("rollout"):
            number = prompts.first + start
            for part in slices(own, self.sizes.rollout):
                groups += self.cluster.generate(part, self.config.num_generations, step=self.step, first=number)
                number += len(part)
                self.log.stats += self.cluster.rollout.stats
        return groups if self.algorithm.has_critic else self._drop_single(groups)

    def _drop_single(self, groups: Sequence[Group]) -> list[Group]:
        """Leave out completions that have no other one of their prompt to be compared with, and count them."""
        kept = [group for group in groups if len(group.completions) > 1]
        self.log.dropped += len(groups) - len(kept)
        return kept

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """Compute rewards; return the groups of all processes. Advantages are 0 until they are estimated."""
        with self.clock("reward"):
            groups = score(groups, self.reward_fns, self.config.reward_weights, self.runner, self.log.failed)
            scored = [replace(g, advantages=np.zeros(len(g.completions))) for g in map(self._penalise_length, groups)]
        gather = distributed.all_of_from_a_thread if self.in_thread else distributed.all_of
        scored = gather(scored, "groups")
        self.log.groups += scored
        return scored

    def replace_tied(self, groups: list[Group]) -> list[Group]:
        """Replace groups whose rewards are all equal by new prompts (dynamic sampling; Yu et al., 2025, section 3.2),
        until the step has as many other groups as prompts or the rounds are spent. With one round nothing is replaced.
        """
        if self.algorithm.max_sampling_rounds == 1:
            return groups
        wanted = num_sampled = len(self.examples)
        kept, tied = split_by_reward_variance(groups)
        while (missing := max(wanted - len(kept), 0)) and self.log.rounds < self.algorithm.max_sampling_rounds:
            fresh = self.take(missing)
            if not fresh:
                break
            self.log.rounds += 1
            new = self.score(self.sample(PromptBatch(num_sampled, fresh)))
            differing, equal = split_by_reward_variance(new)
            kept, tied, num_sampled = kept + differing, tied + equal, num_sampled + len(fresh)
        self.log.tied, self.log.replaced = missing, num_sampled - wanted
        return kept + tied[:missing]

    def compute_logps(self, groups: list[Group]) -> Experience:
        """Compute reference log-probs, old log-probs and values; old log-probs only when a batch is used more than once
        (otherwise they are the policy's own).
        """
        cluster, sizes = self.cluster, self.sizes
        lengths = lambda: [len(c.tokens) for group in groups for c in group.completions]  # noqa: E731
        with self.clock("logps"), order.phase("logps", self.step, lengths):
            packed = PackedGroups(groups, cluster.config.training_config, cluster.compile_cost)
            reference = packed.map(cluster.get_ref_per_token_logps, sizes.ref_logps) if self.algorithm.beta else None
            several = self.config.num_iterations > 1
            old = packed.map(cluster.get_old_per_token_logps, sizes.old_logps) if several else None
            values = packed.map(cluster.get_values, sizes.ref_logps) if self.algorithm.has_critic else None
        return Experience(groups, reference, old, values, packed=packed)

    def estimate_advantages(self, experience: Experience) -> Experience:
        """Compute advantages, and returns if there is a critic."""
        estimated = self.estimate(experience, self.beta)
        self.log.set_advantages(experience.groups, estimated.groups)
        return estimated

    def micro_batches(self, experience: Iterable[Experience]) -> Iterator[TrainBatch]:
        """Yield training micro-batches of `sizes.train` prompts."""
        for x in experience:
            assert x.packed is not None, "compute_logps packs the groups"
            for part in slices(range(len(x.groups)), self.sizes.train):
                start, stop = part[0], part[-1] + 1
                rows = x.packed.rows(start, stop)
                self.log.waste.append(padding_fraction(rows, self.cluster.rows_at_a_time(rows)))
                yield self._train_batch(x.between(start, stop), rows)
        if not self.log.waste:
            raise EpisodeError(
                f"all {self.log.dropped} episodes of a step began with different prompts: there is nothing to compare",
                want="several samples with equal prompts",
                fix="more samples of a row (grpo.num_generations); or draw what differs from the row",
            )

    def _penalise_length(self, group: Group) -> Group:
        """Add DAPO's length penalty (0 or less) to the rewards and list it beside the reward functions."""
        algorithm, limit = self.algorithm, self.cluster.config.rollout_config.max_new_tokens
        if not algorithm.overlong_buffer:
            return group
        lengths = np.array([c.num_sampled for c in group.completions])
        penalty = overlong_penalty(
            lengths,
            max_new_tokens=limit,
            buffer=algorithm.overlong_buffer,
            penalty=algorithm.overlong_penalty,
        )
        parts = {**group.rewards_by_function, OVERLONG: penalty}
        return replace(group, rewards=np.asarray(group.rewards) + penalty, rewards_by_function=parts)

    def _train_batch(self, x: Experience, rows: Rows) -> TrainBatch:
        completions = [c for g in x.groups for c in g.completions]
        in_loss = [tokens_in_loss(c, self.algorithm.mask_truncated) for c in completions]
        limit = self.cluster.config.rollout_config.max_new_tokens
        weights, denominator = AGGREGATES[self.algorithm.aggregate](np.array([m.sum() for m in in_loss]), limit)
        inputs = LossInputs(
            advantage=scatter_to_rows(rows, x.advantages),
            weight=scatter_to_rows(rows, [w * mask for w, mask in zip(weights, in_loss, strict=True)]),
            rollout_logps=scatter_to_rows(rows, [c.logps for c in completions]),
            beta=np.full((len(rows.tokens), 1), self.beta, np.float32),
            old_logps=None if x.old_logps is None else scatter_to_rows(rows, x.old_logps),
            ref_logps=None if x.ref_logps is None else scatter_to_rows(rows, x.ref_logps),
        )
        return TrainBatch(x.groups, rows, inputs, denominator, _value_inputs(x, rows, in_loss))


class PackedGroups:
    """Rows of groups, packed slice by slice; stages that use the same slice share its rows."""

    def __init__(self, groups: list[Group], training: RLTrainingConfig, compile_cost: float = 0.0):
        self.groups, self._training, self._compile_cost = groups, training, compile_cost
        self._rows: dict[tuple[int, int], Rows] = {}

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows of groups `start` to `stop`."""
        if (start, stop) not in self._rows:
            t = self._training
            groups = self.groups[start:stop]
            self._rows[start, stop] = pack(
                groups,
                t.row_length,
                packing=t.packing,
                max_tokens=t.max_tokens_per_micro_batch,
                compile_cost=self._compile_cost,
            )
        return self._rows[start, stop]

    def map(self, compute: Callable[[Rows, Sequence[int]], list[np.ndarray]], size: int) -> list[np.ndarray]:
        """Apply `compute` to `size` groups at a time; return one array per completion."""
        out: list[np.ndarray] = []
        for part in slices(range(len(self.groups)), size):
            lengths = [len(c.tokens) for i in part for c in self.groups[i].completions]
            out += compute(self.rows(part[0], part[-1] + 1), lengths)
        return out


def gather_step_log(log: StepLog, clock: Clock) -> tuple[StepLog, Clock]:
    """Return the log with what all processes sampled and scored, and the time of each phase in the slowest process."""
    own = log.stats, log.failed, log.dropped, clock.seconds
    stats, failed, dropped, seconds = zip(*distributed.gathered(own, "step"), strict=True)
    counts = {name: sum(each.get(name, 0) for each in failed) for one in failed for name in one}
    phases = {phase: max(each.get(phase, 0.0) for each in seconds) for one in seconds for phase in one}
    of_all = replace(log, stats=sum(stats, SamplerStats()), failed=counts, dropped=sum(dropped))
    return of_all, Clock(phases, started=clock.started)


def split_by_reward_variance(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Return groups whose completions differ in reward, and the others; the length penalty does not count."""
    differing: list[Group] = []
    equal: list[Group] = []
    for group in groups:
        rewards = np.asarray(group.rewards) - group.rewards_by_function.get(OVERLONG, 0.0)
        (differing if has_reward_variance(rewards) else equal).append(group)
    return differing, equal


def sampled_mask(completion: Completion) -> np.ndarray:
    """Return a mask, bool [n]: False for the tokens that a tool inserted."""
    return np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask


def tokens_in_loss(completion: Completion, mask_truncated: bool) -> np.ndarray:
    """Return a mask, bool [n]: True for the tokens that the model sampled; with `mask_truncated`, False for all tokens
    of a completion that was cut.
    """
    mask = sampled_mask(completion)
    return mask & (not completion.finish.was_cut) if mask_truncated else mask


def _value_inputs(x: Experience, rows: Rows, in_loss: Sequence[np.ndarray]) -> ValueInputs | None:
    if x.returns is None or x.values is None:
        return None
    scored = ~np.isnan(x.completion_rewards)
    weight = [mask & is_scored for mask, is_scored in zip(in_loss, scored, strict=True)]
    return ValueInputs(
        returns=scatter_to_rows(rows, x.returns),
        old_values=scatter_to_rows(rows, x.values),
        weight=scatter_to_rows(rows, weight),
    )
