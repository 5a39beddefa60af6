"""Rules about held-out results that do not follow those of training."""

from covey_report.diagnosis.conditions import (
    EVAL_LOSS_NATS,
    EVAL_LOSS_RISE,
    FEW_CUT,
    FLAT_LOSS,
    FOLLOWS,
    HELD_OUT,
    HELD_OUT_FELL,
    HELD_OUT_LOSS,
    HELD_OUT_REWARD_ROSE,
    LONG_ROWS,
    LOSS_RISE,
    MIN_ANSWERS,
    NEARLY_ALL_CUT,
    READ_SAMPLES,
    ROSE,
    SFT,
    TREND_ROWS,
    UNLIKE,
)
from covey_report.diagnosis.features import (
    GAIN_ERRORS,
    MIN_FALL,
)
from covey_report.diagnosis.rule import Case, Rule, at_least, at_most, below, percent

HELD_OUT_RULES = (
    *(
        Rule(
            "possible reward hacking",
            f"The reward climbs while the held-out {name} falls (possible reward hacking)",
            f"the held-out {name} is {GAIN_ERRORS:g} standard errors below its best, and the reward has risen, in "
            "training and on held-out prompts",
            0,
            [
                Case(
                    HELD_OUT.format(name=name),
                    [ROSE, below(f"held_out_{name}.errors", -GAIN_ERRORS), HELD_OUT_REWARD_ROSE],
                )
            ],
            f"read the samples; then correct {{rewards}}, so that they ask for what {{evaluation.{name}}} measures",
        )
        for name in ("accuracy", "format")
    ),
    Rule(
        "possible reward hacking",
        "The reward climbs and the held-out accuracy does not (possible reward hacking)",
        f"the reward has risen by {percent(MIN_FALL)} of the spread of single completions, on held-out prompts too, "
        f"and the held-out accuracy, below {percent(NEARLY_ALL_CUT)}, has not risen at all",
        TREND_ROWS,
        [
            Case(
                "the mean reward went {reward.change}, the held-out accuracy {held_out_gain:share}",
                [
                    ROSE,
                    at_least("reward.change.difference", MIN_FALL, "reward.spread"),
                    HELD_OUT_REWARD_ROSE,
                    at_most("held_out_gain.difference", 0),
                    below("held_out_gain.late.mean", NEARLY_ALL_CUT),
                ],
            )
        ],
        f"{READ_SAMPLES}; then correct {{rewards}}, so that they ask for what {{evaluation.accuracy}} measures",
    ),
    Rule(
        "overfitting",
        "Held-out results fall while training rewards rise (overfitting)",
        f"the held-out accuracy is {GAIN_ERRORS:g} standard errors below its best, and the training reward has risen",
        0,
        [Case(HELD_OUT.format(name="accuracy"), [ROSE, HELD_OUT_FELL])],
        "more or other prompts ({data.path}); fewer {training.max_steps}; {training.keep_best:eval/accuracy}; a higher "
        "{grpo.beta:0.04}",
        [HELD_OUT_REWARD_ROSE],
    ),
    Rule(
        "overfitting",
        "The held-out loss rises while the training loss falls (overfitting)",
        f"the last held-out loss is above the lowest by {percent(EVAL_LOSS_RISE)} and "
        f"{EVAL_LOSS_NATS} nats, and the training loss has fallen since",
        0,
        [
            Case(
                "the held-out loss was {held_out_loss.early.mean:.3g} after step {held_out_loss.early.first} and is "
                "{held_out_loss.late.mean:.3g} after step {held_out_loss.late.first}, while the training loss went "
                "from {loss_since_best.early.mean:.3g} to {loss_since_best.late.mean:.3g}",
                [
                    at_least("held_out_loss_rise.difference", EVAL_LOSS_NATS),
                    at_least("held_out_loss_rise.difference", EVAL_LOSS_RISE, "held_out_loss.early.mean"),
                    at_least("held_out_loss_rise.difference", EVAL_LOSS_RISE, "held_out_loss_gain.difference"),
                    below("loss.change.difference", 0),
                    below("loss_since_best.difference", 0),
                ],
            )
        ],
        "fewer {training.max_steps} or {training.num_epochs}; {training.keep_best:eval/loss}; more examples "
        "({data.path}); a lower {training.optimizer.learning_rate:÷3}, more {training.optimizer.weight_decay:0.1}",
        methods=SFT,
    ),
    Rule(
        "wrong answers learnt",
        "The held-out answers get worse while the loss falls",
        f"the held-out accuracy is {GAIN_ERRORS:g} standard errors below its best, and the training loss has fallen",
        0,
        [Case(HELD_OUT_LOSS.format(name="accuracy"), [HELD_OUT_FELL, below("loss.change.difference", 0)])],
        "compare the answers of {data.path} with what {evaluation.accuracy} asks for; then a lower "
        "{training.optimizer.learning_rate:÷5}, fewer {training.max_steps}",
        methods=SFT,
    ),
    Rule(
        "wrong answers learnt",
        "The loss has stopped falling, and hardly a held-out answer is right",
        f"of {MIN_ANSWERS} answers or more at most {percent(FEW_CUT)} are right at the end, and the loss has changed "
        f"by less than {percent(FLAT_LOSS)} since the middle of the run, {percent(LOSS_RISE)} or more below the first",
        LONG_ROWS,
        [
            Case(
                "{held_out_accuracy.late.mean:share} of the held-out answers are right; the loss went "
                "{loss.since_middle}",
                [
                    at_most("held_out_accuracy.late.mean", FEW_CUT),
                    at_least("answers", MIN_ANSWERS),
                    at_most("loss.since_middle.size", FLAT_LOSS, "loss.since_middle.early.mean"),
                    below("loss.last.mean", 1 - LOSS_RISE, "loss.start.mean"),
                ],
            )
        ],
        "compare the answers of {data.path} with their prompts, and with what {evaluation.accuracy} asks for",
        methods=SFT,
        live=False,
    ),
    Rule(
        "held-out rows of another kind",
        "The reward does not rise on held-out rows: they are of another kind, or training rows are few",
        f"the reward of training has risen by {percent(MIN_FALL)} of the spread of single completions or more, and "
        f"that of held-out rows by less than {percent(FOLLOWS)} of it, to at most {percent(UNLIKE)} of it",
        TREND_ROWS,
        [
            Case(
                "the reward of training went {reward.change}, that of held-out rows {held_out_reward}",
                [
                    ROSE,
                    at_least("reward.change.difference", MIN_FALL, "reward.spread"),
                    at_most("held_out_reward.difference", FOLLOWS, "reward.change.difference"),
                    at_most("held_out_reward.late.mean", UNLIKE, "reward.last.mean"),
                ],
            )
        ],
        "compare held-out with training rows (`covey data RECIPE` shows them): {data.test_path}; or more "
        "rows: {data.path}",
    ),
)
"""Rules that stand behind those about single steps, and before those about lengths and rates."""
