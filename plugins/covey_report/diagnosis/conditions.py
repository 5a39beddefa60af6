"""Thresholds, and conditions and texts that several rules of the diagnosis share."""

from covey_report.diagnosis.features import GAIN_ERRORS, MOST_TIED, SMALL
from covey_report.diagnosis.rule import above, at_least, at_most, below, equal, percent

MIN_ROWS, TREND_ROWS, LONG_ROWS = 5, 8, 16
"""Number of steps from which a level is judged, from which a change is, and from which the lack of one is."""
MANY_SAMPLES, MOST_SAMPLES, FEW_EMPTY = 100, 400, 5
"""Number of completions from which what all of them have in common is certain; that from which a reward that none of
them has is, which may be a rare one; and number of empty ones from which the reward for them is."""
MOST_CUT, NEARLY_ALL_CUT, FEW_CUT = 0.3, 0.8, 0.02
"""Share of completions cut off from which that is a problem if the reward does not rise, from which it is in any case,
and below which it explains no rewards."""
MOST_TIED_SMALL = 0.5
"""Share of groups with equal rewards from which too few have a signal if they are small."""
NEARLY_ALL, MANY_EMPTY, MOST_EMPTY = 0.95, 0.3, 0.5
"""Share of completions that is nearly all; and shares of empty ones in the first steps that are a problem: where the
prompts are known to lack the model's chat template, and where that is not known."""
HOT_SHARE, HOT = 0.5, 2.0
"""Share of the reward before training, at another temperature, below which the sampling temperature is too high, and
temperature that is too high if nothing is learnt."""
FEW_DISTINCT, LEAST_KEPT = 1.25, 0.7
"""Number of different completions in a group, on average, below which they are too similar, and share of the
probability below which top-k, top-p and min-p remove much."""
MIN_ANSWERS, MOSTLY = 50, 0.85
"""Number of held-out answers from which it says something that none is right; share of groups that are all right in the
first step from which the prompts are too easy, and held-out accuracy before training from which that is no problem."""
MIN_DIP, GROWN = 0.2, 1.5
"""Fall of the reward on the way, in units of the spread of completions, that counts where the gradient has grown; and
factor by which it has."""
LOSS_RISE, LOSS_TWICE = 0.1, 2.0
"""Share of the lowest loss by which the loss has risen for good, and multiple of the first loss that is a rise however
much the loss fluctuates."""
COLLAPSED, STUCK = 0.2, 0.5
"""Share of its first value to which the entropy falls in a collapse, and share of the spread of completions that is
still there between groups."""
KL_GROWTH, KL_FAR = 2.0, 3.0
"""Factor by which a high KL has grown since the middle of the run if it has run away, and KL in nats per token from
which it has in any case."""
BONUS_RISE, CLIPPED = 1.5, 0.2
"""Factor by which the entropy rises under a bonus that is too large, and share of clipped tokens from which updates go
beyond the clip range."""
TINY_RATE, MOVED = 2e-8, 2e-3
"""Learning rate with which no run moves, because an update of Adam moves no weight by more than that; and sum of the
rates of a short run from which a flat reward is not that of a rate that is too low."""
STILL, SHIFT, FLAT_LOSS, POWER = 0.05, 0.01, 0.02, 0.15
"""Relative change of entropy and length that is none; that of the entropy which is one if its error is small; that of
the loss; and the largest standard error of the reward's change, in units of the spread of completions, with which a
flat reward is called flat."""
EVAL_LOSS_RISE, EVAL_LOSS_NATS, OVERLAP = 0.05, 0.02, 0.05
"""Rise of the held-out loss above its lowest that is overfitting, relative to it and to the fall before, and in nats;
and share of the held-out rows from which it is a problem that they are training rows."""
FAILED, UNSCORED, SOME_NOISE, NOISY, UNLIKE, FOLLOWS = 0.05, 0.5, 0.5, 0.85, 0.5, 0.1
"""Shares of completions and episodes that fail, of completions that are scored, of the rewards' variance that is noise
(a note, a problem), of the reward of training rows that held-out rows get, and of its rise, from or up to which that is
a problem."""
REPEATED, FEW_ROWS, CUT_ROWS, DROPPED_ROWS = 0.2, 100, 0.05, 0.5
"""Share of distinct rows, and number of them, up to which rows are repeated; and shares of rows from which it is a
problem that they are cut, and dropped."""
DECAYED, BETA, CLIPPED_AWAY = 0.002, 1.0, 1e4
"""Share of a weight that decay takes at a step; weight of the KL; and norm of the gradient in units of its limit, from
which they are too large where nothing improves."""


BOTH, SFT = ("rl", "sft"), ("sft",)
LAST, FIRST = "the last quarter of the steps", "the first quarter"
RATE, CUT_SHARE = "training.actor_optimizer.learning_rate", "completions/clipped_ratio.whole.mean"
AND_REWARD, AT_RATE, AND_HELD_OUT = (
    "|; the mean reward went {reward.change}",
    "|, at a learning rate of {learning_rate.peak.mean:.3g} at most|, {learning_rate.whole.mean:.3g} on average",
    "|; the held-out accuracy {held_out_gain:share}",
)
READ_SAMPLES = "read the completions in samples.jsonl"

ROSE, NOT_ROSE, LEARNT, NOT_LEARNT = (
    equal("reward.rose", True),
    equal("reward.rose", False),
    equal("learnt", True, words="the reward or the held-out accuracy has risen"),
    equal("learnt", False),
)
CRITIC = equal("has_critic", True, words="a critic learns from equal rewards too")
ONE_REWARD = equal("has_one_reward", True, words="all completions of the run have one reward")
MANY, MOST, MANY_SCORED = (
    at_least("samples", MANY_SAMPLES),
    at_least("samples", MOST_SAMPLES),
    at_least("scored_count", MANY_SAMPLES),
)
HELD_OUT_FELL = below(
    "held_out_accuracy.errors", -GAIN_ERRORS, words=f"the held-out accuracy fell by {GAIN_ERRORS:g} standard errors"
)
GOOD_BEFORE, HELD_OUT_KEPT = (
    at_least("held_out_start.mean", MOSTLY, words=f"the held-out accuracy was {percent(MOSTLY)} before training"),
    equal("held_out_kept", True, words="the held-out accuracy has not fallen"),
)
HELD_OUT_REWARD_ROSE = above("held_out_reward.difference", 0, words="the held-out reward has risen too")
EMPTY = at_least("completions/empty_ratio.last.mean", NEARLY_ALL, words="the completions are empty")
EASY = equal("tied_at_best", True, words="more of the groups are tied at the best reward than at the worst")
CUT = (
    "completions were cut off| at {longest}|: {completions/clipped_ratio.last.mean:share} in "
    "{completions/clipped_ratio.last.span}, {completions/clipped_ratio.first.mean:share} in "
    "{completions/clipped_ratio.first.span}"
)
MANY_CUT = (
    at_least("completions/clipped_ratio.last.mean", MOST_CUT),
    at_least("completions/clipped_ratio.last.mean", 0.7, "completions/clipped_ratio.first.mean"),
)
TIES = (
    "{frac_reward_zero_std.last.mean:share} of the groups| of {group_size}| had equal rewards in "
    "{frac_reward_zero_std.last.span}, {frac_reward_zero_std.whole.mean:share} in the whole run"
    "|; the best reward of the step: {frac_reward_all_best.last.mean:share}, the worst: "
    "{frac_reward_all_worst.last.mean:share}"
)
TIED = (
    [at_least(f"frac_reward_zero_std.{when}.mean", MOST_TIED) for when in ("last", "whole")],
    [
        *(at_least(f"frac_reward_zero_std.{when}.mean", MOST_TIED_SMALL) for when in ("last", "whole")),
        at_most("group_size", SMALL),
        at_least("run.steps.size", LONG_ROWS),
    ],
)
"""Conditions of which one set holds where too many groups have equal rewards: in general, and for small groups."""
HELD_OUT, HELD_OUT_LOSS = (
    (
        "the held-out {name} was {{held_out_{name}.early.mean:share}} after step {{held_out_{name}.early.first}}, "
        "{{held_out_{name}.late.mean:share}} after step {{held_out_{name}.late.first}}|, while the training METRIC "
        "went {{METRIC.change}}"
    ).replace("METRIC", metric)
    for metric in ("reward", "loss")
)
DULL = ("samples too similar", "groups too small", "entropy collapse", "prompts too easy", "learning rate too low")
"""Rules that a run meets whose completions or rewards are all alike."""
SPOILED = (
    "empty completions",
    "answers cut off",
    "reward never reached",
    "groups too small",
    "entropy collapse",
    "KL runaway",
    "length without reward",
    "updates beyond the clip range",
    "critic predicts nothing",
    "learning rate too low",
)
"""Rules that a policy meets when it was spoiled."""
HACKED = (
    *SPOILED,
    "constant reward",
    "samples too similar",
    "learning rate too high",
    "overfitting",
    "prompts too easy",
)
"""Rules that a policy meets when it learnt what a wrong reward pays for."""
