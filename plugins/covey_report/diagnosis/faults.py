"""Rules about faults in numbers, data and rewards, which stand before all others."""

from covey_report.diagnosis.conditions import (
    AND_REWARD,
    BOTH,
    CRITIC,
    CUT_ROWS,
    CUT_SHARE,
    DROPPED_ROWS,
    DULL,
    EMPTY,
    FAILED,
    FEW_CUT,
    FEW_EMPTY,
    FEW_ROWS,
    FIRST,
    HACKED,
    LAST,
    LEARNT,
    MANY,
    MANY_EMPTY,
    MANY_SAMPLES,
    MANY_SCORED,
    MIN_ROWS,
    MOST,
    MOST_SAMPLES,
    NEARLY_ALL,
    NOISY,
    OVERLAP,
    READ_SAMPLES,
    REPEATED,
    SOME_NOISE,
    UNLIKE,
    UNSCORED,
)
from covey_report.diagnosis.features import DISAGREEMENT, EXACT, FALL_ERRORS, MIN_FALL, ROUNDED
from covey_report.diagnosis.rule import (
    NOTE,
    PROBLEM,
    Case,
    Rule,
    above,
    at_least,
    at_most,
    below,
    differs,
    equal,
    percent,
)
from covey_report.signal import EXPLAINED, SAME

FAULTS = (
    *(
        Rule(
            "updates not finite",
            "Updates were skipped because they were not finite",
            "any skipped update",
            1,
            [
                Case(
                    "{skipped.nonzero_count} of {run.steps.size} steps had an update that was not finite, the "
                    "first of them step {skipped.first_nonzero}"
                )
            ],
            f"lower {{training.{optimizer}.learning_rate:÷3}} or {{training.{optimizer}.max_grad_norm:÷3}}; "
            "{model.dtype:float32}. The batches are in the folder bad/",
            methods=(method,),
        )
        for method, optimizer in (("rl", "actor_optimizer"), ("sft", "optimizer"))
    ),
    Rule(
        "sampler and trainer disagree",
        "The sampler and the trainer disagree about the probability of tokens",
        f"without training.off_policy_steps, over {FIRST} and {LAST}, their log-probs differ by at least "
        f"{DISAGREEMENT} nats per token on average; or with the same noise the trainer would have drawn more than "
        f"{percent(1 - ROUNDED)} of the compared tokens otherwise, or {percent(1 - EXACT)} where weights and products "
        "are float32",
        MIN_ROWS,
        [
            Case(
                "their log-probs differ by {sampling/logp_difference/mean.last.mean:.3g} nats per token on average in "
                "{sampling/logp_difference/mean.last.span}",
                [
                    *(
                        at_least(f"sampling/logp_difference/mean.{when}.mean", DISAGREEMENT)
                        for when in ("first", "last")
                    ),
                    equal("samples_age", 0),
                ],
            ),
            Case(
                "with the same noise the trainer would have drawn {drawn_otherwise} of the tokens otherwise in "
                "{sampling/token_agreement.last.span}",
                [
                    *(
                        below(f"sampling/token_agreement.{when}.mean", 1, "least_agreement")
                        for when in ("first", "last")
                    ),
                    equal("samples_age", 0),
                ],
            ),
        ],
        "find the cause first: a rollout of your own with weights of an earlier update, another prompt or another "
        "temperature; {model.compute_dtype:float32}, no {model.quantize}; then {grpo.correction:token_truncate}",
        explains=("learning rate too high", "KL runaway", "entropy collapse", "updates beyond the clip range"),
    ),
    Rule(
        "prompts cut",
        "Rows are too long, and are cut or left out",
        f"{percent(CUT_ROWS)} of the rows lose their beginning, or {percent(DROPPED_ROWS)} are left out",
        1,
        [
            Case(
                "{cut_rows:,.0f} rows were cut| of {prompts:,.0f} training rows",
                [above("cut_rows", CUT_ROWS, "prompts")],
            ),
            Case(
                "{dropped_rows:,.0f} rows were left out|, {prompts:,.0f} training rows are left",
                [above("dropped_rows", DROPPED_ROWS / (1 - DROPPED_ROWS), "prompts")],
            ),
        ],
        "raise {rollout.max_prompt_length:×2}; {training.too_long} says what happens to a longer row",
        methods=BOTH,
        explains=(
            "one training row",
            "few distinct rows",
            "held-out rows trained on",
            "held-out rows of another kind",
            "reward never reached",
            "samples too similar",
            "groups too small",
        ),
    ),
    Rule(
        "one training row",
        "All training rows are equal",
        "there is one distinct row among several",
        1,
        [
            Case(
                "{rows:,.0f} training rows, {distinct_rows:,.0f} distinct",
                [at_most("distinct_rows", 1), above("rows", 1)],
            )
        ],
        "train on other rows: {data.path}",
        methods=BOTH,
    ),
    Rule(
        "few distinct rows",
        "The training rows repeat a few",
        f"at most {FEW_ROWS} rows are distinct, and they are at most {percent(REPEATED)} of all",
        1,
        [
            Case(
                "{rows:,.0f} training rows, {distinct_rows:,.0f} distinct",
                [
                    above("distinct_rows", 1),
                    at_most("distinct_rows", FEW_ROWS),
                    at_most("distinct_rows", REPEATED, "rows"),
                ],
            )
        ],
        "train on more rows: {data.path}; with as few, {training.max_steps} decides how often each is seen",
        methods=BOTH,
        explains=("overfitting",),
    ),
    Rule(
        "held-out rows trained on",
        "Held-out rows are training rows, so held-out results do not tell what is learnt",
        f"more than {percent(OVERLAP)} of the held-out rows are equal to a training row but for case and white space",
        1,
        [
            Case(
                "{held_out_in_training:,.0f} of {held_out_rows:,.0f} held-out rows are training rows",
                [above("held_out_in_training", OVERLAP, "held_out_rows")],
            )
        ],
        "hold out rows that are not trained on: {data.test_path}",
        methods=BOTH,
    ),
    Rule(
        "prompts without template",
        "The model has a chat template, and the prompts are plain text",
        f"some prompts are no chats, and {percent(MANY_EMPTY)} of the completions of the first step have no text",
        1,
        [
            Case(
                "{plain_prompts:,.0f} of {prompts:,.0f} training prompts are plain text; "
                "{completions/empty_ratio.start.mean:share} of the completions are empty in "
                "{completions/empty_ratio.start.span}, {completions/empty_ratio.last.mean:share} in "
                "{completions/empty_ratio.last.span}",
                [above("plain_prompts", 0), at_least("completions/empty_ratio.start.mean", MANY_EMPTY), MANY],
            )
        ],
        "make chats of the prompts: rows with a list of messages, or {data.system}, which also makes one of a text",
        explains=("possible reward hacking", *HACKED, "constant reward"),
    ),
    Rule(
        "episodes fail",
        "The environment fails",
        f"{percent(FAILED)} of the episodes or more end by an error of the environment, or because it took too long",
        MIN_ROWS,
        [
            Case("{failed_episodes:share} of the episodes failed in {num_steps}", [*conditions], rows)
            for conditions, rows in (
                ([at_least("failed_episodes", FAILED), MANY], 1),
                ([at_least("failed_episodes", FAILED)], None),
            )
        ],
        "read the first error that the run printed; then mend {envs.environment}, or raise {envs.timeout:×3}",
        explains=("no completion scored", "few completions scored", "noisy reward", *HACKED, "possible reward hacking"),
    ),
    Rule(
        "reward fails",
        "A reward function fails",
        f"one fails for {percent(FAILED)} of the completions or more",
        MIN_ROWS,
        [
            Case("one failed for {failing:share} of the completions in {num_steps}", [*conditions], rows)
            for conditions, rows in (([at_least("failing", FAILED), MANY], 1), ([at_least("failing", FAILED)], None))
        ],
        "read the first error that the run printed; then mend {rewards}",
        explains=("no completion scored", "few completions scored", "noisy reward", *HACKED, "possible reward hacking"),
    ),
    Rule(
        "no completion scored",
        "No completion was scored",
        f"the reward is missing in every step, {MIN_ROWS} or more, or for {MANY_SAMPLES} completions",
        MIN_ROWS,
        [
            Case("reward is missing in all {run.steps.size} steps", [at_most("reward.count", 0), MANY], rows=1),
            Case("reward is missing in all {run.steps.size} steps", [at_most("reward.count", 0)]),
        ],
        "see why the functions of {rewards} return None for every completion",
        explains=("answers cut off", "samples too similar"),
    ),
    Rule(
        "few completions scored",
        "Few completions are scored",
        f"at most {percent(UNSCORED)} have a reward; the others teach nothing",
        1,
        [
            Case(
                "{completions/scored_ratio.whole.mean:share} of the completions have a reward",
                [at_most("completions/scored_ratio.whole.mean", UNSCORED), above("reward.count", 0), MANY],
            )
        ],
        "see why the functions of {rewards} return None for the others",
        explains=("noisy reward", *HACKED, "possible reward hacking"),
    ),
    *(
        Rule(
            "noisy reward",
            "Completions that are equal get different rewards",
            f"the variance of rewards among equal completions of a prompt is {percent(share)} or more of that among "
            f"all, over {FIRST} and the whole run{words}",
            MIN_ROWS,
            [
                Case(
                    "the variance of rewards among equal completions is {reward_noise.whole.mean:share} of that among "
                    "all of a prompt" + AND_REWARD,
                    [*(at_least(f"reward_noise.{when}.mean", share) for when in ("first", "whole")), *alike, MANY],
                )
            ],
            "see in samples.jsonl which of the {rewards} gives equal texts different scores: one that draws at random, "
            "or that mixes up completions",
            [LEARNT],
            explains=explained,
            level=level,
        )
        for level, share, words, alike, explained in (
            (
                PROBLEM,
                NOISY,
                ", and less than three standard errors below that",
                [at_least("noise_reach", 1)],
                ("held-out rows of another kind", *HACKED, "reward ignores completions"),
            ),
            (NOTE, SOME_NOISE, "", [], ()),
        )
    ),
    Rule(
        "held-out rows of another kind",
        "The model does much worse on held-out rows than on training rows: they are of another kind",
        f"before training the reward on held-out rows is not negative and less than {percent(UNLIKE)} of that of the "
        f"first step, by {FALL_ERRORS:g} standard errors and {percent(MIN_FALL)} of the spread of single completions",
        1,
        [
            Case(
                "before training the reward was {held_out_to_training.early.mean:.3g} on held-out rows, and "
                "{reward.start.mean:.3g} in {reward.start.span}",
                [
                    at_least("held_out_to_training.early.mean", 0),
                    at_least("held_out_to_training.errors", FALL_ERRORS),
                    at_least("held_out_to_training.difference", MIN_FALL, "reward.spread"),
                    below("held_out_to_training.early.mean", UNLIKE, "reward.start.mean"),
                    MANY,
                ],
            )
        ],
        "compare held-out with training rows (`covey data RECIPE` shows them): {data.test_path}",
        explains=("overfitting",),
    ),
    Rule(
        "reward ignores completions",
        "The reward does not depend on what is written",
        f"all completions of a prompt have one reward though they differ, and prompts differ, in {MOST_SAMPLES} "
        "completions or more",
        1,
        [
            Case(
                "all groups| of {group_size}| have equal rewards in {num_steps}, with {distinct_texts.whole.mean:.3g} "
                "different texts on average, and the rewards of groups differ",
                [
                    at_least("frac_reward_zero_std.whole.mean", 1),
                    at_least("distinct_texts.whole.mean", 2),
                    above("group_spread.whole.mean", 0),
                    MOST,
                ],
            )
        ],
        "let {rewards} read the completions",
        [CRITIC],
        explains=HACKED,
    ),
    Rule(
        "possible reward hacking",
        "All rewarded completions are empty (possible reward hacking)",
        f"of the completions with a reward above the mean of their group {percent(NEARLY_ALL)} have no text, over the "
        f"whole run, and {FEW_EMPTY} completions or more are empty",
        1,
        [
            Case(
                "{completions/rewarded_empty_ratio.whole.mean:share} of the completions with a reward above the mean "
                "of their group are empty; of all completions {completions/empty_ratio.start.mean:share} in "
                "{completions/empty_ratio.start.span}, {completions/empty_ratio.last.mean:share} in "
                "{completions/empty_ratio.last.span}",
                [
                    at_least("completions/rewarded_empty_ratio.whole.mean", NEARLY_ALL),
                    at_least("empty_completions", FEW_EMPTY),
                ],
            )
        ],
        f"{READ_SAMPLES}; then correct {{rewards}}, so that an empty completion gets the lowest reward",
        explains=HACKED,
    ),
    *(
        Rule(
            "possible reward hacking",
            f"The reward is explained by the {name} of the completions (possible reward hacking)",
            f"within groups the two have a correlation of {EXPLAINED:g} over the whole run and over {LAST}"
            + (f", or one of −{SAME:g} while fewer than {percent(few_cut)} are cut off" if few_cut else "")
            + f"; with {SAME:g} for {MANY_SAMPLES} completions it is certain",
            MIN_ROWS,
            [
                Case(
                    f"within groups reward and {name} have a correlation of {{{metric}.whole.mean:.3g}} over the whole "
                    f"run, {{{metric}.last.mean:.3g}} in {{{metric}.last.span}}",
                    conditions,
                    rows,
                )
                for metric in [f"reward_correlation/{name}"]
                for conditions, rows in (
                    ([at_least(f"{metric}.whole.mean", SAME), MANY], 1),
                    ([at_least(f"{metric}.{when}.mean", EXPLAINED) for when in ("whole", "last")], None),
                    ([at_most(f"{metric}.whole.mean", -SAME), below(CUT_SHARE, few_cut)], None),
                )
            ],
            f"{READ_SAMPLES}; then correct {{rewards}}, so that they look at what is written",
            explains=HACKED,
        )
        for name, few_cut in (("length", FEW_CUT), ("repetition", 0))
    ),
    Rule(
        "constant reward",
        "The reward is the same for every completion, so nothing is learnt",
        f"every scored completion has one reward that is not 0, {MANY_SAMPLES} completions or {MIN_ROWS} steps or more",
        MIN_ROWS,
        [
            Case(
                "every {judged}completion of {num_steps} scored {only_reward:.3g}| ({scored_samples} completions)"
                "|; {unscored}",
                conditions,
                rows,
            )
            for conditions, rows in (([differs("only_reward", 0), MANY_SCORED], 1), ([differs("only_reward", 0)], None))
        ],
        "see in samples.jsonl whether the completions deserve the same reward. If not, correct the function of "
        "{rewards}; if so, use easier or harder prompts: {data.path}",
        [EMPTY],
        explains=DULL,
    ),
)
