"""Table of metrics: name, unit and meaning of every value that a run logs per step.

Recipes are checked against the table, the progress line formats each number by its unit, and docs/metrics.md has the
same rows. A metric has the same name on the screen, in `metrics.jsonl` and in trackers. This module does not import
JAX.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

RL, SFT = "rl", "sft"
BOTH = (RL, SFT)


class Metric(NamedTuple):
    """One row of the table.

    Attributes:
        name: name in the logs; `<function>` stands for a reward function's name, `<k>` for a number.
        unit: unit of the value; "share" is a number from 0 to 1, "" a number without a unit.
        meaning: short description.
        methods: training methods that log the metric.
        lower_is_better: whether the best checkpoint is the one with the lowest value.
    """

    name: str
    unit: str
    meaning: str
    methods: tuple[str, ...] = (RL,)
    lower_is_better: bool = False


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
    return FUNCTION not in row.name or unknown or name in {row.name.replace(FUNCTION, one) for one in functions}


def names(method: str, functions: Iterable[str]) -> Iterator[str]:
    """Yield the names of all metrics of `method`, as candidates for the nearest name."""
    functions = [function.rpartition(":")[2] for function in functions]
    for row in TABLE:
        if method in row.methods:
            yield from (row.name.replace(FUNCTION, one) for one in functions) if FUNCTION in row.name else [row.name]


FUNCTION, NUMBER = "<function>", "<k>"
TABLE = (
    Metric("step", "updates", "optimizer updates made so far", BOTH),
    Metric("epoch", "epochs", "passes over the training examples so far", (SFT,)),
    Metric("reward", "reward", "mean over samples of the weighted sum of the reward functions"),
    Metric("reward_error", "reward", "standard error of `reward`, from the spread of the groups' means"),
    Metric("reward_std", "reward", "mean over groups of the standard deviation within a group (ddof 1)"),
    Metric("frac_reward_zero_std", "share", "groups whose samples all have one reward: nothing is learnt from them"),
    Metric("rewards/<function>/mean", "reward", "mean of one reward function over the samples that it scored"),
    Metric("rewards/<function>/std", "reward", "its standard deviation over these samples (ddof 1)"),
    Metric("rewards/<function>/failed", "samples", "samples at which it failed, where `reward_safety` goes on"),
    Metric("rewards/overlong/mean", "reward", "mean of what `grpo.overlong_buffer` takes off; 0 or less"),
    Metric("rewards/overlong/std", "reward", "its standard deviation over the samples (ddof 1)"),
    Metric("completions/mean_length", "tokens", "mean length of a completion"),
    Metric("completions/min_length", "tokens", "length of the shortest"),
    Metric("completions/max_length", "tokens", "length of the longest"),
    Metric("completions/clipped_ratio", "share", "completions that were cut at `rollout.max_new_tokens`"),
    Metric(
        "loss",
        "",
        "what was minimised; with one update a batch it is near 0 in RL by construction",
        BOTH,
        lower_is_better=True,
    ),
    Metric("perplexity", "", "exp of `loss`", (SFT,), lower_is_better=True),
    Metric("grad_norm", "", "norm of the gradient before it is clipped", BOTH),
    Metric("entropy", "nats", "mean entropy of the distributions that the tokens of the loss were drawn from", BOTH),
    Metric(
        "kl",
        "nats",
        "mean KL to the reference a token, by the estimator `grpo.kl`; where β is above 0",
        lower_is_better=True,
    ),
    Metric("beta", "", "weight of the KL; where `grpo.kl_target` adapts it"),
    Metric("clip_ratio/low_mean", "share", "tokens whose ratio was clipped from below (their advantage is negative)"),
    Metric("clip_ratio/high_mean", "share", "tokens whose ratio was clipped from above (it is positive)"),
    Metric("clip_ratio/region_mean", "share", "tokens that were clipped in any way"),
    Metric("sampling/logp_difference/mean", "nats", "mean distance of the trainer's log-probs from the sampler's"),
    Metric("sampling/logp_difference/max", "nats", "the largest of these distances"),
    Metric("sampling/importance_ratio/mean", "", "mean of the trainer's probability by the sampler's"),
    Metric("sampling/importance_ratio/min", "", "the smallest of these ratios"),
    Metric("sampling/importance_ratio/max", "", "the largest of them"),
    Metric("sampling/mass_kept", "share", "mean probability of what top-k and top-p left to draw from"),
    Metric("sampling/correction/mean", "", "mean weight by `grpo.correction`; where it is set"),
    Metric("dynamic_sampling/rounds", "rounds", "prompt batches sampled; where `grpo.max_sampling_rounds` is above 1"),
    Metric("dynamic_sampling/replaced", "groups", "groups of equal rewards that were replaced"),
    Metric("dynamic_sampling/tied", "groups", "groups of equal rewards that were left when the rounds were used up"),
    Metric("critic/loss", "", "what the critic minimised; ppo alone has a critic", lower_is_better=True),
    Metric("critic/grad_norm", "", "norm of the critic's gradient before it is clipped"),
    Metric("critic/value_loss", "", "mean squared error of its values a token, halved and clipped"),
    Metric("critic/value_mean", "reward", "mean of its values"),
    Metric("critic/value_clip_ratio", "share", "tokens whose value was clipped"),
    Metric("critic/explained_variance", "", "1 − Var(return − value) / Var(return): 1 is foretold, 0 is not"),
    Metric("learning_rate", "", "peak by schedule, of this update", BOTH),
    Metric(
        "skipped",
        "share",
        "updates left out because they were not finite; where `training.skip_nonfinite` allows",
        BOTH,
    ),
    Metric("num_tokens", "tokens", "tokens of prompts and completions in the step", BOTH),
    Metric("loss_tokens", "tokens", "tokens that carry loss", (SFT,)),
    Metric("tokens_per_second", "tokens/s", "sampled tokens by `step_time`; in supervised training all tokens", BOTH),
    Metric("step_time", "s", "seconds of the whole step", BOTH),
    Metric("time/rollout", "s", "seconds of sampling; phases may overlap"),
    Metric("time/reward", "s", "seconds of the reward functions"),
    Metric("time/logps", "s", "seconds of log-probs and values"),
    Metric("time/update", "s", "seconds of the updates"),
    Metric("time/sync", "s", "seconds until the rollout had the new weights"),
    Metric("time/compile", "s", "seconds of compiling, within the other phases", BOTH),
    Metric("waste/rollout", "share", "decoded positions that were of no completion"),
    Metric("waste/rows", "share", "positions of the rows that were padding", BOTH),
    Metric(
        "eval/loss", "", "loss on held-out examples; every `training.eval_every_n_steps`", (SFT,), lower_is_better=True
    ),
    Metric("eval/perplexity", "", "exp of that", (SFT,), lower_is_better=True),
    Metric("eval/accuracy", "share", "held-out answers to which `evaluation.accuracy` gives 1 or more"),
    Metric("eval/partial_accuracy", "share", "the same by `evaluation.partial`"),
    Metric("eval/format_accuracy", "share", "the same by `evaluation.format`"),
    Metric("eval/error", "share", "standard error of `eval/accuracy`, from the spread over prompts"),
    Metric("eval/pass@<k>", "share", "chance that one of k answers is right, estimated without bias"),
    Metric("eval/pass@<k>_any", "share", "prompts with a right one among their first k answers"),
    Metric("eval/reward", "reward", "mean reward of the held-out answers"),
    Metric("eval/samples", "samples", "how many held-out answers were judged"),
    Metric("eval/mean_length", "tokens", "their mean length"),
    Metric("eval/clipped_ratio", "share", "those of them that were cut at `rollout.max_new_tokens`"),
)
"""All metrics, in the order of docs/metrics.md."""

_EXACT = {row.name: row for row in TABLE if "<" not in row.name}
_PATTERNS = [
    (re.compile(row.name.replace(FUNCTION, "[^/]+").replace(NUMBER, "[1-9][0-9]*")), row)
    for row in TABLE
    if "<" in row.name
]
