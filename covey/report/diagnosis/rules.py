"""The table of rules: what is seen, from which threshold on, and which setting to change.

The order is that of causes: a rule stands before those whose observations it explains, and the first one that is met is
the first finding. docs/diagnosis.md has the same table, written from this one.
"""

from collections.abc import Callable
from typing import NamedTuple

from covey.report.diagnosis import outcome_checks as outcome
from covey.report.diagnosis import policy_checks as policy
from covey.report.diagnosis import signal_checks as signal
from covey.report.diagnosis.finding import NOTE, PROBLEM
from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.levels import FALL_ERRORS, GAIN_ERRORS, MIN_FALL, percent

BOTH, RL, SFT = ("rl", "sft"), ("rl",), ("sft",)
LAST, FIRST = "the last quarter of the steps", "the first quarter"
NO_RISE = "the reward has not risen"


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: short name, as in the heading of the documents.
        title: what was found, as a sentence.
        threshold: from when on it counts, in words.
        check: function from the history of a run to its evidence; "" if the rule is not met.
        fix: setting to change, and how.
        settings: names of the settings in `fix`.
        methods: training methods that it is for.
        explains: names of later rules whose findings are its consequences.
        level: "problem" or "note".
        live: whether it is told while the run trains.
    """

    name: str
    title: str
    threshold: str
    check: Callable[[RunHistory], str]
    fix: str
    settings: tuple[str, ...]
    methods: tuple[str, ...] = RL
    explains: tuple[str, ...] = ()
    level: str = PROBLEM
    live: bool = True


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
        policy.not_finite,
        "lower the optimizer's learning_rate or max_grad_norm; model.dtype float32. The batches are in the folder bad/",
        ("training.actor_optimizer.learning_rate", "model.dtype", "training.actor_optimizer.max_grad_norm"),
        BOTH,
    ),
    Rule(
        "sampler and trainer disagree",
        "The sampler and the trainer disagree about the probability of tokens",
        f"their log-probs differ by at least {policy.DISAGREEMENT} nats per token on average, over {FIRST} and {LAST}",
        policy.disagreement,
        "find the cause first: model.compute_dtype float32, no model.quantize; then grpo.correction token_truncate",
        ("model.compute_dtype", "model.quantize", "grpo.correction"),
        explains=("learning rate too high", "KL runaway", "entropy collapse", "updates beyond the clip range"),
    ),
    Rule(
        "no completion scored",
        "No completion was scored",
        f"the reward is missing in every step, {signal.MIN_ROWS} or more",
        signal.not_scored,
        "rewards: see why the functions return None for every completion",
        ("rewards",),
        explains=("answers cut off", "samples too similar"),
    ),
    Rule(
        "constant reward",
        "The reward is the same for every completion, so nothing is learnt",
        f"every completion of every step has one reward that is not 0, over {signal.MIN_ROWS} steps or more",
        signal.constant_reward,
        "rewards: see in samples.jsonl whether the completions deserve the same reward. If not, correct the "
        "function; if so, use easier or harder prompts (data)",
        ("rewards", "data.path"),
        explains=("samples too similar", "groups too small", "entropy collapse", "learning rate too low"),
    ),
    Rule(
        "temperature too high",
        "The sampling temperature is too high",
        f"rollout.temperature is above 1, {NO_RISE}, and it is less than {percent(signal.HOT_SHARE)} of the reward of "
        f"the evaluation before training (3 standard errors); or rollout.temperature is at least {signal.HOT:g} and "
        f"{NO_RISE}",
        signal.too_hot,
        "lower rollout.temperature, towards 1 or below",
        ("rollout.temperature",),
        explains=("learning rate too high", *SPOILED),
    ),
    Rule(
        "entropy bonus too large",
        "The entropy bonus is too large",
        f"the entropy has risen to {policy.BONUS_RISE} times that of {FIRST} ({FALL_ERRORS:g} standard errors) under "
        f"grpo.entropy_bonus, and {NO_RISE}",
        policy.bonus_too_large,
        "lower grpo.entropy_bonus, or set it to 0",
        ("grpo.entropy_bonus",),
        explains=("learning rate too high", *SPOILED),
    ),
    Rule(
        "samples too similar",
        "The completions of a group are too similar",
        f"groups have at most {signal.FEW_DISTINCT} different completions on average, in the first step, {FIRST} and "
        f"{LAST}; fewer than {percent(signal.MOST_CUT)} of the completions of the first step are cut off; and "
        f"{NO_RISE}",
        signal.too_similar,
        "raise rollout.temperature; loosen rollout.top_k, rollout.top_p and rollout.min_p",
        ("rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p"),
        explains=("learning rate too high", "groups too small", "entropy collapse", "learning rate too low"),
    ),
    Rule(
        "learning rate too high",
        "The learning rate is too high",
        f"over {LAST} the reward is lower than at its best by {FALL_ERRORS:g} standard errors and {percent(MIN_FALL)} "
        f"of the spread of single completions; or {NO_RISE} and two of these jumped, the entropy among them: "
        f"completions cut off by {percent(policy.JUMP)}, mean length by a factor of {policy.LENGTH_JUMP}, entropy to "
        f"{policy.ENTROPY_LOW} or {policy.ENTROPY_HIGH:g} times its first value, KL to {policy.KL_HIGH:g} nat per "
        f"token, gradient norm to {policy.SPIKE:g} times its first value",
        policy.rate_too_high,
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
        f"over {LAST} the loss is above its lowest level by {percent(policy.LOSS_RISE)} of that, "
        f"{percent(policy.LOSS_RISE / 2)} of the first loss, and {FALL_ERRORS:g} standard errors; or it is "
        f"{policy.LOSS_TWICE:g} times the first loss",
        policy.rate_too_high_for_loss,
        "lower training.optimizer.learning_rate by a factor of 3 to 10; then more training.optimizer.warmup_ratio, a "
        "lower training.optimizer.max_grad_norm",
        (
            "training.optimizer.learning_rate",
            "training.optimizer.warmup_ratio",
            "training.optimizer.max_grad_norm",
        ),
        SFT,
        explains=("overfitting", "learning rate too low"),
    ),
    Rule(
        "KL runaway",
        "The policy runs away from the reference",
        f"over {LAST} the KL is at least {policy.KL_HIGH:g} nat per token and {policy.KL_GROWTH:g} times that of the "
        f"middle of the run, or at least {policy.KL_FAR:g} nats per token",
        policy.kl_runaway,
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
        f"over {LAST} at least {percent(signal.MOST_CUT)} of the completions are cut by a limit of tokens or time, at "
        f"least 70 % of the share of {FIRST}, and {NO_RISE}; or {percent(signal.NEARLY_ALL_CUT)} in both",
        signal.answers_cut,
        "raise rollout.max_new_tokens (or envs.max_turn_tokens or envs.timeout, if that cuts them); or ask for "
        "shorter answers, with grpo.overlong_buffer; grpo.mask_truncated leaves cut completions out of the loss",
        ("rollout.max_new_tokens", "grpo.overlong_buffer", "grpo.mask_truncated"),
        explains=("reward never reached", "groups too small", "length without reward", "learning rate too low"),
    ),
    Rule(
        "reward never reached",
        "The reward was never reached",
        f"every completion has the reward 0, apart from a penalty by grpo.overlong_buffer, over {signal.MIN_ROWS} "
        f"steps and {signal.MIN_UNREWARDED} completions or more",
        signal.never_rewarded,
        "easier prompts (data), or a reward with steps on the way (rewards); more samples (grpo.num_generations); or "
        "supervised training first",
        ("data.path", "rewards", "grpo.num_generations"),
        explains=("groups too small", "entropy collapse", "learning rate too low", "part of the reward never reached"),
    ),
    Rule(
        "entropy collapse",
        "The entropy has collapsed",
        f"over {LAST} the entropy is at most {percent(policy.COLLAPSED)} of that of {FIRST}, "
        f"{percent(signal.MOST_TIED)} of the groups have equal rewards, and groups differ by {percent(policy.STUCK)} "
        "of the spread of completions or more",
        policy.entropy_collapse,
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
        f"at least {percent(signal.MOST_TIED)} of the groups have equal rewards, over {LAST} and over the whole run, "
        f"and {NO_RISE}; {percent(signal.MOST_TIED_SMALL)} for groups of at most {signal.SMALL}, after "
        f"{signal.LONG_ROWS} steps",
        signal.too_few_signals,
        "raise grpo.num_generations; replace such groups with grpo.max_sampling_rounds; easier prompts (data); a "
        "reward with more steps (rewards)",
        ("grpo.num_generations", "grpo.max_sampling_rounds", "data.path", "rewards"),
    ),
    Rule(
        "possible reward hacking",
        "One part of the reward climbs while another falls (possible reward hacking)",
        f"one reward function has risen by {GAIN_ERRORS:g} standard errors and another has fallen by {FALL_ERRORS:g}, "
        f"both by {percent(MIN_FALL)} of their spread over completions",
        outcome.hacked_parts,
        "read the samples; then correct the rewards, or their grpo.reward_weights; a higher grpo.beta",
        ("rewards", "grpo.reward_weights", "grpo.beta"),
        explains=("length without reward", "overfitting"),
    ),
    Rule(
        "possible reward hacking",
        "The reward climbs while the held-out accuracy falls (possible reward hacking)",
        f"the held-out accuracy is {outcome.EVAL_ERRORS:g} standard errors below its best, and the reward has risen, "
        "in training and on held-out prompts",
        outcome.hacked_reward,
        "read the samples; then correct the rewards, so that they ask for what evaluation.accuracy measures",
        ("rewards", "evaluation.accuracy"),
    ),
    Rule(
        "overfitting",
        "Held-out results fall while training rewards rise (overfitting)",
        f"the held-out accuracy is {outcome.EVAL_ERRORS:g} standard errors below its best, and the training reward "
        "has risen",
        outcome.overfitting,
        "more or other prompts (data); fewer training.max_steps; training.keep_best eval/accuracy; a higher grpo.beta",
        ("data.path", "training.max_steps", "training.keep_best", "grpo.beta"),
    ),
    Rule(
        "overfitting",
        "The held-out loss rises while the training loss falls (overfitting)",
        f"the last held-out loss is above the lowest by {percent(outcome.EVAL_LOSS_RISE)} and "
        f"{outcome.EVAL_LOSS_NATS} nats, and the training loss has fallen since",
        outcome.overfitting_of_loss,
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
        f"the mean length is {policy.LENGTH_JUMP} times that of {FIRST} ({FALL_ERRORS:g} standard errors), and "
        f"{NO_RISE}",
        policy.longer_for_nothing,
        "grpo.algorithm dr_grpo, or grpo.aggregate constant, which do not favour long answers; grpo.overlong_buffer",
        ("grpo.algorithm", "grpo.aggregate", "grpo.overlong_buffer"),
    ),
    Rule(
        "updates beyond the clip range",
        "Many tokens are clipped",
        f"over {LAST} at least {percent(policy.CLIPPED)} of the tokens are clipped, for ratios of single tokens",
        policy.beyond_the_clip,
        "lower training.actor_optimizer.learning_rate; fewer grpo.num_iterations; or grpo.algorithm cispo or sapo, "
        "which do not set gradients to 0",
        ("training.actor_optimizer.learning_rate", "grpo.num_iterations", "grpo.algorithm"),
    ),
    Rule(
        "learning rate too low",
        "The learning rate is too low",
        f"after {signal.LONG_ROWS} steps or more neither the reward nor, by {percent(policy.STILL)}, entropy and "
        f"length have changed, although groups have a signal; the reward is known to {percent(policy.POWER)} of the "
        "spread of completions",
        policy.rate_too_low,
        "raise training.actor_optimizer.learning_rate by a factor of 3 to 10; lower grpo.beta if it is above 0.1",
        ("training.actor_optimizer.learning_rate", "grpo.beta"),
        live=False,
    ),
    Rule(
        "learning rate too low",
        "The learning rate is too low",
        f"after {signal.LONG_ROWS} steps or more the loss has changed by less than {percent(policy.FLAT_LOSS)}",
        policy.rate_too_low_for_loss,
        "raise training.optimizer.learning_rate by a factor of 3 to 10",
        ("training.optimizer.learning_rate",),
        SFT,
        live=False,
    ),
    Rule(
        "critic predicts nothing",
        "The critic predicts nothing",
        f"over {LAST} the explained variance is 0 or less, after {signal.LONG_ROWS} steps or more, and {NO_RISE}",
        policy.critic_predicts_nothing,
        "raise training.critic_optimizer.learning_rate; more training.prompts_per_step",
        ("training.critic_optimizer.learning_rate", "training.prompts_per_step"),
        level=NOTE,
        live=False,
    ),
    Rule(
        "prompts too easy",
        "The prompts are too easy",
        f"at least {percent(signal.MOST_TIED)} of the groups have equal rewards, {NO_RISE}, and it is {signal.EASY:g} "
        "times the spread of completions (of rewards 0 and 1, 80 % are 1)",
        signal.too_easy,
        "harder prompts (data); grpo.max_sampling_rounds replaces groups that are all right",
        ("data.path", "grpo.max_sampling_rounds"),
        level=NOTE,
    ),
    Rule(
        "part of the reward never reached",
        "One part of the reward was never reached",
        f"a reward function gives 0 to every completion, over {signal.MIN_ROWS} steps or more, while others vary",
        signal.part_never_rewarded,
        "rewards: if it is a penalty, all is well; if not, easier prompts or a part with steps on the way",
        ("rewards",),
        level=NOTE,
        live=False,
    ),
    Rule(
        "probability removed by truncation",
        "Truncation removes much of what the policy would sample",
        f"over {LAST} at most {percent(signal.LEAST_KEPT)} of the probability is kept by top-k, top-p and min-p",
        signal.much_removed,
        "loosen rollout.top_k, rollout.top_p and rollout.min_p, or accept that training is that much off-policy",
        ("rollout.top_k", "rollout.top_p", "rollout.min_p"),
        level=NOTE,
        live=False,
    ),
)
"""All rules; causes before what they explain."""
