"""The choices of an answer, as OpenAI's two forms have them: their text while it grows, their log-probs, their end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason
from covey_serve.device import Event
from covey_serve.top_logps import TopLogps

LOWEST = -9999.0
"""Stands for the log-prob of what is impossible: JSON has no infinity."""
Name = Callable[[int], str]
"""Function from a token to its name in log-probs."""
ENDS = {FinishReason.STOP: "stop", FinishReason.STOP_STRING: "stop"}


@dataclass
class Choice:
    """A completion on its way to the client.

    Attributes:
        index: number of the choice.
        decode: function from tokens to text.
        stops: stop strings, whose beginnings are held back.
        tokens, logps: what was drawn so far.
        sent: number of characters that were sent.
        sent_tokens: number of tokens that were sent.
        completion: the completion once it has ended.
        calls: tool calls that it makes.
    """

    index: int
    decode: Any
    stops: Sequence[str] = ()
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    sent: int = 0
    sent_tokens: int = 0
    completion: Completion | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    _held: str = ""
    _window: slice = field(default_factory=lambda: slice(0, 0))

    def take(self, event: Event) -> None:
        """Take what was drawn."""
        self.tokens, self.logps = event.drawn.ids, event.drawn.logps
        if event.completion is not None:
            self.completion = event.completion.with_text(self.decode)

    @property
    def text(self) -> str:
        """The text of the finished choice; none of one for which nothing is drawn."""
        return "" if self.completion is None else self.completion.text

    def advance(self) -> tuple[str, slice]:
        """Return the text and the tokens that are new since the last call, without what may still change: half a
        character, or the beginning of a stop string.
        """
        if self.completion is None:
            self._decode_new()
            sizes = range(min(max(map(len, self.stops), default=1) - 1, len(self._held)), 0, -1)
            may_stop = (n for n in sizes if any(stop.startswith(self._held[-n:]) for stop in self.stops))
            end = len(self._held) - next(may_stop, 0)
            new, self._held = self._held[:end], self._held[end:]
        else:
            new = self.text[self.sent :]
        start, self.sent, self.sent_tokens = self.sent_tokens, self.sent + len(new), len(self.tokens)
        return new, slice(start, self.sent_tokens)

    def _decode_new(self) -> None:
        """Add the text of new tokens to the text that is held, up to the last of four places where no character is cut.
        They are decoded after those of the call before, on which a space may depend, and not after all tokens.
        """
        start, known = self._window.start, self.decode(self.tokens[self._window])
        for end in range(len(self.tokens), max(self._window.stop, len(self.tokens) - 4), -1):
            text = self.decode(self.tokens[start:end])
            if not text.endswith("\ufffd"):
                self._held += text[len(known) :]
                self._window = slice(self._window.stop if known else start, end)
                return

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it goes on."""
        if self.completion is None:
            return None
        return "tool_calls" if self.calls else ENDS.get(self.completion.finish, "length")


@dataclass(frozen=True)
class Places:
    """Tokens with their log-probs, and with those of the most likely tokens where they are known.

    Attributes:
        tokens: the tokens.
        logps: their log-probs; NaN where nothing comes before.
        top: the most likely tokens at each of the last places, or None.
    """

    tokens: Sequence[int]
    logps: Sequence[float]
    top: TopLogps | None = None

    @classmethod
    def of_text(cls, tokens: np.ndarray, scores: TopLogps | None, start: int = 0) -> "Places":
        """Return the places of a text from token `start` on; the first of all tokens has no log-prob."""
        if scores is None:
            return cls(tokens[:1].tolist(), [math.nan])
        first = max(start - 1, 0)
        top = TopLogps(*(x[first:] for x in scores))
        none = [math.nan] if start == 0 else []
        return cls(tokens[start:].tolist(), [*none, *top.logps.tolist()], top)

    def likely(self, place: int, count: int) -> list[tuple[int, float]]:
        """Return the most likely tokens at a place, and the token itself if it is none of them."""
        row = place - (len(self.tokens) - len(self.top.logps)) if self.top else -1
        if self.top is None or row < 0:
            return []
        pairs = list(zip(self.top.ids[row, :count].tolist(), self.top.top[row, :count].tolist(), strict=True))
        own = self.tokens[place], float(self.logps[place])
        return pairs if own[0] in [token for token, _ in pairs] else [*pairs, own]


def token_name(tokenizer: Tokenizer, token: int, as_id: bool = False) -> str:
    """Return the name of a token in log-probs: its text, or `token_id:N`."""
    return f"token_id:{token}" if as_id else tokenizer.decode([token], skip_special=False)


def chat_logprobs(name: Name, places: Places, count: int) -> dict[str, Any]:
    """Return log-probs in the form of the chat API."""

    def entry(token: int, logp: float) -> dict[str, Any]:
        text = name(token)
        known = None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": finite(logp), "bytes": known}

    content = []
    for place, pair in enumerate(zip(places.tokens, places.logps, strict=True)):
        likely = [entry(*one) for one in places.likely(place, count)[:count]]
        content.append(entry(*pair) | {"top_logprobs": likely})
    return {"content": content}


def completion_logprobs(name: Name, places: Places, count: int) -> dict[str, Any]:
    """Return log-probs in the form of the completions API: lists of equal length; the first token of a prompt has
    none.
    """
    names = [name(token) for token in places.tokens]
    likely = [places.likely(place, count) for place in range(len(names))]
    top = [{name(token): finite(logp) for token, logp in pairs} or None for pairs in likely]
    return {
        "tokens": names,
        "token_logprobs": [None if math.isnan(logp) else finite(logp) for logp in places.logps],
        "top_logprobs": top if count else None,
        "text_offset": list(accumulate(map(len, names), initial=0))[:-1],
    }


def finite(logp: float) -> float:
    """Return a log-prob that JSON can hold."""
    return float(logp) if math.isfinite(logp) else LOWEST


def usage(prompt: int, completion: int) -> Mapping[str, int]:
    """Return the numbers of tokens of an answer."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
