"""Which steps and completions have token values; their numbers are tested in `tests/run/test_learners.py`."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, RLTrainingConfig
from covey.models.spans import span_mask
from covey.packing.rows import Rows, attention_spans
from covey.rl.step_data import Experience, table_of
from covey.types import Branch
from covey_report import token_values
from covey_report.token_values import COMPLETIONS, TOKENS, TokenScorer, choose, token_values_interval


@pytest.mark.parametrize(
    ("prompts", "samples", "total", "every"), [(8, 8, 16, 13), (8, 8, 2000, 40), (64, 8, 60, 2), (1, 4, 20, 100)]
)
def test_the_interval_bounds_the_cost_and_the_number_of_steps(
    prompts: int, samples: int, total: int, every: int
) -> None:
    """Two passes of the scored completions, with half as much padding, are below 1 % of three passes of all others."""
    config = RLTrainingConfig(prompts_per_step=prompts)
    assert token_values_interval(config, samples, total) == every
    assert 2 * 1.5 * min(samples, COMPLETIONS) <= 0.03 * prompts * samples * every
    assert total // every <= 50


def test_the_setting_is_the_interval() -> None:
    assert [token_values_interval(RLTrainingConfig(token_values_every_n_steps=n), 8, 16) for n in (0, 3)] == [0, 3]


class Cluster:
    """Scores each token as −1, and one less at each further call; `calls` has the lengths of each call."""

    config = SimpleNamespace(training_config=RLTrainingConfig())
    row_sizes = SimpleNamespace(fixed_shapes=False)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special: "x" * len(ids))

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def get_token_values(self, rows: Rows, lengths: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        self.calls.append(lengths)
        logps = [np.full(n, -len(self.calls), np.float32) for n in lengths]
        return logps, [np.ones(n, np.float32) for n in lengths]


def test_the_first_informative_group_is_scored_before_and_after(groups_of: Callable[..., Any]) -> None:
    """Only the first micro-batch that has groups is scored, and nothing where none was scored before."""
    tied, told = (
        replace(group, advantages=np.array(advantages, np.float32))
        for group, advantages in zip(groups_of([(4, [3, 2]), (5, [1, 6])]), ([0, 0], [1, -1]), strict=True)
    )
    lengths = [3, 2, 1, 6]
    advantages = [np.full(n, a) for n, a in zip(lengths, (0.0, 0.0, 1.0, -1.0), strict=True)]
    algorithm, groups = algorithm_of(GRPOConfig(beta=0.1)), [tied, told]
    ref_logps, empty = [np.zeros(n) for n in lengths], Experience([], table_of([]))
    batch = Experience(groups, table_of(groups), ref_logps, advantages=advantages)
    cluster: Any = Cluster()
    scorer = TokenScorer(cluster, algorithm)
    scorer.score_before(empty)
    assert cluster.calls == []
    for _ in range(2):
        scorer.score_before(batch)
    assert cluster.calls == [[1, 6]]
    scorer.score_again()
    assert cluster.calls == [[1, 6]] * 2
    first, second = scorer.rows(7, groups)
    assert [first[name] for name in ("step", "group", "sample", "advantage")] == [7, 1, 0, 1.0]
    assert [second[name] for name in ("sample", "texts", "advantage")] == [1, ["x"] * 6, -1.0]
    assert (second["logps"], second["change"]) == ([-1.0] * 6, [-1.0] * 6)
    assert len(second["kl"]) == 6
    assert "sampled" not in second
    idle = TokenScorer(cluster, algorithm)
    idle.score_again()
    assert (idle.rows(7, groups), len(cluster.calls)) == ([], 2)


def test_completions_with_large_advantages_are_shown_and_long_ones_cut(groups_of: Callable[..., Any]) -> None:
    (group,) = groups_of([(5, [3] * 11 + [2 * TOKENS])])
    advantages = np.zeros(12, np.float32)
    advantages[[2, 11]] = 0.5, -3.0
    shown = choose(replace(group, advantages=advantages), 768)
    assert shown.group.advantages is advantages
    assert shown.numbers == [0, 1, 2, 3, 4, 5, 6, 11]
    assert shown.lengths == [3] * 7 + [TOKENS]
    assert shown.rows.scored.sum() == 7 * 3 + TOKENS
    assert shown.rows.tokens.shape == (1, 768)
    assert np.array_equal(shown.scored.completions[-1].tokens, group.completions[11].tokens[:TOKENS])


@pytest.mark.slow
def test_a_branch_that_begins_behind_the_cut_is_cut_too(
    groups_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trap: a token that such a branch drops ended behind the completion, and the next completions saw it."""
    monkeypatch.setattr(token_values, "TOKENS", 8)
    (group,) = groups_of([(5, [20, 6, 8])])
    first, *others = group.completions
    branched = replace(first, branches=(Branch(3, 6), Branch(8, 7), Branch(12, 9), Branch(17, 4)))
    shown = choose(replace(group, completions=(branched, *others)), 64)
    allowed, segments = span_mask(attention_spans(shown.rows))[0], shown.rows.input_segment_ids[0]
    seen = {(int(segments[at]), int(segments[by])) for by, at in zip(*np.nonzero(allowed), strict=True)}
    assert {(one, other) for one, other in seen if one and one != other} == set()
    assert shown.scored.completions[0].branches == (Branch(3, 6),)
