"""Data types shared by the packages: completions and groups on the host, rows on the device.

Dimension letters used in every signature:

    P  prompts in a step          G  completions per prompt      B = P·G  completions
    R  rows                       L  tokens in a row             M  scored tokens in a row
    T  time in the cache          S  slots of the sampler        V  vocabulary
    D  hidden width               H  query heads                 K  key/value heads      W  head width

Host arrays are NumPy at their true length: nothing is padded before `packing.rows.pack`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # neither is imported: prompts, data and settings are described without arrays too
    import numpy as np
    from jax import Array

Message = Mapping[str, str]
"""One chat turn: `{"role": ..., "content": ...}`."""

Prompt = str | Sequence[Message]
"""Plain text, or chat messages that the tokenizer's template renders."""


class FinishReason(StrEnum):
    """Reason why a completion ended."""

    STOP = "stop"
    """The model drew one of its stop tokens; that token is the completion's last."""
    STOP_STRING = "stop_string"
    """The model completed one of the stop strings; the completion's last token is the one that did."""
    LENGTH = "length"
    """The completion, or the last turn of its episode, reached a limit of tokens."""
    TURNS = "turns"
    """The episode of the completion reached the limit of turns, and the model ended its last turn."""
    TIME = "time"
    """The environment of the completion took longer than its limit of time."""
    FAILURE = "failure"
    """The environment of the completion failed otherwise."""

    @property
    def was_cut(self) -> bool:
        """Whether a limit of tokens or of time ended the completion before the model did."""
        return self in (FinishReason.LENGTH, FinishReason.TIME)

    @classmethod
    def recorded(cls, name: object) -> "FinishReason":
        """Return the reason of this name in a file; STOP for an unknown name."""
        return next((reason for reason in cls if reason == name), cls.STOP)


@dataclass(frozen=True)
class Episode:
    """Course of a completion in an environment.

    Attributes:
        messages: the conversation after the prompt, turns of the model (role assistant) and of the environment.
        turn_ends: number of tokens of the completion at the end of each turn of the model.
        turn_rewards: reward of each turn, as the environment gave it.
        done: whether the environment ended the episode; otherwise a limit did, or a failure.
        failure: what went wrong in the environment; empty if nothing did.
        reward: reward of the whole episode; None where it is not scored, because the environment failed, or a limit
            ended it before anything was paid.
        seconds: time spent in the environment.
        tool_calls: number of tool calls that were answered.
        tool_failures: number of those that failed.
        numbers: the environment's own numbers by name, each as it was last given.
    """

    messages: tuple[Message, ...] = ()
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    done: bool = False
    failure: str = ""
    reward: float | None = None
    seconds: float = 0.0
    tool_calls: int = 0
    tool_failures: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)


class Branch(NamedTuple):
    """Place in a completion from which it continues an earlier token, because its history was rewritten.

    Attributes:
        start: index of the branch's first token in the completion.
        kept: number of tokens that stay of the sequence so far, which begins with the prompt.
    """

    start: int
    kept: int


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        tokens: int32 [n], the stop token included when there is one.
        logps: float32 [n], log-softmax(logits / temperature) at each token over the full distribution. The trainer
            recomputes the same quantity, so the ratio is 1 before an update, also where that is truncated.
        sampler_logps: float32 [n], log-probability under the sampled distribution, which is truncated; 0 where only
            one token was possible. exp(logps − sampler_logps) is the probability mass that truncation keeps: the
            metric `sampling/mass_kept`. No loss uses it.
        finish: why it ended.
        text: the decoded tokens without the stop token or stop string; it includes tool responses between their
            markers.
        mask: bool [n], True for tokens that the model generated and False for those that a tool or an environment
            inserted; None when the model generated all.
        episode: its course in an environment; None without one.
        branches: branches in order, where a rewritten history may make some; None elsewhere. Each token of the
            completion belongs to one branch, and is preceded by those that the branch kept.
        key: uint32 [2], random key of the noise that drew the tokens (`sampling.logits.token_keys`); None without one.
        hidden: number of characters that the decoded tokens have after `text`: a stop string, and the rest of its last
            token.
    """

    tokens: "np.ndarray"
    logps: "np.ndarray"
    sampler_logps: "np.ndarray"
    finish: FinishReason
    text: str = ""
    mask: "np.ndarray | None" = None
    episode: Episode | None = None
    branches: tuple[Branch, ...] | None = None
    key: "np.ndarray | None" = None
    hidden: int = 0

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model generated."""
        return len(self.tokens) if self.mask is None else int(self.mask.sum())

    def with_text(self, decode: Callable[["np.ndarray"], str]) -> "Completion":
        """Return the completion with the text that reward functions see, from the text of its tokens."""
        text = decode(self.tokens)
        return replace(self, text=text[: len(text) - self.hidden])


@dataclass(frozen=True)
class Group:
    """One prompt with its G completions and their scores.

    Attributes:
        prompt: the prompt as passed to the reward functions.
        prompt_tokens: int32 [n].
        completions: G completions of any lengths.
        columns: the other columns of the data row (`answer`, ...).
        rewards: float64 [G], the weighted total (NaN where no function scored the completion).
        rewards_by_function: name → float64 [G], NaN where the function returned None.
        advantages: float32 [G].
    """

    prompt: Prompt
    prompt_tokens: "np.ndarray"
    completions: tuple[Completion, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    rewards: "np.ndarray | None" = None
    rewards_by_function: "Mapping[str, np.ndarray]" = field(default_factory=dict)
    advantages: "np.ndarray | None" = None


class Mean(NamedTuple):
    """A metric accumulated over a step: total and count are summed separately and divided at the end of the step."""

    total: Any
    count: Any

    @property
    def value(self) -> float:
        """The mean; NaN without a count."""
        return float(self.total) / (float(self.count) or math.nan)


class EffectiveShare(NamedTuple):
    """Effective sample size of the weights w of n tokens, as a share of n: (Σw)² / (n·Σw²). It is accumulated over a
    step as Σw, Σw² and n, which are divided at its end.
    """

    total: Any
    squares: Any
    count: Any

    @property
    def value(self) -> float:
        """The share; NaN without tokens, and 0 where all weights are 0."""
        return float(self.total) ** 2 / ((float(self.count) or math.nan) * float(self.squares) or 1.0)


MetricSums = dict[str, "Mean | EffectiveShare | Array"]
"""A micro-batch's contribution to each metric: the parts of a tuple are summed; bare arrays, whose names end in `/min`
or `/max`, are reduced by minimum or maximum.
"""
