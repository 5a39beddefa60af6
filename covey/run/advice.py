"""Warn when a run learns nothing: report what was observed and, where that shows the cause, what to try.

The same metrics can have many causes. A cause is named only if the completions and rewards of the steps show it.
"""

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from covey.train.loop import StepRecord
from covey.types import FinishReason, Group

log = logging.getLogger(__name__)

PATIENCE = 5
"""Number of consecutive steps without a learning signal before the warning."""

Finding = tuple[str, str]
"""Pair of an observation and the advice on it."""


class ZeroAdvantageWarning:
    """Observer of steps in which all completions of every group have equal rewards: all advantages are 0 and nothing is
    learnt. After `PATIENCE` such steps in a row it warns, once until the rewards in a group differ again.
    """

    def __init__(self) -> None:
        self._earlier: deque[Mapping[str, float]] = deque(maxlen=2 * PATIENCE)
        self._without_signal: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> None:
        if record.metrics.get("frac_reward_zero_std") != 1:
            self._earlier.extend(one.metrics for one in (*self._without_signal, record))
            self._without_signal.clear()
        elif len(self._without_signal) < PATIENCE:
            self._without_signal.append(record)
            if len(self._without_signal) == PATIENCE:
                seen, remedies = zip(*findings(self._without_signal, self._earlier), strict=True)
                what = f"in {PATIENCE} steps all samples of every group scored alike, and nothing was learnt"
                log.warning(f"step {record.step}: {what}. Seen: {'; '.join(seen)}. {' '.join(remedies)}")


def findings(without_signal: Sequence[StepRecord], before: Collection[Mapping[str, float]]) -> list[Finding]:
    """Return findings about the steps `without_signal`, given the metrics `before` of earlier steps, some of
    which had a signal.

    A change that the updates caused is reported alone: the other observations may be its consequences.
    """
    groups = [group for record in without_signal for group in record.groups]
    if before and (changed := _reward_fell(without_signal, before) or _policy_narrowed(groups)):
        return [changed]
    found = [find(groups) for find in (_nothing_scored, _all_truncated, _identical_samples, _constant_reward)]
    return [finding for finding in found if finding] or [NO_REASON]


def _reward_fell(without_signal: Sequence[StepRecord], before: Collection[Mapping[str, float]]) -> Finding | None:
    """Report that the mean reward fell below that of the earlier steps by more than twice its standard error. A step's
    error is at least that of all its completions as one group: two groups may have equal means by chance.
    """
    samples = sum(len(group.completions) for group in without_signal[0].groups)
    was, rate = (float(np.mean([metrics[name] for metrics in before])) for name in ("reward", "learning_rate"))
    errors = [max(metrics["reward_error"], metrics["reward_std"] / samples**0.5) for metrics in before]
    now = float(np.mean([record.metrics["reward"] for record in without_signal]))
    if not (rate > 0 and was - now > 2 * float(np.linalg.norm(errors)) / len(errors)):
        return None
    seen = f"the mean reward was {was:.3g} in the {len(before)} steps before, and is {now:.3g} since"
    return (
        seen,
        f"That came with updates at a learning rate of {rate:.3g}: try a lower one, from an earlier checkpoint.",
    )


def _policy_narrowed(groups: Sequence[Group]) -> Finding | None:
    if not _identical_samples(groups):
        return None
    seen = "the samples of a group are all the same text, which they were not before"
    return seen, "The updates have narrowed the policy: a lower learning rate, grpo.beta or grpo.entropy_bonus."


def _nothing_scored(groups: Sequence[Group]) -> Finding | None:
    if np.isnan(_rewards(groups)).all():
        return "no completion was scored", "See why the reward function gives None for all of them."
    return None


def _all_truncated(groups: Sequence[Group]) -> Finding | None:
    completions = [completion for group in groups for completion in group.completions]
    if not all(completion.finish is FinishReason.LENGTH for completion in completions):
        return None
    longest = max(len(completion.tokens) for completion in completions)
    tokens = "token" if longest == 1 else "tokens"
    return f"every completion was cut at {longest} {tokens}", "Where answers need more: raise rollout.max_new_tokens."


def _identical_samples(groups: Sequence[Group]) -> Finding | None:
    if not all(_count_distinct(group) == 1 for group in groups):
        return None
    return "the samples of a group are all the same text", "Raise rollout.temperature, or loosen top_k and top_p."


def _constant_reward(groups: Sequence[Group]) -> Finding | None:
    rewards = _rewards(groups)
    if all(_count_distinct(group) == 1 for group in groups) or not np.ptp(rewards) <= 1e-9 * np.abs(rewards).max():
        return None
    seen = f"all {rewards.size} completions scored {rewards[0]:.3g}, though their texts differ"
    return (
        seen,
        "See in samples.jsonl whether they deserve it: if not, the reward function; if so, easier or harder prompts.",
    )


def _count_distinct(group: Group) -> int:
    """Count the distinct completions of a group."""
    return len({completion.tokens.tobytes() for completion in group.completions})


def _rewards(groups: Sequence[Group]) -> np.ndarray:
    return np.concatenate([group.rewards for group in groups if group.rewards is not None])


NO_REASON = (
    "scores differ between groups, and not within one",
    "The completions are in samples.jsonl: see what would tell better from worse there.",
)
"""Finding for steps that show no cause."""
