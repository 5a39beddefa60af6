"""Data of a training step, from prompts to micro-batches: the records that `Learner` hands from stage to stage, and the
functions between them that need no model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt32

from covey.config.algorithms import Algorithm
from covey.config.metrics import OVERLONG
from covey.losses.advantages import has_reward_variance, merge_ties
from covey.losses.policy import AGGREGATES, LossInputs
from covey.losses.shaping import kl_penalty, overlong_penalty
from covey.losses.value import ValueInputs
from covey.packing.rows import Rows
from covey.rl.group_table import GroupTable, join, table_of
from covey.rl.micro_batches import TrainBatch, slices
from covey.rl.packed_groups import PackedGroups, PackedSlice
from covey.sampling.logits import token_keys
from covey.sampling.model_runner import SamplerStats
from covey.types import Completion, Group

NextPrompts = Callable[[int], Sequence[Mapping[str, Any]]]
"""Function that returns the given number of new prompts."""


class PromptBatch(NamedTuple):
    """Prompts that are sampled and scored together.

    Attributes:
        step: number of the step, which seeds the noise.
        first: number of the first prompt in the step.
        examples: data rows with a prompt, for all processes.
        more: returns more of them, for groups that dynamic sampling replaces; none by default.
    """

    step: int
    first: int
    examples: Sequence[Mapping[str, Any]]
    more: NextPrompts = lambda missing: ()


def prompt_batches(
    examples: Sequence[Mapping[str, Any]], step: int, size: int, more: NextPrompts
) -> Iterator[PromptBatch]:
    """Yield the prompts of a step, `size` at a time: as many as every stage needs to work in full slices, or all.

    Hazard: `examples` must be those of one optimizer step. A batch that spanned two would sample prompts of the second
    with the policy before the first one's update, and the result would depend on the sizes.
    """
    first = 0
    for part in slices(examples, size):
        yield PromptBatch(step, first, part, more)
        first += len(part)


@dataclass(frozen=True)
class RolloutBatch:
    """Groups that were sampled and scored together. It holds all that sampling has to report, so that it can be made in
    a thread that shares nothing with the learner.

    Attributes:
        groups: all groups that this process has sampled, also those that dynamic sampling replaced; advantages are 0.
        table: numbers of the groups of all processes.
        indices: numbers of the groups to train on, of all processes, in the order of the training; None for all.
        stats: statistics of the sampler.
        rounds: number of rounds of dynamic sampling in which prompts were replaced.
        replaced: number of prompts sampled in place of others whose groups have equal rewards.
        tied: number of groups of equal rewards among those kept because the budget was spent.
        dropped: number of completions without another one of their prompt, which were left out.
        failed: number of failed completions by reward function, for functions with a failure policy.
        env_failed: number of failures of this process's environments.
        seconds: seconds of each phase.
    """

    groups: list[Group]
    table: GroupTable = field(default_factory=lambda: table_of([]))
    indices: list[int] | None = None
    stats: SamplerStats = field(default_factory=SamplerStats)
    rounds: int = 0
    replaced: int = 0
    tied: int = 0
    dropped: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    env_failed: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> "Experience":
        """Groups to train on."""
        if self.indices is None:
            return Experience(self.groups, self.table)
        return Experience([self.groups[place] for place in self._trained_places], self.table.select(self.indices))

    @property
    def _trained_places(self) -> list[int]:
        """Places among `groups` of those to train on, in the order of the training."""
        places = {number: place for place, number in enumerate(self.table.own.tolist())}
        indices = range(len(self.table)) if self.indices is None else self.indices
        return [places[number] for number in indices if number in places]

    def with_advantages(self, trained: Sequence[Group]) -> "RolloutBatch":
        """Return the rollout with `trained` in the places of this process's groups to train on."""
        groups = list(self.groups)
        for place, group in zip(self._trained_places, trained, strict=True):
            groups[place] = group
        return replace(self, groups=groups)

    def joined(self, other: "RolloutBatch") -> "RolloutBatch":
        """Return the groups of both, with the sums of their counts and seconds."""
        return RolloutBatch(
            [*self.groups, *other.groups],
            join([self.table, other.table]),
            stats=self.stats + other.stats,
            rounds=self.rounds + other.rounds,
            replaced=self.replaced + other.replaced,
            tied=self.tied + other.tied,
            dropped=self.dropped + other.dropped,
            failed=sum_by_name(self.failed, other.failed),
            env_failed=self.env_failed + other.env_failed,
            seconds=sum_by_name(self.seconds, other.seconds),
        )


@dataclass(frozen=True)
class Experience:
    """Groups with their per-token data; lists have one array per completion, in order. Of several processes each has
    the groups that it has sampled, and the numbers of all.

    Attributes:
        groups: groups with rewards.
        table: numbers of the groups of all processes.
        ref_logps, old_logps, values: per token; None where the algorithm does not use them.
        advantages: per token.
        returns: per token; the targets of the critic.
        packed: rows of the groups.
    """

    groups: list[Group]
    table: GroupTable
    ref_logps: list[np.ndarray] | None = None
    old_logps: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    advantages: list[np.ndarray] = field(default_factory=list)
    returns: list[np.ndarray] | None = None
    packed: PackedGroups | None = None

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
    def completion_rewards(self) -> np.ndarray:
        """Reward of each completion, float64 [B]; NaN where no function scored it."""
        return np.concatenate([np.zeros(0), *(np.asarray(g.rewards) for g in self.groups)])

    def kl_penalties(self, algorithm: Algorithm, beta: float) -> list[np.ndarray] | None:
        """Return β·KL of each sampled token, where the algorithm subtracts it from the reward; None elsewhere."""
        if algorithm.kl_in != "reward" or self.ref_logps is None:
            return None
        return kl_penalty(self.policy_logps, self.ref_logps, algorithm.kl, beta, self.sampled_masks)

    def between(self, start: int, stop: int) -> "Experience":
        """Return the experience of groups `start` to `stop` of all processes."""
        first, last = np.searchsorted(self.table.own, [start, stop]).tolist()
        at = slice(*(sum(len(g.completions) for g in self.groups[:end]) for end in (first, last)))
        others = ("groups", "packed", "table")
        lists = {name: value and value[at] for name, value in vars(self).items() if name not in others}
        return Experience(self.groups[first:last], self.table.select(range(start, stop)), **lists)


def sum_by_name(*counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sum(each.get(name, 0) for each in counts) for name in dict.fromkeys(chain(*counts))}


def penalize_length(group: Group, algorithm: Algorithm, max_new_tokens: int) -> Group:
    """Add DAPO's length penalty (0 or less) to the rewards and list it beside the reward functions."""
    if not algorithm.overlong_buffer:
        return group
    penalty = overlong_penalty(
        np.array([c.num_sampled for c in group.completions]),
        max_new_tokens=max_new_tokens,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )
    rewards = np.asarray(group.rewards)
    return replace(
        group,
        rewards=merge_ties(rewards + penalty, np.abs(rewards) + np.abs(penalty)),
        rewards_by_function={**group.rewards_by_function, OVERLONG: penalty},
    )


def split_by_reward_variance(table: GroupTable) -> tuple[list[int], list[int]]:
    """Return the numbers of groups whose completions differ in reward, and those of the others; the length penalty does
    not count.
    """
    penalties = table.by_function.get(OVERLONG, np.zeros(len(table.rewards)))
    groups = map(table.split, (table.rewards - penalties, np.abs(table.rewards) + np.abs(penalties)))
    differs = np.array(
        [has_reward_variance(each, np.nanmax(sizes, initial=0.0)) for each, sizes in zip(*groups, strict=True)], bool
    )
    return np.flatnonzero(differs).tolist(), np.flatnonzero(~differs).tolist()


def make_train_batch(
    x: Experience,
    packed: PackedSlice,
    algorithm: Algorithm,
    beta: float,
    max_new_tokens: int,
    *,
    with_keys: bool = False,
) -> TrainBatch:
    """Return the micro-batch of some groups.

    Args:
        x: the groups with their advantages.
        packed: their rows.
        algorithm: gives the weight of each token.
        beta: weight of the KL.
        max_new_tokens: limit of a completion, by which the aggregate `constant` divides.
        with_keys: whether the agreement with the sampler is measured, where the completions have keys.
    """
    completions = [c for g in x.groups for c in g.completions]
    in_loss = [tokens_in_loss(c, algorithm.mask_truncated) for c in completions]
    counts = np.where(x.table.cut & algorithm.mask_truncated, 0, x.table.sampled)
    weights, denominator = AGGREGATES[algorithm.aggregate](counts, max_new_tokens)
    own_weights = weights[x.table.own_completions]
    drawn, has_keys = [sampled_mask(c) for c in completions], with_keys and x.table.keys.any(1).all()
    inputs = LossInputs(
        advantage=packed.scatter(x.advantages, "advantages"),
        weight=packed.scatter([w * mask for w, mask in zip(own_weights, in_loss, strict=True)], "weights"),
        rollout_logps=packed.scatter([c.logps for c in completions], "log-probs of the rollout"),
        beta=np.full((len(packed.rows.tokens), 1), beta, np.float32),
        old_logps=None if x.old_logps is None else packed.scatter(x.old_logps, "old log-probs"),
        ref_logps=None if x.ref_logps is None else packed.scatter(x.ref_logps, "log-probs of the reference"),
        keys=token_keys_of(packed.rows, x.table.keys, packed.scatter(drawn, "drawn tokens")) if has_keys else None,
    )
    scored = float(counts[~np.isnan(x.table.rewards)].sum())
    values = _value_inputs(x, packed, in_loss)
    return TrainBatch(x.groups, packed.rows, inputs, denominator, values, scored, packed.counted, x.table)


def token_keys_of(
    rows: Rows, keys: UInt32[np.ndarray, "B 2"], drawn: Float[np.ndarray, "R M"]
) -> UInt32[np.ndarray, "R M 2"]:
    """Return the random key that drew each scored token, from those of the completions; 0 where the model drew none."""
    of_tokens, at = np.zeros((*drawn.shape, 2), np.uint32), drawn > 0  # rows of other processes have none
    number, index = rows.scatter_index[at].T
    of_tokens[at] = token_keys(keys[number], index)
    return of_tokens


def sampled_mask(completion: Completion) -> np.ndarray:
    """Return a mask, bool [n]: False for the tokens that a tool inserted."""
    return np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask


def tokens_in_loss(completion: Completion, mask_truncated: bool) -> np.ndarray:
    """Return a mask, bool [n]: True for the tokens that the model sampled; with `mask_truncated`, False for all tokens
    of a completion that was cut.
    """
    mask = sampled_mask(completion)
    return mask & (not completion.finish.was_cut) if mask_truncated else mask


def _value_inputs(x: Experience, packed: PackedSlice, in_loss: Sequence[np.ndarray]) -> ValueInputs | None:
    if x.returns is None or x.values is None:
        return None
    weight = [mask & is_scored for mask, is_scored in zip(in_loss, ~np.isnan(x.completion_rewards), strict=True)]
    return ValueInputs(
        returns=packed.scatter(x.returns, "returns"),
        old_values=packed.scatter(x.values, "values"),
        weight=packed.scatter(weight, "weights of values"),
    )
