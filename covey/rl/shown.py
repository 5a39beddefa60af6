"""Completions that are scored for token values: at most `COMPLETIONS` of one group, long ones cut, and their rows."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from covey.config.schema import RolloutConfig
from covey.packing.rows import Rows, pack
from covey.sampling.lengths import power_of_two
from covey.types import Completion, FinishReason, Group

COMPLETIONS = 8
"""Maximum number of completions of a group that are scored."""
TOKENS = 512
"""Maximum number of tokens of a completion that are scored, from its beginning."""
SMALLEST_ROW = 128
"""Length of the shortest row: lengths are powers of two, so that few programs are compiled."""


class Shown(NamedTuple):
    """Completions that are scored.

    Attributes:
        group: the group of which they are, whole.
        numbers: their numbers in the group.
        scored: the group with these completions alone, long ones cut.
        rows: the packed rows of `scored`.
    """

    group: Group
    numbers: list[int]
    scored: Group
    rows: Rows

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each completion."""
        return [len(completion.tokens) for completion in self.scored.completions]


def longest_shown(config: RolloutConfig, num_generations: int, row_length: int) -> Rows:
    """Return the rows of the completions that are scored where prompt and completions are as long as they may be."""
    tokens, none = np.zeros(config.max_new_tokens, np.int32), np.zeros(0, np.float32)
    one = Completion(tokens, none, none, FinishReason.LENGTH)
    prompt = np.zeros(config.max_prompt_length, np.int32)
    return choose(Group("", prompt, (one,) * num_generations), row_length).rows


def choose(group: Group, row_length: int, one_length: bool = False) -> Shown:
    """Return the completions with the largest advantages of either sign, in the order of the group, and their rows,
    which are as short as they may be; with `one_length`, of `row_length` tokens.
    """
    size = np.zeros(len(group.completions)) if group.advantages is None else np.abs(group.advantages)
    numbers = sorted(np.argsort(-size, kind="stable")[:COMPLETIONS].tolist())
    scored = replace(group, completions=tuple(_beginning(group.completions[i]) for i in numbers))
    needed = len(group.prompt_tokens) + sum(len(completion.tokens) for completion in scored.completions)
    length = row_length if one_length else min(max(power_of_two(needed), SMALLEST_ROW), row_length)
    return Shown(group, numbers, scored, pack([scored], length, compile_cost=float("inf")))


def _beginning(completion: Completion) -> Completion:
    """Return the first `TOKENS` tokens of a completion with their values, and the branches that begin among them."""
    cut = {name: getattr(completion, name)[:TOKENS] for name in ("tokens", "logps", "sampler_logps")}
    mask = None if completion.mask is None else completion.mask[:TOKENS]
    branches = completion.branches and tuple(branch for branch in completion.branches if branch.start < TOKENS)
    return replace(completion, **cut, mask=mask, branches=branches)
