"""Rules about settings with which nothing is learnt, whatever the rewards are."""

from covey_report.diagnosis.conditions import (
    AND_REWARD,
    AT_RATE,
    BETA,
    BONUS_RISE,
    CLIPPED_AWAY,
    DECAYED,
    FIRST,
    FLAT_LOSS,
    HELD_OUT_FELL,
    HELD_OUT_LOSS,
    HOT,
    HOT_SHARE,
    LAST,
    LEARNT,
    LOSS_RISE,
    LOSS_TWICE,
    MANY,
    MIN_ROWS,
    NOT_LEARNT,
    ONE_REWARD,
    SFT,
    SPOILED,
    TINY_RATE,
    TREND_ROWS,
)
from covey_report.diagnosis.features import FALL_ERRORS, GAIN_ERRORS
from covey_report.diagnosis.rule import Case, Rule, above, at_least, at_most, below, differs, equal, percent

SETTINGS = (
    *(
        Rule(
            "learning rate next to 0",
            "The learning rate is too low: nothing is learnt",
            f"it is 0 in every step, or at most {TINY_RATE:g}: an update of Adam moves no weight by more than its rate",
            1,
            [
                Case("the learning rate was 0 in {num_steps}", [equal("learning_rate.peak.mean", 0)]),
                Case("the learning rate is {rate:.3g}", [above("rate", 0), at_most("rate", TINY_RATE)]),
            ],
            f"raise {{training.{optimizer}.learning_rate:{rate}}}",
            methods=(method,),
            explains=("learning rate too low", "samples too similar", "groups too small"),
        )
        for method, optimizer, rate in (("rl", "actor_optimizer", "1e-6"), ("sft", "optimizer", "1e-5"))
    ),
    *(
        Rule(
            "weight decay too large",
            "The weight decay pulls the weights to 0",
            f"it is above 1, takes {percent(DECAYED)} of a weight at a step or more, and the {metric} has not improved",
            MIN_ROWS,
            [
                Case(
                    "a weight decay of {weight_decay:.3g} takes {decay:share} of a weight at a step"
                    f"|; the {metric} went {{{metric}.change}}",
                    [above("weight_decay", 1), at_least("decay", DECAYED), bad],
                )
            ],
            f"lower {{training.{optimizer}.weight_decay:0.1}}",
            methods=(method,),
            explains=("learning rate too high", *SPOILED),
        )
        for method, optimizer, metric, bad in (
            ("rl", "actor_optimizer", "reward", NOT_LEARNT),
            ("sft", "optimizer", "loss", above("loss.change.difference", 0)),
        )
    ),
    Rule(
        "temperature too high",
        "The sampling temperature is too high",
        f"rollout.temperature is above 1, and the reward is less than {percent(HOT_SHARE)} of that of the evaluation "
        f"before training (3 standard errors) and not negative; or rollout.temperature is at least {HOT:g}",
        MIN_ROWS,
        [
            Case(
                "the reward was {since_evaluation.early.mean:.3g} in the evaluation before training and "
                "{reward.first.mean:.3g} in {reward.first.span}, with samples at temperature {temperature:.3g}",
                [
                    *conditions,
                    at_least("reward.first.mean", 0),
                    below("since_evaluation.errors", -3),
                    below("reward.first.mean", HOT_SHARE, "since_evaluation.early.mean"),
                    below("reward.last.mean", HOT_SHARE, "since_evaluation.early.mean"),
                ],
                rows,
            )
            for conditions, rows in (([at_least("temperature", HOT), MANY], 1), ([above("temperature", 1)], None))
        ]
        + [
            Case(
                "the samples are drawn at temperature {temperature:.3g}, and the reward is "
                "{reward.last.mean:.3g} in {reward.last.span}",
                [at_least("temperature", HOT)],
            ),
        ],
        "lower {rollout.temperature:1}, towards 1 or below",
        [
            LEARNT,
            at_least(
                "reward.start.mean",
                HOT_SHARE,
                "since_evaluation.early.mean",
                f"the reward of the first step, at that temperature, is {percent(HOT_SHARE)} of that before training",
            ),
        ],
        explains=("learning rate too high", *SPOILED),
    ),
    Rule(
        "entropy bonus too large",
        "The entropy bonus is too large",
        f"the entropy has risen to {BONUS_RISE} times that of {FIRST} ({FALL_ERRORS:g} standard errors) under "
        "grpo.entropy_bonus",
        TREND_ROWS,
        [
            Case(
                "the entropy went {entropy.change} with a bonus of {entropy_bonus:.3g}" + AND_REWARD,
                [
                    at_least("entropy.change.ratio", BONUS_RISE),
                    at_least("entropy.change.errors", FALL_ERRORS),
                    differs("entropy_bonus", 0),
                ],
            )
        ],
        "lower {grpo.entropy_bonus:÷10}, or set it to 0",
        [LEARNT],
        explains=("learning rate too high", *SPOILED),
    ),
    Rule(
        "beta too large",
        "The weight of the KL is so large that the policy stays at the reference",
        f"grpo.beta is at least {BETA:g}, and the reward has not risen after {TREND_ROWS} steps or more",
        TREND_ROWS,
        [
            Case(
                "grpo.beta is {beta:.3g}|, the KL {kl.last.mean:.3g} nats per token in {kl.last.span}" + AND_REWARD,
                [at_least("beta", BETA), NOT_LEARNT],
            )
        ],
        "lower {grpo.beta:0.04}",
        [ONE_REWARD],
        explains=("learning rate too high", "learning rate too low", "entropy collapse", "KL runaway"),
    ),
    *(
        Rule(
            "gradient clipped away",
            "The gradient is clipped to nearly nothing",
            f"its norm is at least {CLIPPED_AWAY:,g} times max_grad_norm, that is at most eps (the updates of Adam and "
            f"Muon do not depend on the size of larger gradients), and the {metric} has not improved",
            TREND_ROWS,
            [
                Case(
                    "the norm of the gradient is {grad_norm.whole.mean:.3g} on average, and clipped to "
                    f"{{max_grad_norm:.3g}}|; the {metric} went {{{metric}.change}}",
                    [
                        above("max_grad_norm", 0),
                        at_most("max_grad_norm", 1, "eps"),
                        at_least("grad_norm.whole.mean", CLIPPED_AWAY, "max_grad_norm"),
                        *flat,
                    ],
                )
            ],
            f"raise {{training.{optimizer}.max_grad_norm:1}}",
            methods=(method,),
            explains=("learning rate too low", "learning rate too high", "groups too small"),
        )
        for method, optimizer, metric, flat in (
            ("rl", "actor_optimizer", "reward", [NOT_LEARNT]),
            ("sft", "optimizer", "loss", [at_most("loss.change.size", FLAT_LOSS, "loss.change.early.mean")]),
        )
    ),
)
"""Rules that stand behind those about faults."""

SUPERVISED_RATE = tuple(
    Rule(
        "learning rate too high",
        "The learning rate is too high",
        words,
        TREND_ROWS,
        cases,
        "lower {training.optimizer.learning_rate:÷5}|; then more {training.optimizer.warmup_ratio:>0.1}|; then a "
        "lower {training.optimizer.max_grad_norm:÷3}",
        refuted_by,
        methods=SFT,
        explains=("overfitting", "wrong answers learnt", "learning rate too low"),
    )
    for words, cases, refuted_by in (
        (
            f"over {LAST} the loss is above its lowest level by {percent(LOSS_RISE)} of that, "
            f"{percent(LOSS_RISE / 2)} of the first loss, and {FALL_ERRORS:g} standard errors; or it is "
            f"{LOSS_TWICE:g} times the first loss",
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
            [
                at_most(
                    "held_out_loss.difference",
                    FLAT_LOSS,
                    "held_out_loss.early.size",
                    "the held-out loss is at its lowest",
                )
            ],
        ),
        (
            f"the loss was {LOSS_TWICE:g} times the first loss on the way; or the held-out accuracy is "
            f"{GAIN_ERRORS:g} standard errors below its best, and the loss has not fallen",
            [
                Case(
                    "the loss was {loss.start.mean:.3g} in {loss.start.span} and {loss.peak.mean:.3g} in "
                    "{loss.peak.span}" + AT_RATE,
                    [at_least("loss.peak.mean", LOSS_TWICE, "loss.start.mean"), above("loss.start.mean", 0)],
                ),
                Case(
                    HELD_OUT_LOSS.format(name="accuracy") + AT_RATE,
                    [HELD_OUT_FELL, at_least("loss.change.difference", 0)],
                    rows=0,
                ),
            ],
            [],
        ),
    )
)
"""Rules about a rate of supervised training that is too high. Those about single steps stand before them."""
