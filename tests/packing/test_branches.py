"""Branches of completions in rows: what each token sees, and what it is predicted from."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from covey.models.spans import span_mask
from covey.packing.rows import attention_spans, pack
from covey.types import Branch, Completion, Group

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
