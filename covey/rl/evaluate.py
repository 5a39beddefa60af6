"""Evaluation on held-out prompts: accuracy, pass@k, format and reward over sampled completions.

Every evaluation of a run samples with the same noise, so that before and after differ by the weights alone. Metrics
have the same names in `summary.json` and, prefixed by `eval/`, in `metrics.jsonl`:

    accuracy, partial_accuracy, format_accuracy    fractions of completions that are right, nearly right, well-formed
    pass@k, pass@k_any                             chance that one of k completions is right: unbiased, and as counted

A completion that a function does not score (None, or a failure under `on_error: none`) is neither right nor wrong:
these are fractions of the completions that it judged.

With several sampling presets the metrics of the first have these names. The others have the preset before the name:
`liberal/accuracy`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from covey.config.schema import EvalConfig, RolloutConfig, SamplingConfig
from covey.parallel import processes
from covey.rewards.call import RewardFn
from covey.rewards.scoring import RewardRunner, score
from covey.types import Group

EVALUATION_STEP = 2**31 - 1
"""Step number that seeds evaluation; no training step reaches it."""


class Generates(Protocol):
    """Anything that samples completions: a rollout worker or a cluster."""

    def generate(
        self,
        examples: Sequence[Mapping[str, Any]],
        samples: int,
        *,
        step: int = 0,
        first: int = 0,
        config: RolloutConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]: ...


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        metrics: metrics by name; None where nothing was measured.

            accuracy, partial_accuracy, format_accuracy: fractions of judged completions that the function of this name
                gives 1 or more; None without such a function, or if it judged none.
            judged, partial_judged, format_judged, reward_judged: number of completions judged, where it is not all.
            reward: mean of the training reward, when its functions were given.
            error: standard error of `accuracy` over prompts.
            samples: number of completions evaluated.
            mean_length: tokens per completion.
            clipped_ratio: fraction of completions that were cut (`FinishReason.was_cut`).
            pass@k: for k = 1, 2, ... the chance that at least one of k completions is right (`pass_at_k`).
            pass@k_any: the fraction of prompts with a right one among their first k completions.
        groups: the completions themselves, with the training rewards when their functions were given.
        correct: which completions of each group are right, by the name of the metric: float64 [G], 1 or 0, or NaN for
            those that were not judged.
        others: results by preset, for the presets after the first.
    """

    metrics: Mapping[str, float | None]
    groups: Sequence[Group]
    correct: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    others: Mapping[str, "Evaluation"] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return all metrics by name, for `summary.json` and `metrics.jsonl`."""
        others = {f"{preset}/{name}": x for preset, each in self.others.items() for name, x in each.metrics.items()}
        return {**self.metrics, **others}


def evaluate(
    model: Generates,
    examples: Sequence[Mapping[str, Any]],
    config: EvalConfig,
    rollout: RolloutConfig,
    reward_fns: Sequence[RewardFn | str] = (),
    weights: Sequence[float] | None = None,
    progress: Callable[[int, int], None] | None = None,
    runner: RewardRunner | None = None,
) -> Evaluation:
    """Sample and evaluate `config.samples` completions for each of the first `config.prompts` examples, under each
    preset when there are several.

    Args:
        model: object that generates.
        examples: held-out rows with a `prompt` and the columns that the functions need.
        config: number of prompts and samples, sampling settings, names of the functions.
        rollout: sampling settings that `config` does not replace.
        reward_fns, weights: the training reward.
        runner: runs all these functions.
    """
    chosen = list(examples[: config.prompts or None])

    def evaluate_preset(preset: Any) -> Evaluation:
        start, local = processes.here().local_slice(chosen)
        groups = model.generate(
            local,
            config.samples,
            step=EVALUATION_STEP,
            first=start,
            config=evaluation_rollout(replace(config, preset=preset), rollout),
            progress=progress,
        )
        return evaluate_groups(groups, config, reward_fns, weights, runner)

    first, *others = presets_of(config)
    return replace(evaluate_preset(first), others={str(preset): evaluate_preset(preset) for preset in others})


def evaluate_groups(
    groups: Sequence[Group],
    config: EvalConfig,
    reward_fns: Sequence[RewardFn | str] = (),
    weights: Sequence[float] | None = None,
    runner: RewardRunner | None = None,
) -> Evaluation:
    """Evaluate the groups of all processes by the functions that `config` names."""
    named = {"accuracy": config.accuracy, "partial_accuracy": config.partial, "format_accuracy": config.format}
    correct = {what: _find_correct(groups, name, runner) for what, name in named.items() if name}
    scored = score(groups, reward_fns, weights, runner) if reward_fns else list(groups)
    correct = {what: processes.here().gather_items(right, f"evaluation: {what}") for what, right in correct.items()}
    scored = processes.here().gather_items(scored, "evaluation")
    rewards = np.array([r for g in scored if g.rewards is not None for r in g.rewards])
    completions = [c for g in scored for c in g.completions]
    judged = {what: [known for r in right if (known := r[~np.isnan(r)]).size] for what, right in correct.items()}
    counts = {
        **{what.replace("accuracy", "judged"): sum(map(len, right)) for what, right in judged.items()},
        "reward_judged": int((~np.isnan(rewards)).sum()) if reward_fns else len(completions),
    }
    metrics = {
        **{name: _mean_fraction(judged.get(name, ())) for name in named},
        "reward": None if np.isnan(rewards).all() else float(np.nanmean(rewards)),
        "error": _standard_error(judged.get("accuracy", ())),
        "samples": len(completions),
        "mean_length": float(np.mean([c.num_sampled for c in completions])),
        "clipped_ratio": float(np.mean([c.finish.was_cut for c in completions])),
        **_pass_rates(judged.get("accuracy", ()), config.pass_k),
        **{name: count for name, count in counts.items() if count < len(completions)},
    }
    return Evaluation(metrics, scored, correct)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate without bias the chance that at least one of `k` completions is right, from `samples` of which
    `right` are (Chen et al., 2021, Codex, eq. 1): 1 − C(n−c, k) / C(n, k), the share of sets of k with a right one.

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs hold the right one
    0.5
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def presets_of(config: EvalConfig) -> Sequence[Any]:
    """Return the names of the sampling presets of an evaluation; None stands for its own settings."""
    return list(PRESETS) if config.preset == "all" else [config.preset]


def evaluation_rollout(config: EvalConfig, rollout: RolloutConfig) -> RolloutConfig:
    """Return the rollout's settings overridden by the evaluation's preset (the first when "all"), or by its own."""
    preset, *_ = presets_of(config)
    chosen = vars(PRESETS[preset] if preset else config)
    names = [setting.name for setting in dataclasses.fields(SamplingConfig)]
    return replace(rollout, **{name: chosen[name] for name in names if chosen[name] is not None})


def during_training(config: EvalConfig) -> EvalConfig:
    """Return the settings of evaluations between the first and the last: `during_prompts`, one preset."""
    return replace(
        config,
        prompts=config.prompts if config.during_prompts is None else config.during_prompts,
        preset=presets_of(config)[0],
    )


def _pass_rates(right: Sequence[np.ndarray], largest: int) -> dict[str, float]:
    """Compute pass@k and pass@k_any of right completions, 1 or 0, for k up to `largest`, each over the prompts with k
    judged completions.
    """
    enough = {k: [r for r in right if len(r) >= k] for k in range(1, largest + 1)}
    unbiased = {
        f"pass@{k}": float(np.mean([pass_at_k(len(r), int(r.sum()), k) for r in of])) for k, of in enough.items() if of
    }
    return unbiased | {f"pass@{k}_any": float(np.mean([r[:k].any() for r in of])) for k, of in enough.items() if of}


def _standard_error(right: Sequence[np.ndarray]) -> float | None:
    fractions = np.array([r.mean() for r in right])
    return float(fractions.std(ddof=1) / len(fractions) ** 0.5) if len(fractions) > 1 else None


def _mean_fraction(right: Sequence[np.ndarray]) -> float | None:
    return float(np.mean([r.mean() for r in right])) if right else None


def _find_correct(groups: Sequence[Group], name: str, runner: RewardRunner | None) -> list[np.ndarray]:
    """Return for each prompt which of its completions the function `name` gives 1 or more, as in `Evaluation`."""
    rewards = (group.rewards for group in score(groups, [name], runner=runner))
    return [np.where(np.isnan(r), np.nan, r >= 1.0) for r in rewards if r is not None]


PRESETS = {
    "greedy": SamplingConfig(temperature=1e-4, top_k=1),
    "standard": SamplingConfig(temperature=0.7, top_k=50, top_p=0.95),
    "liberal": SamplingConfig(temperature=0.85, top_k=2000),
}
"""Sampling settings by preset."""
