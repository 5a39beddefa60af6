"""A tool for the model during sampling: it writes a call between two markers and pauses for the response.

    … <|python_start|> 12/60 <|python_end|> <|output_start|> 0.2 <|output_end|> …
      drawn by the model                    appended, without loss

Only tokens of the completion count: the call is the tokens since its last begin marker, with no end marker between;
a begin marker in the prompt is ignored. After a call that is empty or has no result, nothing is appended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

import numpy as np

from covey.config.schema import RolloutConfig
from covey.errors import RecipeError
from covey.sampling.calculator import calculate
from covey.sampling.turns import Turn
from covey.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Markers:
    """Ids of the tokens around a call and around its response."""

    start: int
    end: int
    output_start: int
    output_end: int

    @property
    def ids(self) -> tuple[int, ...]:
        """All four ids."""
        return (self.start, self.end, self.output_start, self.output_end)


@dataclass(frozen=True)
class Tool:
    """A tool that responds to calls in a completion's tokens: a `turns.Responder` that answers at once.

    Attributes:
        markers: ids that mark where calls and responses begin and end.
        evaluate: text of a call → text of its result, or None when it has none.
        decode: tokens → text, control tokens visible.
        encode: text → int32 [n].
        hidden: control tokens that are omitted from a completion's text: all except the markers.
    """

    markers: Markers
    evaluate: Callable[[str], str | None]
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], np.ndarray]
    hidden: frozenset[int] = frozenset()
    turn_limit: ClassVar[None] = None
    waits: ClassVar[bool] = False
    max_live: ClassVar[None] = None

    @property
    def pause_id(self) -> int:
        """Marker behind which the model pauses: the end of a call."""
        return self.markers.end

    def answer(self, turn: Turn) -> np.ndarray | None:
        """Return the tokens to append where a call has ended; None ends the completion."""
        if turn.tokens[-1] != self.markers.end or not turn.room:
            return None
        return self.respond(turn.tokens)

    def respond(self, tokens: np.ndarray) -> np.ndarray:
        """Return the response, int32 [n], to append to the completion so far: `tokens`, up to the end marker."""
        before = tokens[:-1]
        starts, ends = (np.flatnonzero(before == marker) for marker in (self.markers.start, self.markers.end))
        start = starts.max(initial=-1)
        call = before[start + 1 :]
        is_call = start > ends.max(initial=-1) and call.size
        result = self.evaluate(self.decode(call.tolist())) if is_call else None
        if result is None:
            return np.zeros(0, np.int32)
        return np.array([self.markers.output_start, *self.encode(result), self.markers.output_end], np.int32)

    def text(self, tokens: np.ndarray) -> str:
        """Decode `tokens`, with calls and responses between their markers."""
        return self.decode([token for token in tokens.tolist() if token not in self.hidden])


def make_tool(tokenizer: Tokenizer, config: RolloutConfig) -> Tool | None:
    """Return the tool that `config` names, or None when it names none.

    Errors: RecipeError when the tokenizer lacks a marker, or a marker equals another one or a stop token.
    """
    if config.tool == "none":
        return None
    markers = _markers(tokenizer, config.tool_markers)
    control = {token for token, added in tokenizer.inner.get_added_tokens_decoder().items() if added.special}
    decode = partial(tokenizer.decode, skip_special=False)
    return Tool(markers, TOOLS[config.tool], decode, tokenizer.encode, frozenset(control - set(markers.ids)))


def _markers(tokenizer: Tokenizer, texts: Sequence[str]) -> Markers:
    where, names = "rollout.tool_markers", [field.name for field in fields(Markers)]
    if len(texts) != len(names) or len(set(texts)) != len(names):
        raise RecipeError(f"these are not four different tokens: {list(texts)}", want=", ".join(names), where=where)
    found = {text: token for text in texts if (token := tokenizer.inner.token_to_id(text)) is not None}
    if missing := [text for text in texts if text not in found]:
        raise RecipeError(
            f"the tokenizer has no token {missing[0]!r}, so its model cannot use the tool",
            fix="set rollout.tool to none, or name the model's own markers in rollout.tool_markers",
            where=where,
        )
    if stops := [text for text in texts if found[text] in tokenizer.stop_ids]:
        raise RecipeError(f"{stops[0]!r} is a stop token: a completion would end there", where=where)
    return Markers(*found.values())


TOOLS: dict[str, Callable[[str], str | None]] = {"calculator": calculate}
