"""Table of the groups of a step: what every process knows of them, which is numbers of tokens and scores.

A process holds the tokens of the groups that it has sampled, and no others. What all have to decide alike, such as the
rows of a micro-batch, dynamic sampling, advantages and metrics, follows from this table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from covey.losses.advantages import reward_table
from covey.packing.rows import GroupShape
from covey.parallel import processes
from covey.types import Branch, Completion, Episode, Group


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
        cut: whether a limit ended it.
        mass: probability mass that truncation kept, summed over the sampled tokens; NaN without any.
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
    cut: Bool[np.ndarray, "B"]
    mass: Float[np.ndarray, "B"]
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
    def own(self) -> Int[np.ndarray, "p"]:
        """Numbers of the groups that this process has sampled."""
        return np.flatnonzero(self.owner == processes.here().index)

    @property
    def own_completions(self) -> Int[np.ndarray, "b"]:
        """Numbers of the completions of these groups."""
        return np.flatnonzero(np.repeat(self.owner, self.sizes) == processes.here().index)

    @cached_property
    def starts(self) -> Int[np.ndarray, "P+1"]:
        """Number of the first completion of each group, and the number of all."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=int)])

    @property
    def reward_table(self) -> Float[np.ndarray, "P G"]:
        """Rewards as a table; NaN where no function scored the completion, and behind smaller groups."""
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
        return [values[start:end] for start, end in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def select(self, groups: Sequence[int] | Int[np.ndarray, "p"]) -> "GroupTable":
        """Return the groups with these numbers, in this order."""
        groups = np.asarray(groups, int)
        completions = np.concatenate([np.zeros(0, int), *(np.arange(*self.starts[[i, i + 1]]) for i in groups)])

        def taken(name: str, values: Any) -> Any:
            if isinstance(values, Mapping):
                return {key: taken(name, of_key) for key, of_key in values.items()}
            if not isinstance(values, np.ndarray):
                return [values[i] for i in completions]
            return values[groups if name in BY_GROUP else completions]

        return GroupTable(**{field.name: taken(field.name, getattr(self, field.name)) for field in fields(self)})

    def collect(self, values: Sequence[Any], about: str) -> list[Any]:
        """Return the values of all groups, given those of this process's. All processes must call it."""
        by_process = [iter(theirs) for theirs in processes.here().all_gather(list(values), about)]
        return [next(by_process[owner]) for owner in self.owner]

    def collect_numbers(self, values: np.ndarray, about: str) -> np.ndarray:
        """Return the values of all completions, given those of this process's, [b] or [b, n]. All processes must call
        it.
        """
        own = np.split(values, np.cumsum(self.sizes[self.own], dtype=int)[:-1]) if len(self.own) else []
        return np.concatenate([values[:0], *self.collect(own, about)])


NO_KEY = np.zeros(2, np.uint32)
BY_GROUP = ("owner", "prompts", "sizes")
"""Columns with one entry per group."""
HASH = np.array([1, 1_000_003, 998_244_353, 6_700_417_123], np.int64)
"""Factors by which a sequence of as many tokens becomes one number."""


def table_of(groups: Sequence[Group]) -> GroupTable:
    """Return the table of groups with rewards, all of them this process's."""
    completions = [c for group in groups for c in group.completions]

    def column(kind: type, values: Iterator[Any]) -> np.ndarray:
        return np.array(list(values), kind)

    none = [np.full(len(group.completions), np.nan) for group in groups]
    rewards = [n if group.rewards is None else np.asarray(group.rewards) for group, n in zip(groups, none, strict=True)]
    names = groups[0].rewards_by_function if groups else ()
    return GroupTable(
        owner=np.full(len(groups), processes.here().index),
        prompts=column(int, (len(group.prompt_tokens) for group in groups)),
        sizes=column(int, (len(group.completions) for group in groups)),
        lengths=column(int, (len(c.tokens) for c in completions)),
        sampled=column(int, (c.num_sampled for c in completions)),
        cut=column(bool, (c.finish.was_cut for c in completions)),
        mass=column(float, map(_kept_mass, completions)),
        empty=column(bool, (not c.text.strip() for c in completions)),
        characters=column(int, (len(c.text) for c in completions)),
        repetition=column(float, map(_repeated_fraction, completions)),
        first_equal=column(int, chain.from_iterable(map(_first_equal, groups))),
        rewards=_concatenated(rewards),
        by_function={name: _concatenated([group.rewards_by_function[name] for group in groups]) for name in names},
        keys=column(np.uint32, (NO_KEY if c.key is None else c.key for c in completions)).reshape(-1, 2),
        branches=[c.branches for c in completions],
        episodes=[c.episode and replace(c.episode, messages=()) for c in completions],
    )


def join(tables: Sequence[GroupTable]) -> GroupTable:
    """Return the groups of all tables, one table after the other."""
    tables = [table for table in tables if len(table)] or list(tables[:1])

    def joined(name: str) -> Any:
        columns = [getattr(table, name) for table in tables]
        if isinstance(columns[0], Mapping):
            return {key: np.concatenate([column[key] for column in columns]) for key in columns[0]}
        return np.concatenate(columns) if isinstance(columns[0], np.ndarray) else list(chain(*columns))

    return GroupTable(**{field.name: joined(field.name) for field in fields(GroupTable)})


def gather_table(groups: Sequence[Group]) -> GroupTable:
    """Return the table of the groups of all processes, given those of this one. All processes must call it."""
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


def _kept_mass(completion: Completion) -> float:
    mass: np.ndarray = np.exp(completion.logps - completion.sampler_logps)
    mass = mass if completion.mask is None or not mass.size else mass[completion.mask]
    return float(mass.sum(dtype=np.float64)) if mass.size else float("nan")


def _concatenated(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *values])
