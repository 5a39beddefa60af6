"""The table of rules: what is seen, from which threshold on, what would refute it, and which setting to change.

The order is that of causes: a rule stands before those whose observations it explains, and the first one that is met is
the first finding. RULES.md, which docs/diagnosis-rules.md shows, is written from it.
"""

from covey_report.diagnosis.conditions import (
    AND_HELD_OUT,
    AND_REWARD,
    AT_RATE,
    CLIPPED,
    COLLAPSED,
    CRITIC,
    CUT,
    CUT_SHARE,
    DULL,
    EASY,
    EMPTY,
    EVAL_LOSS_RISE,
    FEW_DISTINCT,
    FIRST,
    FLAT_LOSS,
    GOOD_BEFORE,
    GROWN,
    HELD_OUT,
    HELD_OUT_FELL,
    HELD_OUT_KEPT,
    KL_FAR,
    KL_GROWTH,
    LAST,
    LEARNT,
    LEAST_KEPT,
    LONG_ROWS,
    MANY,
    MANY_CUT,
    MANY_SAMPLES,
    MANY_SCORED,
    MIN_DIP,
    MIN_ROWS,
    MOST_CUT,
    MOST_EMPTY,
    MOST_SAMPLES,
    MOST_TIED_SMALL,
    MOSTLY,
    MOVED,
    NEARLY_ALL,
    NEARLY_ALL_CUT,
    NOT_LEARNT,
    NOT_ROSE,
    ONE_REWARD,
    POWER,
    RATE,
    SFT,
    SHIFT,
    SPOILED,
    STILL,
    STUCK,
    TIED,
    TIES,
    TREND_ROWS,
)
from covey_report.diagnosis.faults import FAULTS
from covey_report.diagnosis.features import (
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
    MOST_TIED,
    SHORT_RUN,
    SMALL,
    SPIKE,
)
from covey_report.diagnosis.held_out import HELD_OUT_RULES
from covey_report.diagnosis.rule import NOTE, PROBLEM, Case, Rule, above, at_least, at_most, below, equal, percent
from covey_report.diagnosis.settings import SETTINGS, SUPERVISED_RATE
from covey_report.signal import EXPLAINED

RULES = (
    *FAULTS,
    *SETTINGS,
    Rule(
        "samples too similar",
        "The completions of a group are too similar",
        f"groups have at most {FEW_DISTINCT} different completions on average, in the first step, {FIRST} and {LAST}; "
        f"certain for {MANY_SAMPLES} completions where {percent(MOST_TIED)} of the groups have equal rewards",
        MIN_ROWS,
        [
            Case(
                "a group of {group_size} completions had {distinct_texts.last.mean:.3g} different texts on "
                "average in {distinct_texts.last.span}",
                [
                    at_least("group_size", 2),
                    *(at_most(f"distinct_texts.{when}.mean", FEW_DISTINCT) for when in ("start", "first", "last")),
                    *conditions,
                ],
                rows,
            )
            for conditions, rows in (([MANY, at_least("frac_reward_zero_std.whole.mean", MOST_TIED)], 1), ([], None))
        ],
        "raise {rollout.temperature:1}; loosen {rollout.top_k:0}, {rollout.top_p:1} and {rollout.min_p:0}",
        [
            LEARNT,
            GOOD_BEFORE,
            at_least(
                "completions/clipped_ratio.start.mean",
                MOST_CUT,
                words=f"{percent(MOST_CUT)} of the completions of the first step were cut off: few tokens are alike",
            ),
            EMPTY,
        ],
        explains=("learning rate too high", *DULL[1:]),
    ),
    Rule(
        "learning rate too high",
        "The learning rate is too high",
        f"over {LAST} the reward is lower than at its best by {FALL_ERRORS:g} standard errors and {percent(MIN_FALL)} "
        "of the spread of single completions; or it has not risen and fell so on the way; or it fell by "
        f"{GAIN_ERRORS:g} errors and {percent(MIN_DIP)}, the gradient norm is {GROWN:g} times its first value, and it "
        f"is not above the level before; or the held-out accuracy is {GAIN_ERRORS:g} standard errors below its best "
        f"and the reward has not risen, or fell so on the way and is not {GAIN_ERRORS:g} above the start; or nothing "
        f"was gained and two of these jumped, the entropy among them: completions cut off by {percent(JUMP)}, mean "
        f"length by a factor of {LENGTH_JUMP}, entropy to {ENTROPY_LOW} or {ENTROPY_HIGH:g} times its first value, KL "
        f"to {KL_HIGH:g} nat per token, gradient norm to {SPIKE:g} times its first value",
        TREND_ROWS,
        [
            Case("the mean reward fell {reward.fall}" + AT_RATE + AND_HELD_OUT + "|; {jumps:; }"),
            *(
                Case(
                    "the mean reward fell {reward.trough} on the way, and is {reward.last.mean:.3g} in "
                    "{reward.last.span}" + AT_RATE + AND_HELD_OUT + grown + "|; {jumps:; }",
                    [
                        at_most("reward.trough.errors", -errors),
                        at_least("reward.trough.size", size, "reward.spread"),
                        *conditions,
                    ],
                )
                for errors, size, grown, conditions in (
                    (FALL_ERRORS, MIN_FALL, "", [NOT_LEARNT]),
                    (
                        GAIN_ERRORS,
                        MIN_DIP,
                        "; the norm of the gradient was {grad_norm.start.mean:.3g} in the first step, and is "
                        "{grad_norm.whole.mean:.3g} on average",
                        [
                            below("reward.since_peak.errors", GAIN_ERRORS),
                            at_least("grad_norm.whole.mean", GROWN, "grad_norm.start.mean"),
                        ],
                    ),
                )
            ),
            Case(HELD_OUT.format(name="accuracy") + AT_RATE, [NOT_ROSE, HELD_OUT_FELL], rows=0),
            Case(
                "the held-out accuracy fell {held_out_trough:share} on the way" + AT_RATE,
                [
                    at_most("held_out_trough.errors", -GAIN_ERRORS),
                    below("held_out_gain.errors", GAIN_ERRORS),
                    above("held_out_accuracy.errors", -GAIN_ERRORS),
                ],
            ),
            *(
                Case(
                    "nothing was gained| at a learning rate of {learning_rate.peak.mean:.3g}"
                    + AND_REWARD
                    + "|; {jumps:; }",
                    [NOT_LEARNT, at_least("jump_count", 2), violent],
                )
                for violent in (ENTROPY_FELL, ENTROPY_SOARED)
            ),
        ],
        f"lower {{{RATE}:÷5}}, and start again or from an earlier checkpoint"
        "|; then more {training.actor_optimizer.warmup_ratio:>0.1}|; then a lower "
        "{training.actor_optimizer.max_grad_norm:÷3}|; then a higher {grpo.beta:>0.04}",
        [equal("learning_rate.peak.mean", 0, words="the learning rate is 0"), HELD_OUT_KEPT],
        explains=SPOILED,
    ),
    *SUPERVISED_RATE,
    Rule(
        "empty completions",
        "Most completions are empty",
        f"{percent(NEARLY_ALL)} of the completions of {LAST} have no text; or {percent(MOST_EMPTY)} of those of "
        "the first step",
        1,
        [
            Case(
                "{completions/empty_ratio.last.mean:share} of the completions are empty in "
                "{completions/empty_ratio.last.span}, {completions/empty_ratio.start.mean:share} in "
                "{completions/empty_ratio.start.span}",
                [*conditions, MANY],
            )
            for conditions in ([EMPTY], [at_least("completions/empty_ratio.start.mean", MOST_EMPTY)])
        ],
        "compare the first prompt, which `covey train RECIPE --dry-run` prints, with those that {model.source} was "
        "trained on (a chat model wants messages): one that begins with its stop token takes the answer for finished",
        explains=("reward never reached", *DULL[1:]),
    ),
    Rule(
        "KL runaway",
        "The policy runs away from the reference",
        f"over {LAST} the KL is at least {KL_HIGH:g} nat per token and {KL_GROWTH:g} times that of the "
        f"middle of the run, or at least {KL_FAR:g} nats per token",
        TREND_ROWS,
        [
            Case("the KL grew {kl.since_middle} nats per token" + AND_REWARD, high)
            for high in (
                [at_least("kl.last.mean", KL_HIGH), at_least("kl.last.mean", KL_GROWTH, "kl.since_middle.early.size")],
                [at_least("kl.last.mean", KL_FAR)],
            )
        ],
        f"raise {{grpo.beta:×3}}, or set {{grpo.kl_target:0.1}}; then lower {{{RATE}:÷3}}, "
        "{training.actor_optimizer.max_grad_norm:÷3} or {grpo.epsilon:÷2}",
        explains=("answers cut off", "entropy collapse", "length without reward", "updates beyond the clip range"),
    ),
    Rule(
        "answers cut off",
        "Answers are cut off",
        f"over {LAST} at least {percent(MOST_CUT)} of the completions are cut by a limit of tokens or time, at "
        f"least 70 % of the share of {FIRST}, and the reward has not risen; or {percent(NEARLY_ALL_CUT)} in both; "
        f"{percent(NEARLY_ALL)} of {MANY_SAMPLES} completions are certain",
        MIN_ROWS,
        [
            Case(CUT, [at_least(CUT_SHARE, NEARLY_ALL), MANY], rows=1),
            Case(CUT, [*MANY_CUT, NOT_LEARNT]),
            Case(
                CUT, [at_least(f"completions/clipped_ratio.{when}.mean", NEARLY_ALL_CUT) for when in ("first", "last")]
            ),
        ],
        "read completions in samples.jsonl: if they have ended before the limit, the model does not know its stop "
        "token after such a prompt; else raise {rollout.max_new_tokens:×2} (or {envs.max_turn_tokens} or "
        "{envs.timeout}, if that cuts them); or ask for shorter answers, with {grpo.overlong_buffer}; "
        "{grpo.mask_truncated:true} leaves cut completions out of the loss",
        [
            at_least(
                "finished_without_reward",
                MANY_SAMPLES,
                words=f"{MANY_SAMPLES} completions that were finished had no reward either",
            ),
            at_least(
                "reward_correlation/length.whole.mean",
                EXPLAINED,
                words="the reward is explained by the length of the completions",
            ),
        ],
        explains=("reward never reached", "groups too small", "length without reward", "learning rate too low"),
    ),
    Rule(
        "reward never reached",
        "The reward was never reached",
        "every scored completion has the reward 0, apart from a penalty by grpo.overlong_buffer, and there are "
        f"{MANY_SAMPLES} completions or more in {MIN_ROWS} steps; {MOST_SAMPLES}, with those of the evaluation before "
        "training if it had none either, are certain",
        MIN_ROWS,
        [
            Case(
                "{none_of_all} in {num_steps} had a reward other than 0|; {unscored}"
                "|; the success rate is below {success_bound:share} (95 % confidence)"
                "|; {completions/clipped_ratio.whole.mean:share} of them were cut off",
                [condition, number],
                rows,
            )
            for number, rows in ((at_least("unrewarded", MOST_SAMPLES), 1), (MANY_SCORED, None))
            for condition in (equal("only_reward", 0), equal("all_unrewarding", True))
        ],
        "easier prompts ({data.path}), or a reward with steps on the way ({rewards}); more samples "
        "({grpo.num_generations:×2}); or supervised training first",
        [below("scored_count", MANY_SAMPLES, words=f"fewer than {MANY_SAMPLES} completions were scored")],
        explains=("groups too small", "entropy collapse", "learning rate too low", "part of the reward never reached"),
    ),
    Rule(
        "entropy collapse",
        "The entropy has collapsed",
        f"over {LAST} the entropy is at most {percent(COLLAPSED)} of that of {FIRST}, {percent(MOST_TIED)} of the "
        f"groups have equal rewards, and groups differ by {percent(STUCK)} of the spread of completions or more",
        TREND_ROWS,
        [
            Case(
                "the entropy fell {entropy.change}, and {frac_reward_zero_std.last.mean:share} of the groups had "
                "equal rewards in {frac_reward_zero_std.last.span}",
                [
                    at_most("entropy.change.ratio", COLLAPSED),
                    below("entropy.change.difference", 0),
                    at_least("frac_reward_zero_std.last.mean", MOST_TIED),
                    at_least("group_spread.last.mean", STUCK, "reward.spread"),
                ],
            )
        ],
        "raise {rollout.temperature:×1.3}; loosen {rollout.top_k:0}, {rollout.top_p:1} and {rollout.min_p:0}; "
        "{grpo.epsilon_high:0.28} above {grpo.epsilon}; a small {grpo.entropy_bonus:0.001}; "
        f"{{grpo.max_sampling_rounds:4}}; a lower {{{RATE}:÷3}}",
        [CRITIC],
        explains=("groups too small",),
    ),
    Rule(
        "groups too small",
        "Most groups are tied, few of them at the best reward: there is hardly a signal",
        f"at least {percent(MOST_TIED)} of the groups have equal rewards, over {LAST} and over the whole run; "
        f"{percent(MOST_TIED_SMALL)} for groups of at most {SMALL}, after {LONG_ROWS} steps",
        MIN_ROWS,
        [Case(TIES, tied) for tied in TIED],
        "raise {grpo.num_generations:×2}; replace such groups with {grpo.max_sampling_rounds:4}; easier prompts "
        "({data.path}); a reward with more steps ({rewards})",
        [CRITIC, ONE_REWARD, LEARNT, EASY],
    ),
    Rule(
        "possible reward hacking",
        "One part of the reward climbs while another falls (possible reward hacking)",
        f"one reward function has risen by {GAIN_ERRORS:g} standard errors and another has fallen by {FALL_ERRORS:g}, "
        f"both by {percent(MIN_FALL)} of their spread over completions",
        TREND_ROWS,
        [Case("{opposed.up} rose {opposed.rise}, and {opposed.down} fell {opposed.fall}")],
        "read the samples; then correct {rewards}, or their {grpo.reward_weights}; a higher {grpo.beta:0.04}",
        explains=("length without reward", "overfitting", "prompts too easy", "learning rate too low"),
    ),
    *HELD_OUT_RULES,
    Rule(
        "tools never called",
        "The tools are never called",
        f"no completion calls one, of {MANY_SAMPLES} or more",
        MIN_ROWS,
        [
            Case(
                "no tool was called in {num_steps}",
                [at_most("env/tool_calls.whole.mean", 0), equal("has_tools", True), MANY],
            )
        ],
        "see in samples.jsonl how the model writes a call; then {envs.tool_format}, a prompt that shows one, or "
        "supervised training on calls first",
        [LEARNT],
        explains=("learning rate too low",),
    ),
    Rule(
        "length without reward",
        "Completions grow longer without more reward",
        f"the mean length is {LENGTH_JUMP} times that of {FIRST} ({FALL_ERRORS:g} standard errors)",
        TREND_ROWS,
        [
            Case(
                "the mean length went {completions/mean_length.change} tokens" + AND_REWARD,
                [
                    at_least("completions/mean_length.change.ratio", LENGTH_JUMP),
                    at_least("completions/mean_length.change.errors", FALL_ERRORS),
                ],
            )
        ],
        "{grpo.algorithm:dr_grpo}, or {grpo.aggregate:constant}, which do not favour long answers; "
        "{grpo.overlong_buffer}",
        [LEARNT],
    ),
    Rule(
        "updates beyond the clip range",
        "Many tokens are clipped",
        f"over {LAST} at least {percent(CLIPPED)} of the tokens are clipped",
        MIN_ROWS,
        [
            Case(
                "{clip_ratio/region_mean.last.mean:share} of the tokens were clipped in "
                "{clip_ratio/region_mean.last.span}",
                [at_least("clip_ratio/region_mean.last.mean", CLIPPED)],
            )
        ],
        f"lower {{{RATE}:÷3}}; fewer {{grpo.num_iterations:1}}; {{grpo.epsilon:0.2}}, if it is far below that; or "
        "{grpo.algorithm:cispo} or sapo, which do not set gradients to 0",
        [equal("has_sequence_ratio", True, words="the ratio is that of a whole sequence")],
    ),
    Rule(
        "learning rate too low",
        "The learning rate is too low",
        f"after {LONG_ROWS} steps or more the reward is less than 3 standard errors from that of {FIRST}, and its "
        f"change is known to {percent(POWER)} of the spread of completions",
        LONG_ROWS,
        [
            Case(
                "the mean reward went {reward.change}|, the entropy {entropy.change}" + AT_RATE + AND_HELD_OUT,
                [
                    below("reward.change.errors", 3),
                    above("reward.change.errors", -3),
                    at_most("reward.change.error", POWER, "reward.spread"),
                    at_least("entropy.count", 1),
                ],
            )
        ],
        f"raise {{{RATE}:×5}}|, or less {{training.actor_optimizer.warmup_ratio:<0.1}}|; a lower {{grpo.beta:<0.1}}",
        [
            LEARNT,
            GOOD_BEFORE,
            at_most(
                "reward.trough.errors",
                -GAIN_ERRORS,
                words=f"the reward fell by {GAIN_ERRORS:g} standard errors on the way",
            ),
            HELD_OUT_FELL,
            above("entropy.change.size", STILL, "entropy.change.early.size", f"the entropy moved by {percent(STILL)}"),
            at_least(
                "entropy_shift",
                SHIFT,
                words=f"the entropy moved by {percent(SHIFT)} and {GAIN_ERRORS:g} standard errors",
            ),
            above(
                "completions/mean_length.change.size",
                STILL,
                "completions/mean_length.change.early.size",
                f"the length moved by {percent(STILL)}",
            ),
            above("kl.last.mean", 0.01, words="the KL is above 0.01 nats per token"),
            at_least("tied_without_critic", MOST_TIED, words=f"{percent(MOST_TIED)} of the groups have equal rewards"),
            at_least(
                "short_rate_sum",
                MOVED,
                words=f"the run has fewer than {SHORT_RUN} steps, and their rates add up to {MOVED:g}: it is short",
            ),
        ],
        live=False,
    ),
    Rule(
        "learning rate too low",
        "The learning rate is too low",
        f"after {LONG_ROWS} steps or more the loss has changed by less than {percent(FLAT_LOSS)}",
        LONG_ROWS,
        [
            Case(
                "the loss went {loss.change}" + AT_RATE,
                [
                    at_least("loss.change.early.mean", 0.1),
                    at_most("loss.change.size", FLAT_LOSS, "loss.change.early.mean"),
                ],
            )
        ],
        "raise {training.optimizer.learning_rate:×5}|, or less {training.optimizer.warmup_ratio:<0.1}",
        [
            at_least(
                "held_out_loss_gain.difference",
                EVAL_LOSS_RISE,
                "held_out_loss_gain.early.size",
                f"the held-out loss fell by {percent(EVAL_LOSS_RISE)}",
            ),
            LEARNT,
        ],
        methods=SFT,
        live=False,
    ),
    Rule(
        "critic predicts nothing",
        "The critic predicts nothing",
        f"over {LAST} the explained variance is 0 or less, after {LONG_ROWS} steps or more",
        LONG_ROWS,
        [
            Case(
                "explained variance {critic/explained_variance.last.mean:.3g} in {critic/explained_variance.last.span}"
                + AND_REWARD,
                [at_most("critic/explained_variance.last.mean", 0)],
            )
        ],
        "raise {training.critic_optimizer.learning_rate:×3}; more {training.prompts_per_step:×2}",
        [LEARNT],
        level=NOTE,
        live=False,
    ),
    *(
        Rule(
            "prompts too easy",
            "Most groups are tied, most of them at the best reward: the prompts are too easy",
            "as many groups have equal rewards, and more of them have the best reward of the step than the worst"
            + (f"; a problem where it is so in the first step, and {percent(MOSTLY)} are" if easy else ""),
            MIN_ROWS,
            [Case(TIES, [*tied, EASY, *easy]) for tied in TIED],
            "harder prompts ({data.path}); {grpo.max_sampling_rounds:4} replaces groups that are all right",
            [CRITIC, ONE_REWARD, LEARNT, *([GOOD_BEFORE] if easy else [])],
            level=level,
        )
        for level, easy in ((PROBLEM, [at_least("frac_reward_all_best.start.mean", MOSTLY)]), (NOTE, []))
    ),
    Rule(
        "part of the reward never reached",
        "One part of the reward was never reached",
        f"a reward function gives 0 to every completion, over {MIN_ROWS} steps or more, while others vary",
        MIN_ROWS,
        [Case("0 for every completion in all {run.steps.size} steps: {unrewarding:, }")],
        "{rewards}: if it is a penalty, all is well; if not, easier prompts or a part with steps on the way",
        [ONE_REWARD],
        level=NOTE,
        live=False,
    ),
    Rule(
        "probability removed by truncation",
        "Truncation removes much of what the policy would sample",
        f"over {LAST} at most {percent(LEAST_KEPT)} of the probability is kept by top-k, top-p and min-p",
        MIN_ROWS,
        [
            Case(
                "{sampling/mass_kept.last.mean:share} of the probability is kept on average in "
                "{sampling/mass_kept.last.span}",
                [below("sampling/mass_kept.last.mean", LEAST_KEPT)],
            )
        ],
        "loosen {rollout.top_k:0}, {rollout.top_p:1} and {rollout.min_p:0}, or accept that training is that much "
        "off-policy",
        level=NOTE,
        live=False,
    ),
)
"""All rules; causes before what they explain."""

OUTCOMES = {
    method: (
        Rule(
            "",
            "The run is too short to judge",
            "",
            0,
            [
                Case(f"{{num_steps}}; {rules} are not judged before step {rows}", [below("run.steps.size", rows)])
                for rules, rows in (("most rules", MIN_ROWS), ("rules about changes", TREND_ROWS))
            ],
            "",
            level=NOTE,
        ),
        Rule(
            "",
            "Nothing wrong was found",
            "no rule for this method of training is met",
            0,
            [Case(text, [sound]) for text in words for sound in (improved, below("run.steps.size", LONG_ROWS))],
            "",
            level=NOTE,
        ),
        Rule(
            "",
            "The reward fell in training and not on held-out prompts: the training prompts may have become harder",
            "",
            0,
            [
                Case(
                    "the mean reward went {reward.change}" + AND_HELD_OUT,
                    [HELD_OUT_KEPT, at_most("reward.change.errors", -GAIN_ERRORS)],
                )
            ],
            "compare the first prompts with the last ones: {data.path}",
            level=NOTE,
        ),
        Rule(
            "",
            f"The {metric} did not improve, and no rule says why",
            "",
            0,
            [Case(text) for text in words],
            "train longer, or compare runs with another learning rate",
            level=NOTE,
        ),
    )
    for method, metric, improved in (("rl", "reward", LEARNT), ("sft", "loss", below("loss.change.difference", 0)))
    for words in [(f"the mean {metric} went {{{metric}.change}}", f"{metric} was not measured")]
}
"""Notes on a run in which no rule found a problem, by method; the first one that is met is told."""
