"""Checks of what was learnt: is it what was meant?

Each takes the history of a run and returns its evidence, or "" if its rule is not met. Thresholds are constants, which
the table of rules states in words.
"""

import math

from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.levels import GAIN_ERRORS, MIN_FALL, change, fall, improved, level, percent, spread
from covey.report.diagnosis.signal_checks import TREND_ROWS

EVAL_ERRORS = 3.0
"""Number of standard errors by which the held-out accuracy has fallen from its best."""
EVAL_LOSS_RISE, EVAL_LOSS_NATS = 0.05, 0.02
"""Rise of the held-out loss above its lowest that is overfitting: relative to it and to the fall before; in nats."""


def opposed_parts(history: RunHistory) -> tuple[str, str] | None:
    """Return a reward function that rose and one that fell meanwhile, while the reward did not fall; None if there are
    none. The pair that moved most is returned.
    """
    if len(history) < TREND_ROWS or fall(history) is not None:
        return None
    rose, fell = {}, {}
    for name in history.functions():
        metric = f"rewards/{name}/mean"
        moved, scale = change(history, metric), spread(history, metric)
        if moved and scale and moved.errors >= GAIN_ERRORS and moved.difference >= MIN_FALL * scale:
            rose[name] = moved.difference / scale
        lost = fall(history, metric)
        if lost and scale:
            fell[name] = -lost.difference / scale
    pairs = [(up, down) for up in rose for down in fell if up != down]
    return max(pairs, key=lambda pair: rose[pair[0]] + fell[pair[1]], default=None)


def hacked_parts(history: RunHistory) -> str:
    """Find that one reward function climbed while another fell."""
    pair = opposed_parts(history)
    if pair is None:
        return ""
    up, down = change(history, f"rewards/{pair[0]}/mean"), fall(history, f"rewards/{pair[1]}/mean")
    return f"{pair[0]} rose {up.text()}, and {pair[1]} fell {down.text()}" if up and down else ""


def hacked_reward(history: RunHistory) -> str:
    """Find that the held-out accuracy fell while the reward rose, in training and on held-out prompts."""
    return _accuracy_fell(history) if _held_out_reward_rose(history) else ""


def overfitting(history: RunHistory) -> str:
    """Find that the held-out accuracy fell while the training reward rose."""
    return "" if _held_out_reward_rose(history) else _accuracy_fell(history)


def overfitting_of_loss(history: RunHistory) -> str:
    """Find that the held-out loss rose from its lowest while the training loss fell."""
    found = history.evaluations("loss")
    if len(found) < 3:
        return ""
    (best_step, best), (last_step, last) = min(found, key=lambda one: one[1]), found[-1]
    rise = max(EVAL_LOSS_RISE * best, EVAL_LOSS_RISE * (found[0][1] - best), EVAL_LOSS_NATS)
    training = change(history, "loss")
    if min(last, found[-2][1]) - best < rise or training is None or training.difference >= 0:
        return ""
    at = int((history.steps <= best_step).sum())
    then, now = level(history, "loss", max(0, at - history.window), at), training.late
    if then is None or now.mean >= then.mean:
        return ""
    seen = f"the held-out loss was {best:.3g} after step {best_step} and is {last:.3g} after step {last_step}"
    return f"{seen}, while the training loss went from {then.mean:.3g} to {now.mean:.3g}"


def _accuracy_fell(history: RunHistory) -> str:
    """Return what shows that the held-out accuracy fell from its best while the training reward rose, or ""."""
    found, errors = history.evaluations("accuracy"), dict(history.evaluations("error"))
    if len(found) < 2 or len(history) < TREND_ROWS or not improved(history):
        return ""
    (best_step, best), (last_step, last) = max(found, key=lambda one: one[1]), found[-1]
    error = math.hypot(errors.get(best_step, math.nan), errors.get(last_step, math.nan))
    if not (best - last > EVAL_ERRORS * error):
        return ""
    reward = change(history, "reward")
    trained = f", while the training reward went {reward.text()}" if reward else ""
    seen = f"the held-out accuracy was {percent(best)} after step {best_step}, {percent(last)} after step {last_step}"
    return seen + trained


def _held_out_reward_rose(history: RunHistory) -> bool:
    found = history.evaluations("reward")
    return len(found) > 1 and found[-1][1] > found[0][1]
