"""Branches of completions in rows: what each token sees, and what it is predicted from."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from covey.models.spans import span_mask
from covey.packing.rows import Rows, attention_spans, pack
from covey.types import Branch, Completion, FinishReason, Group

BRANCHES = [
    (),
    (Branch(4, 7),),
    (Branch(3, 6), Branch(6, 8), Branch(9, 5)),
    (Branch(2, 5), Branch(3, 2), Branch(8, 3)),  # the last two drop tokens of the prompt, which has 5
    (Branch(1, 0),),
]


def sequences(prompt: np.ndarray, completion: Completion) -> Iterator[tuple[list[int], range]]:
    """Each branch as a whole sequence of tokens, with the indices of its own tokens in the completion."""
    sequence, branches = prompt.tolist(), [Branch(0, len(prompt)), *(completion.branches or ())]
    for (start, kept), (end, _) in pairwise([*branches, Branch(len(completion.tokens), 0)]):
        sequence = sequence[:kept] + completion.tokens[start:end].tolist()
        yield sequence, range(start, end)


@pytest.mark.parametrize("packing", ["groups", "dense"])
def test_a_token_sees_its_own_sequence_and_is_predicted_from_its_end(packing: Any) -> None:
    number = iter(range(10**6))
    draw = lambda n: np.array([next(number) for _ in range(n)], np.int32)  # noqa: E731
    none = np.zeros(0, np.float32)
    completions = [Completion(draw(12), none, none, "stop", branches=branches) for branches in BRANCHES]  # type: ignore[arg-type]
    groups = [Group("", draw(5), tuple(completions)), Group("", draw(3), (replace(completions[0], tokens=draw(4)),))]
    rows = pack(groups, 64, packing=packing)
    visible = np.asarray(span_mask(attention_spans(rows)))

    before: dict[int, list[int]] = {}
    for group in groups:
        for completion in group.completions:
            for sequence, own in sequences(group.prompt_tokens, completion):
                before |= {int(completion.tokens[i]): sequence[: i - own[-1] - 1] for i in own}
    seen = 0
    for row, column in zip(*np.nonzero(rows.scored), strict=True):
        target, source = int(rows.target[row, column]), int(rows.gather_index[row, column])
        if before[target]:  # nothing precedes the first token of a branch that keeps nothing
            assert rows.tokens[row, visible[row, source]].tolist() == before[target]
            positions = rows.positions[row, visible[row, source]]
            assert positions.tolist() == list(range(len(before[target])))
            seen += 1
    assert seen == 12 * len(BRANCHES) + 4 - 1


def packed(branch: Branch) -> Rows:
    """A row of a prompt of 5 tokens and two completions of 6, the first with a branch."""
    tokens, none = np.arange(6, dtype=np.int32), np.zeros(0, np.float32)
    plain = Completion(tokens, none, none, FinishReason.STOP, branches=())
    return pack([Group("", np.arange(5, dtype=np.int32), (replace(plain, branches=(branch,)), plain))], 64)


@pytest.mark.parametrize(("kept", "prompts"), [(5, 1), (4, 2)])
def test_only_a_branch_that_drops_tokens_of_the_prompt_has_one_for_itself(kept: int, prompts: int) -> None:
    rows = packed(Branch(2, kept))
    assert ((rows.group_ids > 0) & (rows.input_segment_ids == 0)).sum() == prompts * 5


def test_a_token_that_nothing_precedes_is_read_at_its_own_prompt() -> None:
    """Its log-prob is not used, but the place that it is read from has to be one of the same group."""
    rows = packed(Branch(2, 0))
    number, index = rows.scatter_index[0].T
    (source,) = rows.gather_index[0, (number == 0) & (index == 2)]
    (of_first,) = rows.gather_index[0, (number == 0) & (index == 0)]
    assert source == of_first - 4
