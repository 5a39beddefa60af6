"""Checks of the learning signal: does the reward tell completions apart, and can it be reached?

Each takes the history of a run and returns its evidence, or "" if its rule is not met. Thresholds are constants, which
the table of rules states in words.
"""

import math

import numpy as np

from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.levels import ROUNDING, all_zero, constant, improved, level, percent, recent, spread

MIN_ROWS = 5
"""Number of steps from which a rule without a trend is judged."""
TREND_ROWS, LONG_ROWS = 8, 16
"""Number of steps from which a change is judged, and from which the lack of one is."""
MIN_UNREWARDED = 100
"""Number of completions without a reward from which it counts as never reached."""
MOST_CUT, NEARLY_ALL_CUT = 0.3, 0.8
"""Share of completions cut off from which that is a problem if the reward does not rise, and from which it is in any
case."""
MOST_TIED, MOST_TIED_SMALL, SMALL = 0.8, 0.6, 3
"""Share of groups with equal rewards from which too few have a signal, and that for groups of at most `SMALL`."""
EASY = 2.0
"""Mean reward in units of its spread from which the prompts are too easy: for rewards of 0 and 1, 80 % right."""
HOT_SHARE = 0.5
"""Share of the reward before training, at another temperature, below which the sampling temperature is too high."""
HOT = 2.0
"""Temperature that is too high if nothing is learnt."""
FEW_DISTINCT = 1.25
"""Number of different completions in a group of equal ones, on average, below which they are too similar."""
LEAST_KEPT = 0.7
"""Share of the probability below which top-k, top-p and min-p remove much."""


def not_scored(history: RunHistory) -> str:
    """Find that no completion was scored."""
    if len(history) < MIN_ROWS or history.has("reward"):
        return ""
    return f"reward is missing in all {len(history)} steps"


def constant_reward(history: RunHistory) -> str:
    """Find that every completion had the same reward, other than 0."""
    rewards = history.column("reward")
    value = _only_reward(history)
    if value is None or value == 0:
        return ""
    count = int(np.isfinite(rewards).sum())
    return f"every completion of {count} steps scored {value:.3g}{_completions(history, count)}"


def never_rewarded(history: RunHistory) -> str:
    """Find that every completion had the reward 0, a penalty for long answers aside."""
    functions = history.functions()
    if _only_reward(history) != 0 and not (functions and len(_unrewarded(history)) == len(functions)):
        return ""
    rows, samples = len(history), len(history) * history.samples_per_step
    if samples and samples < MIN_UNREWARDED:
        return ""
    cut = level(history, "completions/clipped_ratio", 0, rows)
    so_far = f"none of {samples} completions in {rows} steps" if samples else f"no completion in {rows} steps"
    likely = f"; the success rate is below {percent(3 / samples)} (95 % confidence)" if samples else ""
    cut_off = f"; {percent(cut.mean)} of them were cut off" if cut and cut.mean else ""
    return f"{so_far} had a reward other than 0{likely}{cut_off}"


def part_never_rewarded(history: RunHistory) -> str:
    """Find reward functions that gave 0 to every completion while the reward varied."""
    parts = [] if _only_reward(history) is not None else _unrewarded(history)
    return f"0 for every completion in all {len(history)} steps: {', '.join(parts)}" if parts else ""


def answers_cut(history: RunHistory) -> str:
    """Find that many completions were cut off and that this did not get rarer, while the reward did not rise, or that
    nearly all were."""
    cut = recent(history, "completions/clipped_ratio")
    first = level(history, "completions/clipped_ratio", 0, history.window)
    if len(history) < MIN_ROWS or cut is None or first is None or cut.mean < MOST_CUT or cut.mean < 0.7 * first.mean:
        return ""
    finished = (1 - level_mean(history, "completions/clipped_ratio")) * len(history) * history.samples_per_step
    excused = improved(history) and min(first.mean, cut.mean) < NEARLY_ALL_CUT
    if excused or (_only_reward(history) == 0 and finished >= MIN_UNREWARDED):
        return ""  # answers that were finished had no reward either
    longest = np.nanmax(history.column("completions/max_length")) if history.has("completions/max_length") else math.nan
    tokens = f" at {longest:.0f} token{'s' if longest != 1 else ''}" if math.isfinite(longest) else ""
    shares = f"{percent(cut.mean)} in {cut.span}, {percent(first.mean)} in {first.span}"
    return f"completions were cut off{tokens}: {shares}"


def too_hot(history: RunHistory) -> str:
    """Find that the sampling temperature costs most of the reward."""
    temperature = history.numeric_setting("rollout.temperature", 1.0)
    now = recent(history, "reward")
    if len(history) < MIN_ROWS or now is None or temperature <= 1 or improved(history):
        return ""
    first = level(history, "reward", 0, history.window)
    before, samples = history.before.get("reward", 0.0), history.before.get("samples", 0.0)
    error = before / math.sqrt(max(samples, 1.0))
    known = first is not None and samples > 0 and before - first.mean > 3 * math.hypot(error, first.error)
    if first is not None and known and max(first.mean, now.mean) < HOT_SHARE * before:
        seen = f"the reward was {before:.3g} in the evaluation before training and {first.mean:.3g} in {first.span}"
        return f"{seen}, with samples at temperature {temperature:.3g}"
    if temperature < HOT:
        return ""
    return f"the samples are drawn at temperature {temperature:.3g}, and the reward is {now.mean:.3g} in {now.span}"


def too_similar(history: RunHistory) -> str:
    """Find that the completions of a group are nearly all the same text, since before the first update."""
    size, name = history.group_size, "completions/distinct_ratio"
    untrained, first, now = level(history, name, 0, 1), level(history, name, 0, history.window), recent(history, name)
    if len(history) < MIN_ROWS or size < 2 or not (untrained and first and now) or improved(history):
        return ""
    cut = level(history, "completions/clipped_ratio", 0, 1)
    if max(untrained.mean, first.mean, now.mean) * size > FEW_DISTINCT or (cut and cut.mean >= MOST_CUT):
        return ""  # completions of a few tokens are alike for lack of room
    return f"a group of {size} completions had {now.mean * size:.3g} different texts on average in {now.span}"


def too_few_signals(history: RunHistory) -> str:
    """Find that most groups have equal rewards, that the reward did not rise, and that the prompts are not too easy."""
    return "" if _is_easy(history) else _ties(history)


def too_easy(history: RunHistory) -> str:
    """Find that most groups have equal rewards because nearly every completion is right."""
    return _ties(history) if _is_easy(history) else ""


def much_removed(history: RunHistory) -> str:
    """Find that top-k, top-p or min-p remove much of the probability."""
    kept = recent(history, "sampling/mass_kept")
    if len(history) < MIN_ROWS or kept is None or kept.mean >= LEAST_KEPT:
        return ""
    return f"{percent(kept.mean)} of the probability is kept on average in {kept.span}"


def level_mean(history: RunHistory, name: str) -> float:
    """Return the mean of `name` over the whole run; 0 if it was not measured."""
    found = level(history, name, 0, len(history))
    return 0.0 if found is None else found.mean


def _unrewarded(history: RunHistory) -> list[str]:
    """Return the reward functions that gave 0 to every completion; none if the run is too short."""
    if len(history) < MIN_ROWS:
        return []
    return [
        name
        for name in history.functions()
        if history.has(f"rewards/{name}/mean")
        and all_zero(history.column(f"rewards/{name}/mean"))
        and all_zero(history.column(f"rewards/{name}/std"))
    ]


def _only_reward(history: RunHistory) -> float | None:
    """Return the reward that every completion of the run had; None if they differ, or the run is too short."""
    rewards = history.column("reward")
    if len(history) < MIN_ROWS or not constant(rewards):
        return None
    tiny = ROUNDING * np.nanmax(np.abs(rewards))
    alike = all((np.nan_to_num(history.column(name)) <= tiny).all() for name in ("reward_std", "reward_error"))
    return float(rewards[np.isfinite(rewards)][0]) if alike else None


def _ties(history: RunHistory) -> str:
    if len(history) < MIN_ROWS or history.has_critic or _only_reward(history) is not None or improved(history):
        return ""
    now, ever = recent(history, "frac_reward_zero_std"), level_mean(history, "frac_reward_zero_std")
    most = MOST_TIED_SMALL if 0 < history.group_size <= SMALL and len(history) >= LONG_ROWS else MOST_TIED
    if now is None or min(now.mean, ever) < most:
        return ""
    size = f" of {history.group_size}" if history.group_size else ""
    return f"{percent(now.mean)} of the groups{size} had equal rewards in {now.span}, {percent(ever)} in the whole run"


def _is_easy(history: RunHistory) -> bool:
    reward = recent(history, "reward")
    return reward is not None and reward.mean >= EASY * spread(history) > 0


def _completions(history: RunHistory, rows: int) -> str:
    """Return the number of completions of `rows` steps in parentheses, if it is known."""
    return f" ({rows * history.samples_per_step} completions)" if history.samples_per_step else ""
