"""Sequences: the tokens of a completion while it is sampled, and its random numbers.

The noise of a token depends only on its sequence's key and its index in the completion; the key depends only on
(seed, step, prompt index, sample index). An appended token uses up an index, and the noise of that index is not used.

Random numbers are JAX's Threefry (Salmon et al., 2011), computed on the host with the same bits. They are few, and in
each compiled program that draws them they would cost half a second of compilation.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt32

from covey.sampling.logits import SamplingParams
from covey.sampling.responder import Responder
from covey.types import Branch, Completion, FinishReason

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


class SampledTokens(NamedTuple):
    """Tokens drawn: their ids (int32) and their log-probs under the full and the truncated distribution (float32)."""

    ids: np.ndarray
    logps: np.ndarray
    sampler_logps: np.ndarray


class Sequence:
    """A prompt with one completion so far.

    Args:
        prompt: int32 [n].
        limit: maximum number of tokens of the completion.
        sampling_params: settings of its distribution.
        responder: responds where the model halts.

    Attributes:
        key: random key, uint32 [2].
        num_tokens: number of tokens of the completion so far.
        versions: versions of the weights that drew the first and the last token.
        branches: branches that the responder has begun.
        response: what goes into the cache before the next token is drawn; None for nothing.
        swapped: content of its slot while another sequence has that; None otherwise.
    """

    def __init__(
        self, prompt: np.ndarray, limit: int, sampling_params: SamplingParams, responder: Responder | None = None
    ):
        self.prompt, self.limit, self.sampling_params, self.responder = prompt, limit, sampling_params, responder
        self.key = np.zeros(2, np.uint32)
        self.branches, self.num_tokens, self.versions = [Branch(0, len(prompt))], 0, (0, 0)
        self.response: Any = None
        self.swapped: Any = None
        self._parts: list[SampledTokens] = []
        self._drawn: list[np.ndarray] = []

    @property
    def tokens(self) -> np.ndarray:
        """The completion so far, int32 [n]."""
        return np.concatenate([part.ids for part in self._parts])

    @property
    def length(self) -> int:
        """Number of tokens: those of the last branch, and those that it kept."""
        last = self.branches[-1]
        return last.kept + self.num_tokens - last.start

    @property
    def turn_end(self) -> int:
        """Number of tokens of the completion at which the turn that begins now ends."""
        limit = None if self.responder is None else self.responder.turn_limit
        return min(self.num_tokens + (limit or self.limit), self.limit)

    def extend(self, new: SampledTokens, version: int = 0) -> None:
        """Add tokens that the model drew with weights of this version."""
        self.versions = (self.versions[0] if self.num_tokens else version), version
        self._extend(new, drawn=True)

    def append(self, tokens: np.ndarray) -> None:
        """Add `tokens`, int32 [n], that the model did not draw; their log-probs are 0."""
        zeros = np.zeros(len(tokens), np.float32)
        self._extend(SampledTokens(tokens, zeros, zeros), drawn=False)

    def branch(self, kept: int) -> None:
        """Begin a branch that keeps so many tokens of the sequence so far."""
        self.branches.append(Branch(self.num_tokens, kept))

    def completion(self, stop_ids: Collection[int]) -> Completion:
        """Return the finished completion, without its text; with a responder it has a mask of the model's tokens."""
        parts = SampledTokens(*map(np.concatenate, zip(*self._parts, strict=True)))
        finish = FinishReason.STOP if int(parts.ids[-1]) in stop_ids else FinishReason.LENGTH
        mask = None if self.responder is None else np.concatenate(self._drawn)
        return Completion(*parts, finish, mask=mask, branches=tuple(self.branches[1:]) or None)

    def _extend(self, new: SampledTokens, *, drawn: bool) -> None:
        self.num_tokens += len(new.ids)
        self._parts.append(new)
        self._drawn.append(np.full(len(new.ids), drawn))


def sample_keys(seed: int, rows: UInt32[np.ndarray, "n 3"]) -> UInt32[np.ndarray, "n 2"]:
    """Return the random key of each (step, prompt index, sample index) under the run's seed: `jax.random.fold_in` of
    the three in turn.
    """
    keys = np.broadcast_to(np.array([0, seed & 0xFFFFFFFF], np.uint32), (len(rows), 2))
    for column in rows.T:
        keys = _fold_in(keys, column)
    return keys


def uniform_noise(keys: UInt32[np.ndarray, "*n 2"], index: np.ndarray) -> Float32[np.ndarray, "*n"]:
    """Return one number in [0, 1) for each completion's key and token index: `jax.random.uniform` under the key into
    which the index is folded.
    """
    folded, zero = _fold_in(keys, index.astype(np.uint32)), np.uint32(0)
    bits = np.bitwise_xor(*_threefry(folded, zero, zero))
    floats: Float32[np.ndarray, "*n"] = ((bits >> 9) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1)
    return floats


def _fold_in(keys: UInt32[np.ndarray, "*n 2"], data: UInt32[np.ndarray, "*n"]) -> UInt32[np.ndarray, "*n 2"]:
    return np.stack(_threefry(keys, np.uint32(0), data), axis=-1)


def _threefry(
    keys: UInt32[np.ndarray, "*n 2"], high: np.ndarray | np.uint32, low: np.ndarray | np.uint32
) -> tuple[UInt32[np.ndarray, "*n"], UInt32[np.ndarray, "*n"]]:
    """Encrypt the counters (high, low) by 20 rounds of Threefry-2x32."""
    first, second = keys[..., 0], keys[..., 1]
    schedule = (first, second, first ^ second ^ _PARITY)
    x, y = first + high, second + low
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x, y = x + schedule[(group + 1) % 3], y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
