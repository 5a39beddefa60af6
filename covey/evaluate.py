"""How good is the model on prompts it was not trained on: reward, accuracy and format over sampled completions.

Every evaluation of a run draws with the same noise, so that before and after differ by the weights alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from covey.configs import EvalConfig, RolloutConfig
from covey.rewards.scoring import RewardFn, score
from covey.types import FinishReason, Group

NOISE = 2**31 - 1
"""The step number that seeds evaluation; no training step reaches it."""


class Generates(Protocol):
    """Anything that samples completions: a rollout worker or a cluster."""

    def generate(
        self,
        examples: Sequence[Mapping[str, Any]],
        samples: int,
        *,
        step: int = 0,
        config: RolloutConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]: ...


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        accuracy: share of completions that the accuracy function gives 1 or more; None when none is named.
        format: the same for the format function.
        reward: mean of the training reward, when its functions were given.
        error: standard error of `accuracy` over prompts.
        samples: completions judged.
        mean_length: tokens a completion.
        clipped_ratio: share that ran out of tokens.
        groups: the completions themselves, with the training rewards when their functions were given.
    """

    accuracy: float | None
    format: float | None
    reward: float | None
    error: float | None
    samples: int
    mean_length: float
    clipped_ratio: float
    groups: tuple[Group, ...]

    def summary(self) -> dict[str, Any]:
        """Everything but the completions, for `summary.json`."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "groups"}


def evaluate(
    model: Generates,
    examples: Sequence[Mapping[str, Any]],
    config: EvalConfig,
    rollout: RolloutConfig,
    reward_fns: Sequence[RewardFn | str] = (),
    weights: Sequence[float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Samples and judges `config.samples` completions for each of the first `config.prompts` examples.

    Args:
        model: what generates.
        examples: held-out rows with a `prompt` and the columns the functions ask for.
        config: how many, at which temperature, judged by which functions.
        rollout: the sampling settings that `config` does not replace.
        reward_fns, weights: the training reward, reported beside the accuracies.
    """
    chosen = list(examples[: config.prompts or None])
    groups = model.generate(chosen, config.samples, step=NOISE, config=sampling(config, rollout), progress=progress)
    named = {"accuracy": config.accuracy, "format": config.format}
    judged = {what: _shares(groups, name) for what, name in named.items() if name}
    accuracy = judged.get("accuracy")
    groups = score(groups, reward_fns, weights) if reward_fns else groups
    rewards = np.concatenate([g.rewards for g in groups]) if reward_fns else None
    completions = [c for g in groups for c in g.completions]
    return Evaluation(
        accuracy=None if accuracy is None else float(accuracy.mean()),
        format=float(judged["format"].mean()) if "format" in judged else None,
        reward=None if rewards is None or np.isnan(rewards).all() else float(np.nanmean(rewards)),
        error=None if accuracy is None or len(accuracy) < 2 else float(accuracy.std(ddof=1) / len(accuracy) ** 0.5),
        samples=len(completions),
        mean_length=float(np.mean([len(c.tokens) for c in completions])),
        clipped_ratio=float(np.mean([c.finish is FinishReason.LENGTH for c in completions])),
        groups=tuple(groups),
    )


def sampling(config: EvalConfig, rollout: RolloutConfig) -> RolloutConfig:
    """The rollout's settings with those that the evaluation names."""
    named = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
    return dataclasses.replace(rollout, **{name: value for name, value in named.items() if value is not None})


def _shares(groups: Sequence[Group], name: str) -> np.ndarray:
    """For each prompt the share of its completions that the function `name` gives 1 or more."""
    scored = score(groups, [name])
    return np.array([np.mean(np.nan_to_num(g.rewards) >= 1.0) for g in scored if g.rewards is not None])
