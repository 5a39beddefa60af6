"""Data of a training step: the records that `Learner` hands from stage to stage, and functions on them.

Every process has the `GroupTable` of a step, with numbers of tokens and scores of all groups. A process holds the
tokens of the groups that it has sampled, and no others. Decisions that all processes make alike, such as the rows of a
micro-batch, dynamic sampling, advantages and metrics, follow from this table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from covey.config.algorithms import Algorithm
from covey.config.metrics import OVERLONG
from covey.losses.advantages import has_reward_variance, merge_ties, reward_table
from covey.losses.shaping import kl_penalty, overlong_penalty
from covey.packing.rows import GroupShape
from covey.parallel import processes
from covey.sampling.model_runner import SamplerStats
from covey.types import Branch, Completion, Episode, Group

if TYPE_CHECKING:
    from covey.rl.batches import PackedGroups

T = TypeVar("T")

NextPrompts = Callable[[int], Sequence[Mapping[str, Any]]]
"""Function that returns the given number of new prompts."""


@dataclass(frozen=True)
class GroupTable:
    """Numbers of the groups of a step, in one order in all processes. Arrays have one entry per group [P], or per
    completion [B], group after group.

    Attributes:
        owner: index of the process that has sampled the group.
        prompts: tokens of the prompt.
        sizes: completions of the group.
        lengths: tokens of the completion.
        sampled: tokens of it that the model generated.
        truncated: whether a limit ended it.
        kept_probability: probability that top-k, top-p and min-p kept, summed over the sampled tokens; NaN without any.
        empty: whether its text is empty or white space.
        characters: characters of its text.
        repetition: fraction of the sequences of four sampled tokens that occur earlier in the completion.
        first_equal: number within the group of the first completion with the same tokens.
        rewards: reward; NaN where no function scored the completion.
        by_function: the same of each reward function, and of the length penalty.
        keys: random key of the completion; 0 without one, because another engine drew it.
        branches: branches of each completion; None where it can have none.
        episodes: episode of each completion, without its messages; None without one.
    """

    owner: Int[np.ndarray, "P"]
    prompts: Int[np.ndarray, "P"]
    sizes: Int[np.ndarray, "P"]
    lengths: Int[np.ndarray, "B"]
    sampled: Int[np.ndarray, "B"]
    truncated: Bool[np.ndarray, "B"]
    kept_probability: Float[np.ndarray, "B"]
    empty: Bool[np.ndarray, "B"]
    characters: Int[np.ndarray, "B"]
    repetition: Float[np.ndarray, "B"]
    first_equal: Int[np.ndarray, "B"]
    rewards: Float[np.ndarray, "B"]
    by_function: Mapping[str, Float[np.ndarray, "B"]]
    keys: UInt32[np.ndarray, "B 2"]
    branches: Sequence[tuple[Branch, ...] | None]
    episodes: Sequence[Episode | None]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def local_groups(self) -> Int[np.ndarray, "p"]:
        """Numbers of the groups that this process has sampled."""
        return np.flatnonzero(self.owner == processes.here().index)

    @property
    def local_completions(self) -> Int[np.ndarray, "b"]:
        """Numbers of the completions that this process has sampled."""
        return np.flatnonzero(np.repeat(self.owner, self.sizes) == processes.here().index)

    @cached_property
    def starts(self) -> Int[np.ndarray, "P+1"]:
        """Number of the first completion of each group, and the number of all."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=int)])

    @property
    def reward_table(self) -> Float[np.ndarray, "P G"]:
        """Rewards as a table; NaN where no function scored the completion, and after the rewards of smaller groups."""
        return reward_table(self.split(self.rewards))

    @property
    def shapes(self) -> list[GroupShape]:
        """Numbers of tokens of each group, for the rows."""
        lengths = self.lengths.tolist()
        return [
            GroupShape(prompt, tuple(lengths[start:end]), tuple(self.branches[start:end]))
            for prompt, start, end in zip(self.prompts.tolist(), self.starts[:-1], self.starts[1:], strict=True)
        ]

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Return values of all completions by group."""
        return np.split(values, self.starts[1:])[:-1]

    def select(self, groups: Sequence[int] | Int[np.ndarray, "p"]) -> "GroupTable":
        """Return the groups with these numbers, in this order."""
        groups = np.asarray(groups, int)
        completions = np.concatenate([np.zeros(0, int), *(np.arange(*self.starts[[i, i + 1]]) for i in groups)])
        columns: dict[str, Any] = {}
        for name in COLUMNS:
            values, numbers = getattr(self, name), groups if name in BY_GROUP else completions
            columns[name] = values[numbers] if isinstance(values, np.ndarray) else [values[i] for i in numbers]
        by_function = {name: values[completions] for name, values in self.by_function.items()}
        return GroupTable(**columns, by_function=by_function)

    def collect(self, values: Sequence[Any], name: str) -> list[Any]:
        """Return values of all groups, given the values of this process's groups. All processes must call it."""
        by_process = [iter(theirs) for theirs in processes.here().all_gather(list(values), name)]
        return [next(by_process[owner]) for owner in self.owner]

    def collect_numbers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return values of all completions, given this process's, [b] or [b, n]. All processes must call it."""
        by_group = np.split(values, np.cumsum(self.sizes[self.local_groups], dtype=int))[:-1]
        return np.concatenate([values[:0], *self.collect(by_group, name)])


COLUMNS = tuple(field.name for field in fields(GroupTable) if field.name != "by_function")
BY_GROUP = ("owner", "prompts", "sizes")
"""Columns with one entry per group."""
NO_KEY = np.zeros(2, np.uint32)
HASH = np.array([1, 1_000_003, 998_244_353, 6_700_417_123], np.int64)
"""Factors by which a sequence of four tokens becomes one number."""


def table_of(groups: Sequence[Group]) -> GroupTable:
    """Return the table of groups with rewards, all of them this process's."""
    completions = [c for group in groups for c in group.completions]
    none = [np.full(len(group.completions), np.nan) for group in groups]
    rewards = [n if group.rewards is None else np.asarray(group.rewards) for group, n in zip(groups, none, strict=True)]
    names = groups[0].rewards_by_function if groups else ()
    return GroupTable(
        owner=np.full(len(groups), processes.here().index),
        prompts=np.array([len(group.prompt_tokens) for group in groups], int),
        sizes=np.array([len(group.completions) for group in groups], int),
        lengths=np.array([len(c.tokens) for c in completions], int),
        sampled=np.array([c.num_sampled for c in completions], int),
        truncated=np.array([c.finish.was_cut for c in completions], bool),
        kept_probability=np.array([*map(_kept_probability, completions)], float),
        empty=np.array([not c.text.strip() for c in completions], bool),
        characters=np.array([len(c.text) for c in completions], int),
        repetition=np.array([*map(_repeated_fraction, completions)], float),
        first_equal=np.array([*chain.from_iterable(map(_first_equal, groups))], int),
        rewards=_concatenated(rewards),
        by_function={name: _concatenated([group.rewards_by_function[name] for group in groups]) for name in names},
        keys=np.array([NO_KEY if c.key is None else c.key for c in completions], np.uint32).reshape(-1, 2),
        branches=[c.branches for c in completions],
        episodes=[c.episode and replace(c.episode, messages=()) for c in completions],
    )


def join(tables: Sequence[GroupTable]) -> GroupTable:
    """Return the groups of all tables, one table after the other."""
    tables = [table for table in tables if len(table)] or list(tables[:1])
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        parts = [getattr(table, name) for table in tables]
        columns[name] = np.concatenate(parts) if isinstance(parts[0], np.ndarray) else list(chain(*parts))
    names = tables[0].by_function
    return GroupTable(
        **columns, by_function={name: np.concatenate([table.by_function[name] for table in tables]) for name in names}
    )


def gather_table(groups: Sequence[Group]) -> GroupTable:
    """Return the table of the groups of all processes, given this process's groups. All processes must call it."""
    return join(processes.here().all_gather(table_of(groups), "groups"))


def _first_equal(group: Group) -> list[int]:
    first: dict[bytes, int] = {}
    return [first.setdefault(c.tokens.tobytes(), i) for i, c in enumerate(group.completions)]


def _repeated_fraction(completion: Completion) -> float:
    tokens = completion.tokens if completion.mask is None else completion.tokens[completion.mask]
    if len(tokens) <= len(HASH):
        return 0.0
    hashes = np.sort(sum(tokens[i : len(tokens) - len(HASH) + 1 + i] * factor for i, factor in enumerate(HASH)))
    return float((hashes[1:] == hashes[:-1]).mean(dtype=np.float64)) * (len(hashes) - 1) / len(hashes)


def _kept_probability(completion: Completion) -> float:
    kept: np.ndarray = np.exp(completion.logps - completion.sampler_logps)
    kept = kept if completion.mask is None or not kept.size else kept[completion.mask]
    return float(kept.sum(dtype=np.float64)) if kept.size else float("nan")


def _concatenated(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *values])


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
    """Groups that were sampled and scored together. A rollout thread returns this and shares nothing else with the
    learner.

    Attributes:
        groups: all groups that this process has sampled, replaced groups too; advantages are 0.
        table: numbers of the groups of all processes.
        indices: numbers of the groups to train on, of all processes, in the order of the training; None for all.
        stats: statistics of the sampler.
        rounds: number of rounds of dynamic sampling in which prompts were replaced.
        replaced: number of prompts sampled in place of others whose groups have equal rewards.
        tied: number of groups of equal rewards among those kept because the budget was spent.
        dropped: number of completions that were left out, because no other has their prompt.
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
        """Places in `groups` of the groups to train on, in the order of the training."""
        places = {number: place for place, number in enumerate(self.table.local_groups.tolist())}
        return [places[number] for number in self.indices or () if number in places]

    def with_advantages(self, trained: Sequence[Group]) -> "RolloutBatch":
        """Return the rollout with `trained` in the places of this process's groups to train on."""
        if self.indices is None:
            return replace(self, groups=list(trained))
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
    """Groups with their per-token data; lists have one array per completion of this process's groups, in order.

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
    packed: "PackedGroups | None" = None

    @property
    def completions(self) -> list[Completion]:
        """Completions of this process's groups."""
        return [c for group in self.groups for c in group.completions]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each completion."""
        lengths: np.ndarray = self.table.lengths[self.table.local_completions]
        return lengths

    @property
    def sampled_masks(self) -> list[np.ndarray]:
        """Mask of each completion: True for the tokens that the model sampled."""
        return list(map(sampled_mask, self.completions))

    @property
    def policy_logps(self) -> list[np.ndarray]:
        """Log-probs under the policy that sampled: the trainer's where they were computed, else the sampler's."""
        return self.old_logps or [c.logps for c in self.completions]

    @property
    def completion_rewards(self) -> np.ndarray:
        """Reward of each completion, float64 [B]; NaN where no function scored it."""
        rewards: np.ndarray = self.table.rewards[self.table.local_completions]
        return rewards

    def kl_penalties(self, algorithm: Algorithm, beta: float) -> list[np.ndarray] | None:
        """Return β·KL of each sampled token, where the algorithm subtracts it from the reward; None elsewhere."""
        if algorithm.kl_in != "reward" or self.ref_logps is None:
            return None
        return kl_penalty(self.policy_logps, self.ref_logps, algorithm.kl, beta, self.sampled_masks)

    def part(self, start: int, stop: int) -> "Experience":
        """Return groups `start` to `stop` of all processes, without the rows."""
        first, last = np.searchsorted(self.table.local_groups, [start, stop]).tolist()
        before, groups = sum(len(g.completions) for g in self.groups[:first]), self.groups[first:last]
        completions = slice(before, before + sum(len(g.completions) for g in groups))
        lists = {name: getattr(self, name) for name in PER_COMPLETION}
        parts = {name: values and values[completions] for name, values in lists.items()}
        return Experience(groups, self.table.select(range(start, stop)), **parts)


PER_COMPLETION = ("ref_logps", "old_logps", "values", "advantages", "returns")
"""Lists of an `Experience` with one array per completion."""


def sum_by_name(*counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sum(each.get(name, 0) for each in counts) for name in dict.fromkeys(chain(*counts))}


def penalize_length(group: Group, algorithm: Algorithm, max_new_tokens: int) -> Group:
    """Add DAPO's length penalty (0 or less) to the rewards, and list it like a reward function."""
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
    """Return the numbers of the groups with different rewards, and of the others; the length penalty does not count."""
    penalties = table.by_function.get(OVERLONG, np.zeros(len(table.rewards)))
    groups = map(table.split, (table.rewards - penalties, np.abs(table.rewards) + np.abs(penalties)))
    differs = np.array(
        [has_reward_variance(each, np.nanmax(sizes, initial=0.0)) for each, sizes in zip(*groups, strict=True)], bool
    )
    return np.flatnonzero(differs).tolist(), np.flatnonzero(~differs).tolist()


def sampled_mask(completion: Completion) -> np.ndarray:
    """Return a mask, bool [n]: False for the tokens that a tool inserted."""
    return np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask


def tokens_in_loss(completion: Completion, mask_truncated: bool) -> np.ndarray:
    """Return a mask, bool [n]: True for the tokens that the model sampled; with `mask_truncated`, False for all tokens
    of a completion that was cut.
    """
    mask = sampled_mask(completion)
    return mask & (not completion.finish.was_cut) if mask_truncated else mask


def slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield `items` in order, `size` at a time; the last slice may be short.

    >>> list(slices("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    assert size >= 1, "slices of nothing would lose every item"
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part
