"""Measure whether scored groups give a learning signal, by reward function and in total, and what explains the scores.

Advantages compare the completions of one prompt, so a group teaches only if its rewards differ. The groups may come
from the untouched model, before a run. This module does not import JAX.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from covey.losses.advantages import has_reward_variance
from covey.types import FinishReason, Group
from covey_report.correlation import correlate, labels_of

WEAK = 0.25
"""Share of informative groups below which a signal is called weak: most of the sampling is then spent in vain."""
MOST = 0.5
"""Share of the groups without differences that must show a cause before it is named."""
TOTAL = "total reward"
"""Name of the row of the weighted total. No reward function has a name with a space."""
LENGTH, EMPTY = "text length", "empty text"
"""Names of two further columns of correlations: the characters of a completion, and whether it has none."""
EXPLAINED, SAME = 0.9, 0.98
"""Correlations within groups from which one figure explains a reward, and from which two are the same but for their
scale."""
MIN_COMPLETIONS = 16
"""Smallest number of completions whose correlations are judged."""
MAX_BARS = 8
"""Largest number of bars of a histogram: as many values, or as many ranges of equal width."""


@dataclass(frozen=True)
class FunctionSignal:
    """Scores of one reward function, or of the weighted total.

    Attributes:
        name: name in the metrics.
        mean: mean over the scored completions; None if there are none.
        within_std: mean over groups of the standard deviation within a group (ddof 1); None if no group has two scores.
        informative: share of groups whose scores differ; None if no completion has a score.
        scored: number of completions that it scored.
        failed: number of completions for which it failed.
        histogram: number of scores for each value, or from each value up to the next.
        correlations: within groups with the other functions, the length and the emptiness of a completion, by name;
            without constant ones.
    """

    name: str
    mean: float | None
    within_std: float | None
    informative: float | None
    scored: int
    failed: int
    histogram: Mapping[float, int]
    correlations: Mapping[str, float]


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
        empty: share of completions without text.
        warnings: what explains the scores otherwise than the answers.
    """

    verdict: str
    sentence: str
    setting: str
    advice: str
    functions: Sequence[FunctionSignal]
    groups: int
    completions: int
    truncated: float
    empty: float
    warnings: Sequence[str]


class Extremes(NamedTuple):
    """The best and the worst completion of a group by one function, or by the total."""

    function: str
    group: Group
    best: int
    worst: int


def measure_signal(groups: Sequence[Group], failed: Mapping[str, int] | None = None, critic: bool = False) -> Signal:
    """Return the learning signal of scored `groups`.

    Args:
        failed: number of failures by function.
        critic: whether a critic estimates the advantages, so that all completions are compared with each other.
    """
    failed, compared = failed or {}, _as_one(groups) if critic else groups
    completions = [completion for group in groups for completion in group.completions]
    texts = [completion.text.strip() for completion in completions]
    measured = {LENGTH: np.array([*map(len, texts)], float), EMPTY: np.array([not text for text in texts], float)}
    names = function_names(groups)
    scores = {name: np.concatenate([np.zeros(0), *(_scores(group, name) for group in groups)]) for name in names}
    rows = [
        _describe(name, [_scores(g, name) for g in compared], int(failed.get(name, 0)), scores | measured)
        for name in names
    ]
    total = rows[-1]
    warnings = [*_explain(scores[TOTAL], measured, rows)]
    truncated = sum(c.finish.was_cut for c in completions) / max(1, len(completions))
    verdict = "no" if not total.informative else "weak" if total.informative < WEAK else "yes"
    setting, advice = ("", "") if verdict == "yes" else _find_cause(compared)
    if warnings:
        setting, advice = "rewards", "score what an answer says, so that the worst one cannot get the best reward"
    sentence = _say(verdict, total, len(compared), critic)
    counts, empty = (len(groups), len(completions)), float(measured[EMPTY].mean()) if completions else 0.0
    return Signal(verdict, sentence, setting, advice, rows, *counts, truncated, empty, warnings)


def function_names(groups: Sequence[Group]) -> list[str]:
    """Return the names of the reward functions of scored groups, and `TOTAL`."""
    return [*dict.fromkeys(name for group in groups for name in group.rewards_by_function), TOTAL]


def choose_extremes(groups: Sequence[Group], name: str, count: int = 1) -> list[Extremes]:
    """Choose the best and the worst completion by a function, or by the total, of the `count` groups with the largest
    differences.
    """
    by_spread = sorted(groups, key=lambda group: -_spread(_scores(group, name)))[:count]
    ends = [(group, _scores(group, name)) for group in by_spread]
    return [
        Extremes(name, group, int(np.nan_to_num(s, nan=-np.inf).argmax()), int(np.nan_to_num(s, nan=np.inf).argmin()))
        for group, s in ends
    ]


def _scores(group: Group, name: str) -> np.ndarray:
    """Return the scores of a group by a function, or in total: float64 [G]."""
    return _rewards(group) if name == TOTAL else group.rewards_by_function[name]


def _explain(total: np.ndarray, measured: Mapping[str, np.ndarray], rows: Sequence[FunctionSignal]) -> Iterator[str]:
    """Yield other explanations of the rewards than the answers: their length, their emptiness, another function."""
    empty, known = measured[EMPTY] > 0, ~np.isnan(total)
    if empty.size and empty.all():
        yield "every completion is empty"
    elif (empty & known).any() and has_reward_variance(total):
        best = total[known].max()
        if not has_reward_variance(np.append(total[empty], best)):
            yield f"empty completions get the best reward, {best:.3g}: {empty.sum()} of {empty.size} are empty"
    if total.size < MIN_COMPLETIONS:
        return
    by_length = rows[-1].correlations.get(LENGTH, 0.0)
    if abs(by_length) >= EXPLAINED:
        yield f"the reward follows the length of a completion (correlation {by_length:.2f})"
    for number, row in enumerate(rows[:-1]):
        same = [name for name in (one.name for one in rows[:number]) if abs(row.correlations.get(name, 0.0)) >= SAME]
        yield from (
            f"{name} and {row.name} give the same scores (correlation {row.correlations[name]:.2f})" for name in same
        )


def _histogram(scores: np.ndarray) -> dict[float, int]:
    """Count scores by value, or by the lower end of a range where there are many values."""
    values, counts = np.unique(scores, return_counts=True)
    if len(values) > MAX_BARS:
        counts, edges = np.histogram(scores, MAX_BARS)
        values = edges[:-1]
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _describe(
    name: str, scores: Sequence[np.ndarray], failed: int, columns: Mapping[str, np.ndarray]
) -> FunctionSignal:
    """Return the row of a function.

    Args:
        name: its name.
        scores: its scores by group: float64 [G] each, NaN for None.
        failed: number of failures.
        columns: the scores of all functions, the length and the emptiness by name, float64 [N] each.
    """
    labels = labels_of([len(values) for values in scores])
    pairs = {other: correlate(columns[name], values, labels) for other, values in columns.items() if other != name}
    known = [values[~np.isnan(values)] for values in scores]
    everything = np.concatenate([np.zeros(0), *known])
    spreads = [float(values.std(ddof=1)) for values in known if values.size > 1]
    return FunctionSignal(
        name,
        float(everything.mean()) if everything.size else None,
        float(np.mean(spreads)) if spreads else None,
        float(np.mean([*map(has_reward_variance, scores)])) if everything.size else None,
        int(everything.size),
        failed,
        _histogram(everything),
        {other: round(value, 4) for other, value in pairs.items() if value is not None},
    )


def _say(verdict: str, total: FunctionSignal, groups: int, critic: bool) -> str:
    differing = round((total.informative or 0) * groups)
    where = "the completions differ in reward" if critic else f"the rewards differ in {differing} of {groups} groups"
    if verdict == "no":
        return "No signal: " + ("all completions have the same reward" if critic else where)
    beginning = "There is a signal" if verdict == "yes" else "There is a weak signal"
    return f"{beginning}: {where}, with a mean standard deviation of {total.within_std:.3g}"


def _find_cause(groups: Sequence[Group]) -> tuple[str, str]:
    """Return the setting to change and how, from the groups whose rewards do not differ."""
    tied = [group for group in groups if not has_reward_variance(_rewards(group))]
    rewards = np.concatenate([np.zeros(0), *(_rewards(group) for group in tied)])
    if np.isnan(rewards).all():
        return "rewards", "no completion was scored: see why the functions fail or return None"
    if _share(tied, _is_identical) >= MOST:
        return "rollout.temperature", "raise it: the completions of most groups are the same text"
    if _share(tied, _most(lambda finish: finish.was_cut)) >= MOST:
        late = _share(tied, _most(lambda finish: finish is FinishReason.TIME)) >= MOST
        limit = "envs.timeout" if late else "rollout.max_new_tokens"
        return limit, "raise it: most completions were cut before their end"
    if has_reward_variance(rewards):
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
