"""What a run says when nothing is learnt: what was seen, and a remedy only where that tells one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from covey.display import show_log
from covey.rl.metrics import group_metrics
from covey.run.advice import PATIENCE, ZeroAdvantageWarning
from covey.train.loop import StepRecord
from covey.types import Completion, FinishReason, Group

NAN = float("nan")


def group(rewards: Sequence[float], texts: Sequence[str] = "abcd", finish: str = "stop") -> Group:
    none = np.zeros(0)
    made = [Completion(np.array([ord(c) for c in text]), none, none, FinishReason(finish), text) for text in texts]
    return Group("p", np.array([1]), tuple(made[: len(rewards)]), rewards=np.array(rewards))


def said(*steps: Sequence[Group], learning_rate: float = 0.1) -> list[str]:
    """What is said of steps with these groups."""
    told: list[str] = []
    adviser = ZeroAdvantageWarning()
    with show_log(info=told.append, warning=told.append):
        for number, groups in enumerate(steps, start=1):
            metrics = group_metrics(groups) | {"learning_rate": learning_rate, "step": number}
            adviser(StepRecord(number, 1, 99, metrics, groups))
    return told


def tied(*groups: Group) -> list[Sequence[Group]]:
    return [groups] * PATIENCE


DIFFERS = [group([1.0, 0.0, 1.0, 0.0]), group([0.0, 1.0, 1.0, 1.0])]
CONSTANT = (group([0.3] * 4), group([0.3] * 4, "efgh"))
CUT = (group([0.0] * 4, finish="length"), group([0.0] * 4, "efgh", "length"))
SAME = (group([0.0] * 4, ["a"] * 4), group([1.0] * 4, ["b"] * 4))
APART = (group([0.0] * 4), group([1.0] * 4, "efgh"))
UNSCORED = (group([NAN] * 4), group([NAN] * 4))
SEEN = {"constant": CONSTANT, "cut": CUT, "same": SAME, "apart": APART, "unscored": UNSCORED}
CAUSES = {
    "reward function": ["constant", "cut", "unscored"],
    "max_new_tokens": ["cut"],
    "rollout.temperature": ["same"],
    "learning rate": [],
}


@pytest.mark.parametrize("what", SEEN)
@pytest.mark.parametrize("cause", CAUSES)
def test_a_remedy_is_named_only_where_what_was_seen_tells_it(cause: str, what: str) -> None:
    (told,) = said(*tied(*SEEN[what]))
    assert told.startswith(f"step {PATIENCE}: in {PATIENCE} steps all samples of every group scored alike")
    assert (cause in told) is (what in CAUSES[cause])


def test_one_score_for_all_is_told_with_it() -> None:
    (told,) = said(*tied(*CONSTANT))
    assert f"all {8 * PATIENCE} completions scored 0.3, though their texts differ" in told


def test_completions_that_were_all_cut_are_told_with_their_length() -> None:
    (told,) = said(*tied(*CUT))
    assert "every completion was cut at 1 token" in told


@pytest.mark.parametrize("since", [CUT, (group([0.0] * 4), group([0.0] * 4)), (group([0.0] * 4, ["a"] * 4, "length"),)])
def test_a_reward_that_fell_after_updates_points_at_the_learning_rate_alone(since: Any) -> None:
    """Whatever the completions look like since: all cut, all the same, all scored 0."""
    falling = [group([1.0, 0.0, 0.0, 0.0]), group([1.0, 1.0, 0.0, 0.0])]
    (told,) = said(DIFFERS, falling, falling, *tied(*since))
    assert "the mean reward was 0.458 in the 3 steps before, and is 0 since" in told
    assert "a learning rate of 0.1" in told
    assert not any(cause in told for cause in ("reward function", "max_new_tokens", "rollout.temperature"))


@pytest.mark.parametrize(
    "before",
    [
        DIFFERS,  # 0.625, and all is right since
        [group([1.0, 1.0, 1.0, 0.9]), group([1.0] * 4)],
    ],
)
def test_a_reward_that_did_not_fall_blames_no_update(before: Sequence[Group]) -> None:
    (told,) = said(before, *tied(group([1.0] * 4), group([1.0] * 4)))
    assert "learning rate" not in told
    assert "scored 1, though their texts differ" in told
    assert "harder prompts" in told


def test_one_lucky_sample_before_is_no_reward_that_fell() -> None:
    """Steps from which something is learnt have higher rewards because they are those."""
    rare = [group([0.0] * 4), group([0.0, 0.0, 0.0, 1.0])]
    nothing = [group([0.0] * 4), group([0.0] * 4)]
    (told,) = said(rare, nothing, nothing, nothing, rare, *tied(*nothing))
    assert "learning rate" not in told


def test_samples_that_have_become_one_text_do_not_blame_the_sampling() -> None:
    """Nor the room for them: the updates have made them so, though the reward is hardly below what it was."""
    since = (group([0.5] * 4, ["a"] * 4, "length"), group([0.5] * 4, ["b"] * 4, "length"))
    (told,) = said(DIFFERS, *tied(*since))
    assert "all the same text, which they were not before" in told
    assert "a lower learning rate" in told
    assert not any(cause in told for cause in ("max_new_tokens", "rollout.temperature", "reward function"))


def test_updates_of_learning_rate_0_have_moved_nothing() -> None:
    (told,) = said(DIFFERS, *tied(*CUT), learning_rate=0.0)
    assert "learning rate" not in told


def test_it_is_said_once_until_a_group_differs() -> None:
    assert len(said(*tied(*CONSTANT), *tied(*CONSTANT))) == 1
    assert len(said(*tied(*CONSTANT), DIFFERS, *tied(*CONSTANT))) == 2
    assert said(*tied(*CONSTANT)[1:]) == []
