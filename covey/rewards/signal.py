"""Measure whether scored groups give a learning signal, by reward function and in total.

Advantages compare the completions of one prompt, so a group teaches only if its rewards differ. The groups may come
from the untouched model, before a run. This module does not import JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from covey.types import FinishReason, Group

WEAK = 0.25
"""Share of informative groups below which a signal is called weak: most of the sampling is then spent in vain."""
MOST = 0.5
"""Share of the groups without differences that must show a cause before it is named."""
TOTAL = "reward"
"""Name of the row of the weighted total."""


@dataclass(frozen=True)
class FunctionSignal:
    """Scores of one reward function, or of the weighted total.

    Attributes:
        name: name in the metrics.
        mean: mean over the scored completions; None if there are none.
        within_std: mean over groups of the standard deviation within a group (ddof 1); None if no group has two scores.
        informative: share of groups whose scores differ.
        scored: number of completions that it scored.
        failed: number of completions for which it failed.
    """

    name: str
    mean: float | None
    within_std: float | None
    informative: float
    scored: int
    failed: int = 0


@dataclass(frozen=True)
class Signal:
    """Learning signal of groups.

    Attributes:
        verdict: "yes", "weak" or "no".
        sentence: the verdict with its evidence.
        setting: the setting to change; "" if there is a signal.
        advice: what to do with the setting; "" if there is a signal.
        functions: one row for each reward function, and the total last.
        groups, completions: their numbers.
        truncated: share of completions that a limit cut.
    """

    verdict: str
    sentence: str
    setting: str
    advice: str
    functions: Sequence[FunctionSignal]
    groups: int
    completions: int
    truncated: float


def measure_signal(groups: Sequence[Group], failed: Mapping[str, int] | None = None, critic: bool = False) -> Signal:
    """Return the learning signal of scored `groups`.

    Args:
        failed: number of failures by function.
        critic: whether a critic estimates the advantages, so that all completions are compared with each other.
    """
    failed, compared = failed or {}, _as_one(groups) if critic else groups
    names = dict.fromkeys(name for group in groups for name in group.rewards_by_function)
    rows = [
        _describe(name, [g.rewards_by_function[name] for g in compared], int(failed.get(name, 0))) for name in names
    ]
    total = _describe(TOTAL, [_rewards(group) for group in compared])
    completions = [completion for group in groups for completion in group.completions]
    truncated = sum(c.finish.was_cut for c in completions) / max(1, len(completions))
    verdict = "no" if not total.informative else "weak" if total.informative < WEAK else "yes"
    setting, advice = ("", "") if verdict == "yes" else _find_cause(compared)
    sentence = _say(verdict, total, len(compared), critic)
    return Signal(verdict, sentence, setting, advice, [*rows, total], len(groups), len(completions), truncated)


def choose_examples(groups: Sequence[Group], count: int = 3) -> list[tuple[Group, int]]:
    """Choose at most `count` pairs of completions to read, as (group, index of a completion): the best and the worst of
    the groups with the largest differences, and where none differ the first of each group.
    """
    spread = sorted(groups, key=lambda group: -_spread(_rewards(group)))[:count]
    examples = []
    for group in spread:
        rewards = np.nan_to_num(_rewards(group), nan=-np.inf)
        ends = dict.fromkeys((int(rewards.argmax()), int(rewards.argmin())))
        examples += [(group, index) for index in ends]
    return examples


def _describe(name: str, scores: Sequence[np.ndarray], failed: int = 0) -> FunctionSignal:
    """Return the row of a function from its scores by group: float64 [G] each, NaN for None."""
    known = [values[~np.isnan(values)] for values in scores]
    everything = np.concatenate([np.zeros(0), *known])
    spreads = [float(values.std(ddof=1)) for values in known if values.size > 1]
    return FunctionSignal(
        name,
        float(everything.mean()) if everything.size else None,
        float(np.mean(spreads)) if spreads else None,
        sum(_spread(values) > 0 for values in scores) / max(1, len(scores)),
        int(everything.size),
        failed,
    )


def _say(verdict: str, total: FunctionSignal, groups: int, critic: bool) -> str:
    differing = round(total.informative * groups)
    where = "the completions differ in reward" if critic else f"the rewards differ in {differing} of {groups} groups"
    if verdict == "no":
        return "No signal: " + ("all completions have the same reward" if critic else where)
    beginning = "There is a signal" if verdict == "yes" else "There is a weak signal"
    return f"{beginning}: {where}, with a mean standard deviation of {total.within_std:.3g}"


def _find_cause(groups: Sequence[Group]) -> tuple[str, str]:
    """Return the setting to change and how, from the groups whose rewards do not differ."""
    tied = [group for group in groups if not _spread(_rewards(group))]
    rewards = np.concatenate([_rewards(group) for group in tied])
    if np.isnan(rewards).all():
        return "rewards", "no completion was scored: see why the functions fail or return None"
    if _share(tied, _is_identical) >= MOST:
        return "rollout.temperature", "raise it: the completions of most groups are the same text"
    if _share(tied, _most(lambda finish: finish.was_cut)) >= MOST:
        late = _share(tied, _most(lambda finish: finish is FinishReason.TIME)) >= MOST
        limit = "envs.timeout" if late else "rollout.max_new_tokens"
        return limit, "raise it: most completions were cut before their end"
    if np.ptp(rewards[~np.isnan(rewards)]) > 0:
        return "grpo.num_generations", "raise it: groups differ from each other, so larger ones may differ within"
    value = float(rewards[~np.isnan(rewards)][0])
    if value > 0:
        return "data.path", f"choose harder prompts if {value:.3g} is the best reward, else check the reward functions"
    partial = "add a reward for partial success, choose easier prompts, or train on answers first (covey sft)"
    return "rewards", f"these completions all get {value:.3g}: {partial}"


def _share(groups: Sequence[Group], has: Callable[[Group], bool]) -> float:
    return sum(map(has, groups)) / len(groups)


def _is_identical(group: Group) -> bool:
    return len(group.completions) > 1 and len({completion.text for completion in group.completions}) == 1


def _most(ended: Callable[[FinishReason], bool]) -> Callable[[Group], bool]:
    """Return the function that tells whether most completions of a group ended so."""
    return lambda group: sum(ended(c.finish) for c in group.completions) >= MOST * len(group.completions)


def _as_one(groups: Sequence[Group]) -> list[Group]:
    """Return one group with all completions, as a critic compares them; none if there are no groups."""
    if not groups:
        return []
    names = dict.fromkeys(name for group in groups for name in group.rewards_by_function)
    parts = {name: np.concatenate([group.rewards_by_function[name] for group in groups]) for name in names}
    completions = tuple(completion for group in groups for completion in group.completions)
    rewards = np.concatenate([_rewards(group) for group in groups])
    return [Group("", groups[0].prompt_tokens, completions, rewards=rewards, rewards_by_function=parts)]


def _rewards(group: Group) -> np.ndarray:
    assert group.rewards is not None, "the groups are scored"
    return group.rewards


def _spread(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.ptp(known)) if known.size else 0.0
