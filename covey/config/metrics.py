"""Table of metrics: name, unit and meaning of every value that a run logs per step.

Recipes are checked against the table, the progress line formats each number by its unit, and docs/metrics.md has the
same rows. A metric has the same name on the screen, in `metrics.jsonl` and in trackers. This module does not import
JAX.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from covey.config.base import Problem
from covey.errors import nearest

RL, SFT = "rl", "sft"
BOTH = (RL, SFT)


class Metric(NamedTuple):
    """One row of the table.

    Attributes:
        name: name in the logs; `<function>` stands for a reward function's name, `<k>` for a number, `<name>` for that
            of an environment's own number.
        unit: unit of the value; "share" is a number from 0 to 1, "" a number without a unit.
        meaning: short description.
        methods: training methods that log the metric.
        lower_is_better: whether the best checkpoint is the one with the lowest value.
        clock: whether the value follows the clock, so that it differs between runs that are otherwise equal.
    """

    name: str
    unit: str
    meaning: str
    methods: tuple[str, ...] = (RL,)
    lower_is_better: bool = False
    clock: bool = False


def metric(name: str) -> Metric | None:
    """Return the row of the metric `name`; None if there is no such metric.

    >>> metric("rewards/sentence/mean").unit
    'reward'
    """
    return _EXACT.get(name) or next((row for pattern, row in _PATTERNS if pattern.fullmatch(name)), None)


def is_logged(name: str, method: str, functions: Iterable[str]) -> bool:
    """Return whether a run by `method` with these reward functions may log `name`.

    Args:
        functions: names as in recipes. The own name of a function `module:name` is not known before it is imported.
    """
    row, functions = metric(name), list(functions)
    if row is None or method not in row.methods:
        return False
    unknown = any(":" in function for function in functions)
    named = next(pattern.fullmatch(name) for pattern, other in _PATTERNS if other is row) if "<" in row.name else None
    return named is None or unknown or {*named.groups()} <= {*functions}


def names(method: str, functions: Iterable[str]) -> Iterator[str]:
    """Yield the names of all metrics of `method`, as candidates for the nearest name."""
    functions = [function.rpartition(":")[2] for function in functions]
    for row in TABLE:
        if method in row.methods:
            yield from (row.name.replace(FUNCTION, name) for name in functions) if FUNCTION in row.name else [row.name]


def unlogged(
    show: Iterable[str], keep_best: str, method: str, functions: Iterable[str] | None = None
) -> Iterator[Problem]:
    """Yield a problem for each metric of the settings `show` and `keep_best` that a run by `method` never logs.

    Args:
        functions: names of its reward functions; if None, any are possible.
    """
    choices = list(names(method, functions or ()))
    settings = [*(("show", name) for name in show), *([("keep_best", keep_best)] if keep_best else [])]
    for setting, name in settings:
        row, logged = metric(name), is_logged(name, method, (":",) if functions is None else functions)
        if logged and row and NAME in row.name and setting == "keep_best":
            what = f"training.keep_best names {name!r}, which is no metric that every step has for sure"
            yield Problem(setting, what, "a metric that does not depend on Step.info, such as reward")
        elif not logged:
            command = "covey train" if method == RL else "covey sft"
            what = f"training.{setting} names {name!r}, which is no metric of {command}"
            yield Problem(
                setting,
                what,
                " or ".join(other for other in choices if other.endswith(f"/{name}")) or nearest(name, choices),
            )


OVERLONG = "overlong-penalty"
"""Name of the length penalty among the rewards; no reward function has a name with a hyphen."""
FUNCTION, NUMBER, NAME = "<function>", "<k>", "<name>"
OWN_NUMBER = "[a-z][a-z0-9_]*"
"""Pattern of the name of an environment's own number."""
TABLE = (
    Metric("step", "updates", "optimizer updates made so far", BOTH),
    Metric("epoch", "epochs", "passes over the training examples so far", (SFT,)),
    Metric("reward", "reward", "mean over samples of the weighted sum of the reward functions"),
    Metric("reward_error", "reward", "standard error of `reward`, from the spread of the groups' means"),
    Metric("reward_std", "reward", "mean over groups of the standard deviation within a group (ddof 1)"),
    Metric("frac_reward_zero_std", "share", "groups whose samples all have the same reward: they give no gradient"),
    Metric("frac_reward_all_best", "share", "groups whose samples all have the highest reward of the step"),
    Metric("frac_reward_all_worst", "share", "groups whose samples all have the lowest reward of the step"),
    Metric("reward_noise", "share", "variance of rewards among completions of equal tokens, of that within groups"),
    Metric("reward_correlation/length", "", "correlation of reward and characters of a completion, within groups"),
    Metric("reward_correlation/empty", "", "correlation of reward and whether a completion is empty, within groups"),
    Metric("reward_correlation/repetition", "", "correlation of reward and repetition in a completion, within groups"),
    Metric("rewards/<function>/correlation/<function>", "", "correlation of two reward functions, within groups"),
    Metric("rewards/<function>/mean", "reward", "mean of one reward function over the samples that it scored"),
    Metric("rewards/<function>/std", "reward", "standard deviation of one reward function over these samples (ddof 1)"),
    Metric(
        "rewards/<function>/failed", "samples", "samples for which it failed, if `reward_safety` lets the run continue"
    ),
    Metric(f"rewards/{OVERLONG}/mean", "reward", "mean penalty by `grpo.overlong_buffer`; 0 or less"),
    Metric(f"rewards/{OVERLONG}/std", "reward", "standard deviation of this penalty over the samples (ddof 1)"),
    Metric("completions/mean_length", "tokens", "mean length of a completion"),
    Metric("completions/min_length", "tokens", "length of the shortest completion"),
    Metric("completions/max_length", "tokens", "length of the longest completion"),
    Metric(
        "completions/clipped_ratio",
        "share",
        "completions cut by a limit of tokens, of the turn too, or `envs.timeout`",
    ),
    Metric("completions/distinct_ratio", "share", "different completions of a group, mean over groups"),
    Metric("completions/empty_ratio", "share", "completions without text"),
    Metric(
        "completions/rewarded_empty_ratio",
        "share",
        "completions without text among those with a reward above their group's mean",
    ),
    Metric(
        "completions/repetition",
        "share",
        "sequences of four tokens that occurred earlier in the completion, mean over completions",
    ),
    Metric("completions/scored_ratio", "share", "completions that a reward function scored"),
    Metric("env/turns", "turns", "mean number of the model's turns in an episode; with an environment"),
    Metric("env/branches", "branches", "mean number of branches in an episode, with `envs.history: template`"),
    Metric("env/tokens", "tokens", "mean number of tokens of the environment in an episode"),
    Metric("env/done", "share", "episodes that the environment ended, before a limit did"),
    Metric("env/seconds", "s", "mean seconds of an episode in the environment", clock=True),
    Metric("env/failed", "episodes", "episodes in which it failed, if `envs.on_error` lets the run continue"),
    Metric("env/dropped", "episodes", "episodes without another of their prompt; with `envs.different_prompts: group`"),
    Metric("env/tool_calls", "calls", "mean number of tool calls in an episode"),
    Metric("env/tool_failures", "calls", "mean number of those that failed or could not be executed"),
    Metric("env/<name>", "", "mean of the last number `name` in `Step.info`, over the episodes that have one"),
    Metric(
        "loss",
        "",
        "minimised value; in RL with one update per batch near 0 by construction",
        BOTH,
        lower_is_better=True,
    ),
    Metric("perplexity", "", "exp of `loss`", (SFT,), lower_is_better=True),
    Metric("grad_norm", "", "norm of the gradient before it is clipped", BOTH),
    Metric("entropy", "nats", "mean entropy of the distributions that the tokens of the loss were drawn from", BOTH),
    Metric(
        "kl",
        "nats",
        "mean KL to the reference per token, by the estimator `grpo.kl`; if β is above 0",
        lower_is_better=True,
    ),
    Metric("beta", "", "weight of the KL; if `grpo.kl_target` adapts it"),
    Metric("clip_ratio/low_mean", "share", "tokens whose ratio was clipped from below (their advantage is negative)"),
    Metric("clip_ratio/high_mean", "share", "tokens whose ratio was clipped from above (it is positive)"),
    Metric("clip_ratio/region_mean", "share", "tokens that were clipped in any way"),
    Metric(
        "sampling/token_agreement",
        "share",
        "drawn tokens that the trainer's logits would have drawn too, with the same noise",
    ),
    Metric("sampling/logp_difference/mean", "nats", "mean distance of the trainer's log-probs from the sampler's"),
    Metric("sampling/logp_difference/max", "nats", "the largest of these distances"),
    Metric("sampling/importance_ratio/mean", "", "mean ratio of the trainer's probability to the sampler's"),
    Metric("sampling/importance_ratio/min", "", "the smallest of these ratios"),
    Metric("sampling/importance_ratio/max", "", "the largest of these ratios"),
    Metric(
        "sampling/staleness",
        "updates",
        "age of the weights that drew the samples, one for all of a step; if `training.off_policy_steps` is set",
    ),
    Metric("sampling/mass_kept", "share", "mean total probability of the tokens that truncation keeps"),
    Metric("sampling/correction/mean", "", "mean weight of `grpo.correction`; if it is set"),
    Metric("sampling/correction/masked", "share", "tokens that `grpo.correction` leaves out; if it is set"),
    Metric(
        "sampling/correction/effective",
        "share",
        "effective sample size of these weights over the tokens of an update, (Σw)² / (n·Σw²): 1 if all are equal",
    ),
    Metric("dynamic_sampling/rounds", "rounds", "prompt batches sampled; if `grpo.max_sampling_rounds` is above 1"),
    Metric("dynamic_sampling/replaced", "groups", "groups of equal rewards that were replaced"),
    Metric("dynamic_sampling/tied", "groups", "groups of equal rewards that were left when the rounds were used up"),
    Metric("critic/loss", "", "loss of the critic; only ppo has a critic", lower_is_better=True),
    Metric("critic/grad_norm", "", "norm of the critic's gradient before it is clipped"),
    Metric(
        "critic/value_loss",
        "",
        "half the mean squared error of the critic's values per token, clipped",
        lower_is_better=True,
    ),
    Metric("critic/value_mean", "reward", "mean of the critic's values"),
    Metric("critic/value_clip_ratio", "share", "tokens whose value was clipped"),
    Metric("critic/explained_variance", "", "1 − Var(return − value) / Var(return): 1 is a perfect prediction, 0 none"),
    Metric("learning_rate", "", "learning rate of this update, by the schedule", BOTH),
    Metric(
        "skipped",
        "share",
        "updates skipped because they were not finite; if `training.skip_nonfinite` allows it",
        BOTH,
    ),
    Metric("num_tokens", "tokens", "tokens of prompts and completions in the step", BOTH),
    Metric("loss_tokens", "tokens", "tokens that carry loss", (SFT,)),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "sampled tokens per second; in supervised training all tokens",
        BOTH,
        clock=True,
    ),
    Metric("step_time", "s", "seconds of the whole step", BOTH, clock=True),
    Metric("time/rollout", "s", "seconds of sampling; phases may overlap", clock=True),
    Metric("time/reward", "s", "seconds of the reward functions", clock=True),
    Metric("time/logps", "s", "seconds of log-probs and values", clock=True),
    Metric("time/update", "s", "seconds of the updates", clock=True),
    Metric(
        "time/sync", "s", "seconds until the rollout, or the thread that samples ahead, had the new weights", clock=True
    ),
    Metric(
        "time/wait",
        "s",
        "seconds for which training waited for samples; if `training.off_policy_steps` is set",
        clock=True,
    ),
    Metric(
        "time/rollout_wait",
        "s",
        "seconds for which the thread that samples ahead had waited for weights before it sampled this step",
        clock=True,
    ),
    Metric(
        "time/reward_wait",
        "s",
        "seconds for which the thread that scores ahead had waited for the samples of this step",
        clock=True,
    ),
    Metric("time/compile", "s", "seconds of tracing and compiling, within the phases of the step", BOTH, clock=True),
    Metric("waste/rollout", "share", "decoded positions that belong to no completion"),
    Metric("waste/slots", "share", "the slots' time in the rollout without a token of a completion", clock=True),
    Metric("waste/rows", "share", "positions of the rows that were padding", BOTH),
    Metric(
        "eval/loss", "", "loss on held-out examples; every `training.eval_every_n_steps`", (SFT,), lower_is_better=True
    ),
    Metric("eval/perplexity", "", "exp of `eval/loss`", (SFT,), lower_is_better=True),
    Metric("eval/accuracy", "share", "judged held-out completions for which `evaluation.accuracy` returns 1 or more"),
    Metric("eval/partial_accuracy", "share", "the same by `evaluation.partial`"),
    Metric("eval/format_accuracy", "share", "the same by `evaluation.format`"),
    Metric("eval/error", "share", "standard error of `eval/accuracy`, from the spread over prompts"),
    Metric("eval/pass@<k>", "share", "probability that at least one of k completions is right, unbiased estimate"),
    Metric("eval/pass@<k>_any", "share", "prompts with a right one among their first k completions"),
    Metric("eval/reward", "reward", "mean reward of the held-out completions"),
    Metric("eval/samples", "samples", "number of held-out completions"),
    Metric("eval/judged", "samples", "those that `evaluation.accuracy` judged (no None); where they are not all"),
    Metric("eval/partial_judged", "samples", "the same by `evaluation.partial`"),
    Metric("eval/format_judged", "samples", "the same by `evaluation.format`"),
    Metric("eval/reward_judged", "samples", "the same by the reward functions"),
    Metric("eval/mean_length", "tokens", "mean length of the held-out completions"),
    Metric("eval/clipped_ratio", "share", "held-out completions that were cut in this way"),
)
"""All metrics, in the order of docs/metrics.md."""

CLOCKS = tuple(row.name for row in TABLE if row.clock)
"""Names of the metrics that follow the clock."""

_EXACT = {row.name: row for row in TABLE if "<" not in row.name}
_PATTERNS = [
    (re.compile(row.name.replace(FUNCTION, "([^/]+)").replace(NUMBER, "[1-9][0-9]*").replace(NAME, OWN_NUMBER)), row)
    for row in TABLE
    if "<" in row.name
]
