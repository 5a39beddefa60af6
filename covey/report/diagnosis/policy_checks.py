"""Checks of how the policy moves: too far, not at all, or in a bad direction.

Each takes the history of a run and returns its evidence, or "" if its rule is not met. Thresholds are constants, which
the table of rules states in words.
"""

import math
from collections.abc import Iterator

import numpy as np

from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.levels import (
    FALL_ERRORS,
    Change,
    change,
    earlier_levels,
    fall,
    gain,
    improved,
    level,
    percent,
    recent,
    spread,
)
from covey.report.diagnosis.signal_checks import LONG_ROWS, MIN_ROWS, MOST_TIED, TREND_ROWS, level_mean

DISAGREEMENT = 0.05
"""Mean distance of log-probs in nats from which sampler and trainer disagree."""
JUMP = 0.3
"""Rise of the share of completions cut off that counts as a jump."""
LENGTH_JUMP, ENTROPY_LOW, ENTROPY_HIGH, SPIKE = 1.5, 0.3, 2.0, 10.0
"""Factors that count as a jump: of the mean length, of the entropy downwards and upwards, of the gradient norm."""
LOSS_RISE, LOSS_TWICE = 0.1, 2.0
"""Share of the lowest loss by which the loss has risen for good, and multiple of the first loss that is a rise however
much the loss fluctuates."""
COLLAPSED, STUCK = 0.2, 0.5
"""Share of its first value to which the entropy falls in a collapse, and share of the spread of completions that is
still there between groups."""
KL_HIGH, KL_GROWTH, KL_FAR = 1.0, 2.0, 3.0
"""KL in nats per token from which it has run away if it has grown by this factor since the middle of the run, and KL
from which it has in any case."""
BONUS_RISE = 1.5
"""Factor by which the entropy rises under a bonus that is too large."""
CLIPPED = 0.2
"""Share of clipped tokens from which updates go beyond the clip range."""
STILL, FLAT_LOSS, POWER = 0.05, 0.02, 0.15
"""Relative change of entropy and length that is none; that of the loss; and the largest standard error of the reward's
change, in units of the spread of completions, with which a flat reward is called flat."""


def not_finite(history: RunHistory) -> str:
    """Find that updates were skipped because they were not finite."""
    skipped = np.flatnonzero(np.nan_to_num(history.column("skipped")) > 0)
    if not skipped.size:
        return ""
    first = history.steps[skipped[0]]
    return f"{skipped.size} of {len(history)} steps had an update that was not finite, the first of them step {first}"


def disagreement(history: RunHistory) -> str:
    """Find that sampler and trainer give different log-probs to the same tokens."""
    name = "sampling/logp_difference/mean"
    now, first = recent(history, name), level(history, name, 0, history.window)
    if len(history) < MIN_ROWS or now is None or first is None or min(now.mean, first.mean) < DISAGREEMENT:
        return ""
    return f"their log-probs differ by {now.mean:.3g} nats per token on average in {now.span}"


def bonus_too_large(history: RunHistory) -> str:
    """Find that the entropy rises under an entropy bonus while the reward does not."""
    bonus, entropy = history.numeric_setting("grpo.entropy_bonus", 0.0), change(history, "entropy")
    if len(history) < TREND_ROWS or not bonus or entropy is None or improved(history):
        return ""
    if entropy.ratio < BONUS_RISE or entropy.errors < FALL_ERRORS:
        return ""
    return f"the entropy went {entropy.text()} with a bonus of {bonus:.3g}{_and_reward(history)}"


def rate_too_high(history: RunHistory) -> str:
    """Find that updates spoiled the model: the reward fell and stayed low, or it jumped in two other respects while
    nothing was gained."""
    if len(history) < TREND_ROWS or _rate(history) == 0:
        return ""
    signs = list(_signs(history))
    fell = fall(history)
    if fell is not None:
        return "; ".join([f"the mean reward fell {fell.text()}, at a learning rate of {_rate(history):.3g}", *signs])
    moved = _since_first(history, "entropy")
    violent = moved is not None and not ENTROPY_LOW < abs(moved.ratio) < ENTROPY_HIGH
    if len(signs) < 2 or not violent or improved(history):
        return ""
    return "; ".join([f"nothing was gained at a learning rate of {_rate(history):.3g}{_and_reward(history)}", *signs])


def rate_too_high_for_loss(history: RunHistory) -> str:
    """Find that the loss rose for good, or that it never fell below where it was before the first update."""
    loss, late = history.column("loss"), recent(history, "loss")
    lowest = min(earlier_levels(history, "loss"), key=lambda one: one.mean, default=None)
    if len(history) < TREND_ROWS or late is None or lowest is None or not math.isfinite(loss[0]):
        return ""
    first = level(history, "loss", 0, 1)
    if first and first.mean > 0 and late.mean - 2 * late.error >= LOSS_TWICE * first.mean:
        return f"the loss rose {Change(first, late).text()}, at a learning rate of {_rate(history):.3g}"
    found = Change(lowest, late)
    margin = max(LOSS_RISE * abs(lowest.mean), LOSS_RISE / 2 * float(loss[0]))
    if found.difference <= margin or found.errors < FALL_ERRORS:
        return ""
    return f"the loss rose {found.text()}, at a learning rate of {_rate(history):.3g}"


def entropy_collapse(history: RunHistory) -> str:
    """Find that the entropy fell to a fraction, and that groups have equal rewards although not all are right."""
    entropy, ties = change(history, "entropy"), recent(history, "frac_reward_zero_std")
    between = recent(history, "reward_error")
    if len(history) < TREND_ROWS or history.has_critic or entropy is None or ties is None or between is None:
        return ""
    stuck = between.mean * math.sqrt(max(1, history.groups_per_step)) >= STUCK * spread(history)
    if entropy.ratio > COLLAPSED or entropy.difference >= 0 or ties.mean < MOST_TIED or not stuck:
        return ""
    return f"the entropy fell {entropy.text()}, and {percent(ties.mean)} of the groups had equal rewards in {ties.span}"


def kl_runaway(history: RunHistory) -> str:
    """Find that the KL to the reference is high and still grows, or is very high."""
    n, window = len(history), history.window
    late, middle = recent(history, "kl"), level(history, "kl", max(0, n // 2 - window), max(1, n // 2))
    if n < TREND_ROWS or late is None or middle is None:
        return ""
    if late.mean < KL_HIGH or (late.mean < KL_GROWTH * abs(middle.mean) and late.mean < KL_FAR):
        return ""
    return f"the KL grew {Change(middle, late).text()} nats per token{_and_reward(history)}"


def longer_for_nothing(history: RunHistory) -> str:
    """Find that completions grow while the reward does not."""
    length = change(history, "completions/mean_length")
    if len(history) < TREND_ROWS or length is None or improved(history):
        return ""
    if length.ratio < LENGTH_JUMP or length.errors < FALL_ERRORS:
        return ""
    return f"the mean length went {length.text()} tokens{_and_reward(history)}"


def beyond_the_clip(history: RunHistory) -> str:
    """Find that many tokens are clipped, for ratios of single tokens."""
    clipped = recent(history, "clip_ratio/region_mean")
    sequences = str(history.settings.get("grpo.algorithm")).startswith("gspo") or history.settings.get(
        "grpo.ratio"
    ) in ("sequence", "sequence_token")
    if len(history) < MIN_ROWS or sequences or clipped is None or clipped.mean < CLIPPED:
        return ""
    return f"{percent(clipped.mean)} of the tokens were clipped in {clipped.span}"


def critic_predicts_nothing(history: RunHistory) -> str:
    """Find that the critic's values explain nothing of the returns, and that the reward does not rise."""
    explained = recent(history, "critic/explained_variance")
    if len(history) < LONG_ROWS or explained is None or explained.mean > 0 or improved(history):
        return ""
    return f"explained variance {explained.mean:.3g} in {explained.span}{_and_reward(history)}"


def rate_too_low(history: RunHistory) -> str:
    """Find that neither the reward nor the policy moved, although there was a signal to learn from."""
    reward = gain(history)
    if len(history) < LONG_ROWS or reward is None or abs(reward.errors) >= 3:
        return ""
    signal = level_mean(history, "frac_reward_zero_std") < MOST_TIED or history.has_critic
    measured = math.hypot(reward.early.error, reward.late.error) <= POWER * spread(history)
    if not signal or not measured or not all(_still(history, name) for name in ("entropy", "completions/mean_length")):
        return ""
    kl = recent(history, "kl")
    if not history.has("entropy") or (kl is not None and kl.mean > 0.01):
        return ""
    entropy = change(history, "entropy")
    moved = f", the entropy {entropy.text()}" if entropy else ""
    return f"the mean reward went {reward.text()}{moved}, at a learning rate of {_rate(history):.3g}"


def rate_too_low_for_loss(history: RunHistory) -> str:
    """Find that the loss did not fall."""
    loss = change(history, "loss")
    if len(history) < LONG_ROWS or loss is None or loss.early.mean <= 0:
        return ""
    if abs(loss.difference) > FLAT_LOSS * loss.early.mean or loss.early.mean < 0.1:
        return ""
    return f"the loss went {loss.text()}, at a learning rate of {_rate(history):.3g}"


def _signs(history: RunHistory) -> Iterator[str]:
    """Yield what else jumped between the first step, which no update has touched, and the last window."""
    cut = _since_first(history, "completions/clipped_ratio")
    if cut and cut.difference >= JUMP:
        yield f"completions cut off {cut.text(share=True)}"
    length = _since_first(history, "completions/mean_length")
    if length and not 1 / LENGTH_JUMP < length.ratio < LENGTH_JUMP and abs(length.errors) >= FALL_ERRORS:
        yield f"mean length {length.text()}"
    entropy = _since_first(history, "entropy")
    if entropy and not ENTROPY_LOW < abs(entropy.ratio) < ENTROPY_HIGH:
        yield f"entropy {entropy.text()}"
    kl = recent(history, "kl")
    if kl and kl.mean >= KL_HIGH:
        yield f"KL {kl.mean:.3g} nats per token in {kl.span}"
    norms = history.column("grad_norm")
    if np.isfinite(norms[:1]).any() and np.nanmax(norms) >= SPIKE * norms[0] > 0:
        spike = int(np.nanargmax(norms))
        yield f"gradient norm {norms[0]:.3g} in the first step, {norms[spike]:.3g} in step {history.steps[spike]}"


def _since_first(history: RunHistory, name: str) -> Change | None:
    """Return the change of `name` from the first row, which no update has touched, to the last window."""
    first, late = level(history, name, 0, 1), recent(history, name)
    return None if first is None or late is None else Change(first, late)


def _still(history: RunHistory, name: str) -> bool:
    found = change(history, name)
    return found is None or abs(found.difference) <= STILL * abs(found.early.mean)


def _rate(history: RunHistory) -> float:
    """Return the highest learning rate of the run; NaN if it was not measured."""
    rates = history.column("learning_rate")
    return float(np.nanmax(rates)) if np.isfinite(rates).any() else math.nan


def _and_reward(history: RunHistory) -> str:
    found = gain(history)
    return f"; the mean reward went {found.text()}" if found else ""
