"""The table of rules: what is seen, from which threshold on, and which setting to change.

The order is that of causes: a rule stands before those whose observations it explains, and the first one that is met is
the first finding. docs/diagnosis.md has the same table, written from this one.
"""

from covey.report.diagnosis.features import (
    DISAGREES,
    DISAGREES_WHEN,
    ENTROPY_FELL,
    ENTROPY_HIGH,
    ENTROPY_LOW,
    ENTROPY_SOARED,
    FALL_ERRORS,
    GAIN_ERRORS,
    JUMP,
    KL_HIGH,
    LENGTH_JUMP,
    MIN_FALL,
    SPIKE,
)
from covey.report.diagnosis.rule import NOTE, Case, Rule, above, at_least, at_most, below, equal, percent

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
EASY_RATIO = 2.0
"""Mean reward in units of its spread from which the prompts are too easy: for rewards of 0 and 1, 80 % right."""
HOT_SHARE = 0.5
"""Share of the reward before training, at another temperature, below which the sampling temperature is too high."""
HOT = 2.0
"""Temperature that is too high if nothing is learnt."""
FEW_DISTINCT = 1.25
"""Number of different completions in a group of equal ones, on average, below which they are too similar."""
LEAST_KEPT = 0.7
"""Share of the probability below which top-k, top-p and min-p remove much."""
LOSS_RISE, LOSS_TWICE = 0.1, 2.0
"""Share of the lowest loss by which the loss has risen for good, and multiple of the first loss that is a rise however
much the loss fluctuates."""
COLLAPSED, STUCK = 0.2, 0.5
"""Share of its first value to which the entropy falls in a collapse, and share of the spread of completions that is
still there between groups."""
KL_GROWTH, KL_FAR = 2.0, 3.0
"""Factor by which a high KL has grown since the middle of the run if it has run away, and KL in nats per token from
which it has in any case."""
BONUS_RISE = 1.5
"""Factor by which the entropy rises under a bonus that is too large."""
CLIPPED = 0.2
"""Share of clipped tokens from which updates go beyond the clip range."""
STILL, FLAT_LOSS, POWER = 0.05, 0.02, 0.15
"""Relative change of entropy and length that is none; that of the loss; and the largest standard error of the reward's
change, in units of the spread of completions, with which a flat reward is called flat."""
EVAL_ERRORS = 3.0
"""Number of standard errors by which the held-out accuracy has fallen from its best."""
EVAL_LOSS_RISE, EVAL_LOSS_NATS = 0.05, 0.02
"""Rise of the held-out loss above its lowest that is overfitting: relative to it and to the fall before; in nats."""

BOTH, SFT = ("rl", "sft"), ("sft",)
ROSE, CRITIC, ONE_REWARD = equal("reward.rose", True), equal("has_critic", True), equal("has_one_reward", True)
NO_REWARD, NO_RATE = equal("only_reward", 0), equal("learning_rate.peak.mean", 0)
AND_REWARD = "|; the mean reward went {reward.change}"
AT_RATE = "|, at a learning rate of {learning_rate.peak.mean:.3g}"
CUT = (
    "completions were cut off| at {longest}|: {completions/clipped_ratio.last.mean:share} in "
    "{completions/clipped_ratio.last.span}, {completions/clipped_ratio.first.mean:share} in "
    "{completions/clipped_ratio.first.span}"
)
MANY_CUT = (
    at_least("completions/clipped_ratio.last.mean", MOST_CUT),
    at_least("completions/clipped_ratio.last.mean", 0.7, "completions/clipped_ratio.first.mean"),
)
FINISHED_WITHOUT_REWARD = at_least("finished_without_reward", MIN_UNREWARDED)
"""Answers that were finished had no reward either."""
TIES = (
    "{frac_reward_zero_std.last.mean:share} of the groups| of {run.group_size}| had equal rewards in "
    "{frac_reward_zero_std.last.span}, {frac_reward_zero_std.whole.mean:share} in the whole run"
)
TIED = (
    [at_least(f"frac_reward_zero_std.{when}.mean", MOST_TIED) for when in ("last", "whole")],
    [
        *(at_least(f"frac_reward_zero_std.{when}.mean", MOST_TIED_SMALL) for when in ("last", "whole")),
        at_most("run.group_size", SMALL),
        at_least("run.steps.size", LONG_ROWS),
    ],
)
"""Conditions of which one set holds where too many groups have equal rewards: in general, and for small groups."""
GROUPS_TELL_NOTHING = (CRITIC, ONE_REWARD, ROSE)
"""Conditions under which groups of equal rewards are no problem of their own."""
EASY = at_least("reward.last.mean", EASY_RATIO, "reward.spread")
ACCURACY_FELL = (
    "the held-out accuracy was {held_out_accuracy.early.mean:share} after step {held_out_accuracy.early.first}, "
    "{held_out_accuracy.late.mean:share} after step {held_out_accuracy.late.first}|, while the training reward went "
    "{reward.change}"
)
ACCURACY_FALL = below("held_out_accuracy.errors", -EVAL_ERRORS)
HELD_OUT_REWARD_ROSE = above("held_out_reward.difference", 0)

LAST, FIRST = "the last quarter of the steps", "the first quarter"
NO_RISE = "the reward has not risen"
SPOILED = (
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

RULES = (
    Rule(
        "updates not finite",
        "Updates were skipped because they were not finite",
        "any skipped update",
        0,
        Case(
            "{skipped.positive_count} of {run.steps.size} steps had an update that was not finite, the "
            "first of them step {skipped.first_positive}"
        ),
        "lower the optimizer's learning_rate or max_grad_norm; model.dtype float32. The batches are in the folder bad/",
        ("training.actor_optimizer.learning_rate", "model.dtype", "training.actor_optimizer.max_grad_norm"),
        BOTH,
    ),
    Rule(
        "sampler and trainer disagree",
        "The sampler and the trainer disagree about the probability of tokens",
        f"over {FIRST} and {LAST}, {DISAGREES_WHEN}",
        MIN_ROWS,
        DISAGREES,
        "find the cause first: a rollout of your own with weights of an earlier update, another prompt or another "
        "temperature; model.compute_dtype float32, no model.quantize; then grpo.correction token_truncate",
        ("model.compute_dtype", "model.quantize", "grpo.correction"),
        explains=("learning rate too high", "KL runaway", "entropy collapse", "updates beyond the clip range"),
    ),
    Rule(
        "no completion scored",
        "No completion was scored",
        f"the reward is missing in every step, {MIN_ROWS} or more",
        MIN_ROWS,
        Case("reward is missing in all {run.steps.size} steps", [at_most("reward.count", 0)]),
        "rewards: see why the functions return None for every completion",
        ("rewards",),
        explains=("answers cut off", "samples too similar"),
    ),
    Rule(
        "constant reward",
        "The reward is the same for every completion, so nothing is learnt",
        f"every completion of every step has one reward that is not 0, over {MIN_ROWS} steps or more",
        MIN_ROWS,
        Case(
            "every completion of {reward.count} steps scored {only_reward:.3g}| ({scored_samples} completions)",
            unless=[NO_REWARD],
        ),
        "rewards: see in samples.jsonl whether the completions deserve the same reward. If not, correct the "
        "function; if so, use easier or harder prompts (data)",
        ("rewards", "data.path"),
        explains=("samples too similar", "groups too small", "entropy collapse", "learning rate too low"),
    ),
    Rule(
        "temperature too high",
        "The sampling temperature is too high",
        f"rollout.temperature is above 1, {NO_RISE}, and it is less than {percent(HOT_SHARE)} of the reward of the "
        f"evaluation before training (3 standard errors); or rollout.temperature is at least {HOT:g} and {NO_RISE}",
        MIN_ROWS,
        [
            Case(
                "the reward was {since_evaluation.early.mean:.3g} in the evaluation before training and "
                "{reward.first.mean:.3g} in {reward.first.span}, with samples at temperature {temperature:.3g}",
                [
                    above("temperature", 1),
                    below("since_evaluation.errors", -3),
                    below("reward.first.mean", HOT_SHARE, "since_evaluation.early.mean"),
                    below("reward.last.mean", HOT_SHARE, "since_evaluation.early.mean"),
                ],
                unless=[ROSE],
            ),
            Case(
                "the samples are drawn at temperature {temperature:.3g}, and the reward is "
                "{reward.last.mean:.3g} in {reward.last.span}",
                [at_least("temperature", HOT)],
                unless=[ROSE],
            ),
        ],
        "lower rollout.temperature, towards 1 or below",
        ("rollout.temperature",),
        explains=("learning rate too high", *SPOILED),
    ),
    Rule(
        "entropy bonus too large",
        "The entropy bonus is too large",
        f"the entropy has risen to {BONUS_RISE} times that of {FIRST} ({FALL_ERRORS:g} standard errors) under "
        f"grpo.entropy_bonus, and {NO_RISE}",
        TREND_ROWS,
        Case(
            "the entropy went {entropy.change} with a bonus of {entropy_bonus:.3g}" + AND_REWARD,
            [at_least("entropy.change.ratio", BONUS_RISE), at_least("entropy.change.errors", FALL_ERRORS)],
            unless=[ROSE, equal("entropy_bonus", 0)],
        ),
        "lower grpo.entropy_bonus, or set it to 0",
        ("grpo.entropy_bonus",),
        explains=("learning rate too high", *SPOILED),
    ),
    Rule(
        "samples too similar",
        "The completions of a group are too similar",
        f"groups have at most {FEW_DISTINCT} different completions on average, in the first step, {FIRST} and {LAST}; "
        f"fewer than {percent(MOST_CUT)} of the completions of the first step are cut off; and {NO_RISE}",
        MIN_ROWS,
        Case(
            "a group of {run.group_size} completions had {distinct_texts.last.mean:.3g} different texts on "
            "average in {distinct_texts.last.span}",
            [
                at_least("run.group_size", 2),
                *(at_most(f"distinct_texts.{when}.mean", FEW_DISTINCT) for when in ("start", "first", "last")),
            ],
            # completions of a few tokens are alike for lack of room
            unless=[ROSE, at_least("completions/clipped_ratio.start.mean", MOST_CUT)],
        ),
        "raise rollout.temperature; loosen rollout.top_k, rollout.top_p and rollout.min_p",
        ("rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p"),
        explains=("learning rate too high", "groups too small", "entropy collapse", "learning rate too low"),
    ),
    Rule(
        "learning rate too high",
        "The learning rate is too high",
        f"over {LAST} the reward is lower than at its best by {FALL_ERRORS:g} standard errors and {percent(MIN_FALL)} "
        f"of the spread of single completions; or {NO_RISE} and two of these jumped, the entropy among them: "
        f"completions cut off by {percent(JUMP)}, mean length by a factor of {LENGTH_JUMP}, entropy to "
        f"{ENTROPY_LOW} or {ENTROPY_HIGH:g} times its first value, KL to {KL_HIGH:g} nat per "
        f"token, gradient norm to {SPIKE:g} times its first value",
        TREND_ROWS,
        [
            Case("the mean reward fell {reward.fall}" + AT_RATE + "|; {jumps:; }", unless=[NO_RATE]),
            *(
                Case(
                    "nothing was gained| at a learning rate of {learning_rate.peak.mean:.3g}"
                    + AND_REWARD
                    + "|; {jumps:; }",
                    [at_least("jump_count", 2), violent],
                    unless=[NO_RATE, ROSE],
                )
                for violent in (ENTROPY_FELL, ENTROPY_SOARED)
            ),
        ],
        "lower training.actor_optimizer.learning_rate by a factor of 3 to 10, and start again or from an earlier "
        "checkpoint; then more training.actor_optimizer.warmup_ratio, a lower "
        "training.actor_optimizer.max_grad_norm, a higher grpo.beta",
        (
            "training.actor_optimizer.learning_rate",
            "training.actor_optimizer.warmup_ratio",
            "training.actor_optimizer.max_grad_norm",
            "grpo.beta",
        ),
        explains=SPOILED,
    ),
    Rule(
        "learning rate too high",
        "The learning rate is too high",
        f"over {LAST} the loss is above its lowest level by {percent(LOSS_RISE)} of that, {percent(LOSS_RISE / 2)} of "
        f"the first loss, and {FALL_ERRORS:g} standard errors; or it is {LOSS_TWICE:g} times the first loss",
        TREND_ROWS,
        [
            Case(
                "the loss rose {loss.since_start}" + AT_RATE,
                [at_least("loss.last.lower_end", LOSS_TWICE, "loss.start.mean"), above("loss.start.mean", 0)],
            ),
            Case(
                "the loss rose {loss.since_lowest}" + AT_RATE,
                [
                    above("loss.since_lowest.difference", LOSS_RISE, "loss.since_lowest.early.size"),
                    above("loss.since_lowest.difference", LOSS_RISE / 2, "loss.start.mean"),
                    at_least("loss.since_lowest.errors", FALL_ERRORS),
                ],
            ),
        ],
        "lower training.optimizer.learning_rate by a factor of 3 to 10; then more training.optimizer.warmup_ratio, a "
        "lower training.optimizer.max_grad_norm",
        ("training.optimizer.learning_rate", "training.optimizer.warmup_ratio", "training.optimizer.max_grad_norm"),
        SFT,
        explains=("overfitting", "learning rate too low"),
    ),
    Rule(
        "KL runaway",
        "The policy runs away from the reference",
        f"over {LAST} the KL is at least {KL_HIGH:g} nat per token and {KL_GROWTH:g} times that of the "
        f"middle of the run, or at least {KL_FAR:g} nats per token",
        TREND_ROWS,
        [
            Case(
                "the KL grew {kl.since_middle} nats per token" + AND_REWARD,
                [at_least("kl.last.mean", KL_HIGH), at_least("kl.last.mean", KL_GROWTH, "kl.since_middle.early.size")],
            ),
            Case("the KL grew {kl.since_middle} nats per token" + AND_REWARD, [at_least("kl.last.mean", KL_FAR)]),
        ],
        "raise grpo.beta, or set grpo.kl_target; then lower training.actor_optimizer.learning_rate, "
        "training.actor_optimizer.max_grad_norm or grpo.epsilon",
        (
            "grpo.beta",
            "grpo.kl_target",
            "training.actor_optimizer.learning_rate",
            "training.actor_optimizer.max_grad_norm",
            "grpo.epsilon",
        ),
        explains=("answers cut off", "entropy collapse", "length without reward", "updates beyond the clip range"),
    ),
    Rule(
        "answers cut off",
        "Answers are cut off",
        f"over {LAST} at least {percent(MOST_CUT)} of the completions are cut by a limit of tokens or time, at "
        f"least 70 % of the share of {FIRST}, and {NO_RISE}; or {percent(NEARLY_ALL_CUT)} in both",
        MIN_ROWS,
        [
            Case(CUT, MANY_CUT, unless=[FINISHED_WITHOUT_REWARD, ROSE]),
            Case(
                CUT,
                [
                    *MANY_CUT,
                    at_least("completions/clipped_ratio.first.mean", NEARLY_ALL_CUT),
                    at_least("completions/clipped_ratio.last.mean", NEARLY_ALL_CUT),
                ],
                unless=[FINISHED_WITHOUT_REWARD],
            ),
        ],
        "raise rollout.max_new_tokens (or envs.max_turn_tokens or envs.timeout, if that cuts them); or ask for "
        "shorter answers, with grpo.overlong_buffer; grpo.mask_truncated leaves cut completions out of the loss",
        ("rollout.max_new_tokens", "grpo.overlong_buffer", "grpo.mask_truncated"),
        explains=("reward never reached", "groups too small", "length without reward", "learning rate too low"),
    ),
    Rule(
        "reward never reached",
        "The reward was never reached",
        f"every completion has the reward 0, apart from a penalty by grpo.overlong_buffer, over {MIN_ROWS} "
        f"steps and {MIN_UNREWARDED} completions or more",
        MIN_ROWS,
        [
            Case(
                "{none_of_all} in {run.steps.size} steps had a reward other than 0"
                "|; the success rate is below {success_bound:share} (95 % confidence)"
                "|; {completions/clipped_ratio.nonzero_mean:share} of them were cut off",
                [condition],
                unless=[below("samples", MIN_UNREWARDED)],
            )
            for condition in (NO_REWARD, equal("all_unrewarding", True))
        ],
        "easier prompts (data), or a reward with steps on the way (rewards); more samples (grpo.num_generations); or "
        "supervised training first",
        ("data.path", "rewards", "grpo.num_generations"),
        explains=("groups too small", "entropy collapse", "learning rate too low", "part of the reward never reached"),
    ),
    Rule(
        "entropy collapse",
        "The entropy has collapsed",
        f"over {LAST} the entropy is at most {percent(COLLAPSED)} of that of {FIRST}, {percent(MOST_TIED)} of the "
        f"groups have equal rewards, and groups differ by {percent(STUCK)} of the spread of completions or more",
        TREND_ROWS,
        Case(
            "the entropy fell {entropy.change}, and {frac_reward_zero_std.last.mean:share} of the groups had "
            "equal rewards in {frac_reward_zero_std.last.span}",
            [
                at_most("entropy.change.ratio", COLLAPSED),
                below("entropy.change.difference", 0),
                at_least("frac_reward_zero_std.last.mean", MOST_TIED),
                at_least("group_spread.last.mean", STUCK, "reward.spread"),
            ],
            unless=[CRITIC],
        ),
        "raise rollout.temperature; loosen rollout.top_k, rollout.top_p and rollout.min_p; grpo.epsilon_high above "
        "grpo.epsilon; a small grpo.entropy_bonus; grpo.max_sampling_rounds; a lower learning rate",
        (
            "rollout.temperature",
            "rollout.top_k",
            "rollout.top_p",
            "rollout.min_p",
            "grpo.epsilon_high",
            "grpo.epsilon",
            "grpo.entropy_bonus",
            "grpo.max_sampling_rounds",
        ),
        explains=("groups too small",),
    ),
    Rule(
        "groups too small",
        "Few groups have a signal",
        f"at least {percent(MOST_TIED)} of the groups have equal rewards, over {LAST} and over the whole run, and "
        f"{NO_RISE}; {percent(MOST_TIED_SMALL)} for groups of at most {SMALL}, after {LONG_ROWS} steps",
        MIN_ROWS,
        [Case(TIES, tied, unless=[*GROUPS_TELL_NOTHING, EASY]) for tied in TIED],
        "raise grpo.num_generations; replace such groups with grpo.max_sampling_rounds; easier prompts (data); a "
        "reward with more steps (rewards)",
        ("grpo.num_generations", "grpo.max_sampling_rounds", "data.path", "rewards"),
    ),
    Rule(
        "possible reward hacking",
        "One part of the reward climbs while another falls (possible reward hacking)",
        f"one reward function has risen by {GAIN_ERRORS:g} standard errors and another has fallen by {FALL_ERRORS:g}, "
        f"both by {percent(MIN_FALL)} of their spread over completions",
        TREND_ROWS,
        Case("{opposed.up} rose {opposed.rise}, and {opposed.down} fell {opposed.fall}"),
        "read the samples; then correct the rewards, or their grpo.reward_weights; a higher grpo.beta",
        ("rewards", "grpo.reward_weights", "grpo.beta"),
        explains=("length without reward", "overfitting"),
    ),
    Rule(
        "possible reward hacking",
        "The reward climbs while the held-out accuracy falls (possible reward hacking)",
        f"the held-out accuracy is {EVAL_ERRORS:g} standard errors below its best, and the reward has risen, "
        "in training and on held-out prompts",
        TREND_ROWS,
        Case(ACCURACY_FELL, [ROSE, ACCURACY_FALL, HELD_OUT_REWARD_ROSE]),
        "read the samples; then correct the rewards, so that they ask for what evaluation.accuracy measures",
        ("rewards", "evaluation.accuracy"),
    ),
    Rule(
        "overfitting",
        "Held-out results fall while training rewards rise (overfitting)",
        f"the held-out accuracy is {EVAL_ERRORS:g} standard errors below its best, and the training reward has risen",
        TREND_ROWS,
        Case(ACCURACY_FELL, [ROSE, ACCURACY_FALL], unless=[HELD_OUT_REWARD_ROSE]),
        "more or other prompts (data); fewer training.max_steps; training.keep_best eval/accuracy; a higher grpo.beta",
        ("data.path", "training.max_steps", "training.keep_best", "grpo.beta"),
    ),
    Rule(
        "overfitting",
        "The held-out loss rises while the training loss falls (overfitting)",
        f"the last held-out loss is above the lowest by {percent(EVAL_LOSS_RISE)} and "
        f"{EVAL_LOSS_NATS} nats, and the training loss has fallen since",
        0,
        Case(
            "the held-out loss was {held_out_loss.early.mean:.3g} after step {held_out_loss.early.first} and is "
            "{held_out_loss.late.mean:.3g} after step {held_out_loss.late.first}, while the training loss went from "
            "{loss_since_best.early.mean:.3g} to {loss_since_best.late.mean:.3g}",
            [
                at_least("held_out_loss_rise.difference", EVAL_LOSS_NATS),
                at_least("held_out_loss_rise.difference", EVAL_LOSS_RISE, "held_out_loss.early.mean"),
                at_least("held_out_loss_rise.difference", EVAL_LOSS_RISE, "held_out_loss_gain.difference"),
                below("loss.change.difference", 0),
                below("loss_since_best.difference", 0),
            ],
        ),
        "fewer training.max_steps or training.num_epochs; training.keep_best eval/loss; more examples (data); a "
        "lower training.optimizer.learning_rate, more training.optimizer.weight_decay",
        (
            "training.max_steps",
            "training.num_epochs",
            "training.keep_best",
            "data.path",
            "training.optimizer.learning_rate",
            "training.optimizer.weight_decay",
        ),
        SFT,
    ),
    Rule(
        "length without reward",
        "Completions grow longer without more reward",
        f"the mean length is {LENGTH_JUMP} times that of {FIRST} ({FALL_ERRORS:g} standard errors), and {NO_RISE}",
        TREND_ROWS,
        Case(
            "the mean length went {completions/mean_length.change} tokens" + AND_REWARD,
            [
                at_least("completions/mean_length.change.ratio", LENGTH_JUMP),
                at_least("completions/mean_length.change.errors", FALL_ERRORS),
            ],
            unless=[ROSE],
        ),
        "grpo.algorithm dr_grpo, or grpo.aggregate constant, which do not favour long answers; grpo.overlong_buffer",
        ("grpo.algorithm", "grpo.aggregate", "grpo.overlong_buffer"),
    ),
    Rule(
        "updates beyond the clip range",
        "Many tokens are clipped",
        f"over {LAST} at least {percent(CLIPPED)} of the tokens are clipped, for ratios of single tokens",
        MIN_ROWS,
        Case(
            "{clip_ratio/region_mean.last.mean:share} of the tokens were clipped in {clip_ratio/region_mean.last.span}",
            [at_least("clip_ratio/region_mean.last.mean", CLIPPED)],
            unless=[equal("has_sequence_ratio", True)],
        ),
        "lower training.actor_optimizer.learning_rate; fewer grpo.num_iterations; or grpo.algorithm cispo or sapo, "
        "which do not set gradients to 0",
        ("training.actor_optimizer.learning_rate", "grpo.num_iterations", "grpo.algorithm"),
    ),
    Rule(
        "learning rate too low",
        "The learning rate is too low",
        f"after {LONG_ROWS} steps or more neither the reward nor, by {percent(STILL)}, entropy and length have "
        f"changed, although groups have a signal; the reward is known to {percent(POWER)} of the spread of completions",
        LONG_ROWS,
        [
            Case(
                "the mean reward went {reward.change}|, the entropy {entropy.change}" + AT_RATE,
                [
                    below("reward.change.errors", 3),
                    above("reward.change.errors", -3),
                    at_most("reward.change.error", POWER, "reward.spread"),
                    at_least("entropy.count", 1),
                    *with_critic,
                ],
                unless=[
                    above("entropy.change.size", STILL, "entropy.change.early.size"),
                    above("completions/mean_length.change.size", STILL, "completions/mean_length.change.early.size"),
                    above("kl.last.mean", 0.01),
                    *no_signal,
                ],
            )
            for with_critic, no_signal in (
                ([CRITIC], []),
                ([], [at_least("frac_reward_zero_std.whole.mean", MOST_TIED)]),
            )
        ],
        "raise training.actor_optimizer.learning_rate by a factor of 3 to 10; lower grpo.beta if it is above 0.1",
        ("training.actor_optimizer.learning_rate", "grpo.beta"),
        live=False,
    ),
    Rule(
        "learning rate too low",
        "The learning rate is too low",
        f"after {LONG_ROWS} steps or more the loss has changed by less than {percent(FLAT_LOSS)}",
        LONG_ROWS,
        Case(
            "the loss went {loss.change}" + AT_RATE,
            [at_least("loss.change.early.mean", 0.1), at_most("loss.change.size", FLAT_LOSS, "loss.change.early.mean")],
        ),
        "raise training.optimizer.learning_rate by a factor of 3 to 10",
        ("training.optimizer.learning_rate",),
        SFT,
        live=False,
    ),
    Rule(
        "critic predicts nothing",
        "The critic predicts nothing",
        f"over {LAST} the explained variance is 0 or less, after {LONG_ROWS} steps or more, and {NO_RISE}",
        LONG_ROWS,
        Case(
            "explained variance {critic/explained_variance.last.mean:.3g} in {critic/explained_variance.last.span}"
            + AND_REWARD,
            [at_most("critic/explained_variance.last.mean", 0)],
            unless=[ROSE],
        ),
        "raise training.critic_optimizer.learning_rate; more training.prompts_per_step",
        ("training.critic_optimizer.learning_rate", "training.prompts_per_step"),
        level=NOTE,
        live=False,
    ),
    Rule(
        "prompts too easy",
        "The prompts are too easy",
        f"at least {percent(MOST_TIED)} of the groups have equal rewards, {NO_RISE}, and it is {EASY_RATIO:g} "
        "times the spread of completions (of rewards 0 and 1, 80 % are 1)",
        MIN_ROWS,
        [Case(TIES, [*tied, EASY], unless=GROUPS_TELL_NOTHING) for tied in TIED],
        "harder prompts (data); grpo.max_sampling_rounds replaces groups that are all right",
        ("data.path", "grpo.max_sampling_rounds"),
        level=NOTE,
    ),
    Rule(
        "part of the reward never reached",
        "One part of the reward was never reached",
        f"a reward function gives 0 to every completion, over {MIN_ROWS} steps or more, while others vary",
        MIN_ROWS,
        [Case("0 for every completion in all {run.steps.size} steps: {unrewarding:, }", unless=[ONE_REWARD])],
        "rewards: if it is a penalty, all is well; if not, easier prompts or a part with steps on the way",
        ("rewards",),
        level=NOTE,
        live=False,
    ),
    Rule(
        "probability removed by truncation",
        "Truncation removes much of what the policy would sample",
        f"over {LAST} at most {percent(LEAST_KEPT)} of the probability is kept by top-k, top-p and min-p",
        MIN_ROWS,
        Case(
            "{sampling/mass_kept.last.mean:share} of the probability is kept on average in "
            "{sampling/mass_kept.last.span}",
            [below("sampling/mass_kept.last.mean", LEAST_KEPT)],
        ),
        "loosen rollout.top_k, rollout.top_p and rollout.min_p, or accept that training is that much off-policy",
        ("rollout.top_k", "rollout.top_p", "rollout.min_p"),
        level=NOTE,
        live=False,
    ),
)
"""All rules; causes before what they explain."""
