"""What travels between the rooms: completions and groups on the host, rows on the device.

Dimension letters used in every signature:

    P  prompts in a step          G  samples per prompt          B = P·G  samples
    R  rows                       L  tokens in a row             M  scored tokens in a row
    T  time in the cache          S  slots of the sampler        V  vocabulary
    D  hidden width               H  query heads                 K  key/value heads      W  head width

Host arrays are NumPy at their true length: nothing is padded before `packing.rows.pack`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

Message = Mapping[str, str]
"""One chat turn: `{"role": ..., "content": ...}`."""

Prompt = str | Sequence[Message]
"""Plain text, or chat messages that the tokenizer's template renders."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model drew one of its stop tokens; that token is the completion's last."""
    LENGTH = "length"
    """The budget of new tokens was spent first."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        tokens: int32 [n], the stop token included when there is one.
        logps: float32 [n], log-softmax(logits / temperature) at each token, of the whole distribution: what the trainer
            recomputes, so that the ratio of the two is 1 before an update, with top-k and top-p too.
        sampler_logps: float32 [n], log-probability under the distribution drawn from, which top-k and top-p cut; 0
            where there was no choice. exp(logps − sampler_logps) is the probability of what they kept: the metric
            `sampling/mass_kept`. No loss uses it.
        finish: why it ended.
        text: the tokens decoded, stop token left out; what a tool answered is part of it, between its markers.
        mask: bool [n], True for tokens that the model drew and False for those that a tool put there; None when all
            were drawn.
    """

    tokens: np.ndarray
    logps: np.ndarray
    sampler_logps: np.ndarray
    finish: FinishReason
    text: str = ""
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Group:
    """One prompt with its G completions, and what scoring adds to them.

    Attributes:
        prompt: the prompt as the reward functions see it.
        prompt_tokens: int32 [n].
        completions: G of them, of any lengths.
        columns: the other columns of the data row (`answer`, ...).
        rewards: float64 [G], the weighted total (NaN where no function scored the sample).
        rewards_by_function: name → float64 [G], NaN where the function returned None.
        advantages: float32 [G].
    """

    prompt: Prompt
    prompt_tokens: np.ndarray
    completions: tuple[Completion, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    rewards: np.ndarray | None = None
    rewards_by_function: Mapping[str, np.ndarray] = field(default_factory=dict)
    advantages: np.ndarray | None = None


class Mean(NamedTuple):
    """A metric on its way through a step: sums and counts are added up apart, and divided when the step is whole."""

    total: Any
    count: Any
