"""A calculator for model text: parse one expression and return its value as text, without `eval`.

    expression   operand (operator operand)*, with + - below * / //
    operand      number | - operand | + operand | ( expression ) | "text".count("part")
    number       digits, with commas between them or not, and decimals

It accepts what nanochat's tool accepts, through a parser; powers, names and other attributes are not in the grammar.
Deviations: values are exact fractions until they are printed, so 0.1+0.2 is 0.3, and a whole number is printed without
`.0`, as in the calculator annotations of GSM8K; `//` rounds down exactly; commas inside quotes are kept. Any other
value is printed as the nearest float, as in Python.

Hazard: the text may be adversarial. A length limit bounds the work (an expression costs under a millisecond), a depth
limit bounds the stack, and no clock or signal is needed, so any thread may call it.

`Tool` answers a model during sampling: it writes a call between two markers and pauses for the response.

    … <|python_start|> 12/60 <|python_end|> <|output_start|> 0.2 <|output_end|> …
      drawn by the model                    appended, without loss

Only tokens of the completion count: the call is the tokens since its last begin marker, with no end marker between;
a begin marker in the prompt is ignored. After a call that is empty or has no result, nothing is appended.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from covey.config.schema import RolloutConfig
from covey.errors import RecipeError
from covey.sampling.responder import Turn
from covey.text.tokenizer import Tokenizer
from covey.types import FinishReason

MAX_LENGTH = 256
"""Maximum characters in an expression."""
MAX_DEPTH = 32
"""Maximum nesting depth of brackets and signs."""
MAX_NUMBER = 10**30
"""Maximum magnitude of a number, intermediate results included."""

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number> [0-9]++ (?:,[0-9]++)*+ (?:\.[0-9]*+)? | \.[0-9]++ )
    | (?P<quoted> "[^"\\\n]*+" | '[^'\\\n]*+' )
    | (?P<mark>   \.count\b | // | [-+*/()] )
    )""",
    re.VERBOSE,
)


def calculate(text: str) -> str | None:
    """Return the value of the expression `text`, or None when it is invalid, divides by zero or exceeds a limit.

    >>> calculate("(1,250 - 50) / 7.5"), calculate("7/2"), calculate("'strawberry'.count('r')"), calculate("2**9")
    ('160', '3.5', '3', None)
    """
    if len(text) > MAX_LENGTH:
        return None
    try:
        return _format(_Parser(_tokens(text)).parse())
    except (_NotAnExpressionError, ZeroDivisionError):  # most model text is not an expression
        return None


class _NotAnExpressionError(Exception):
    """Raised when the text is not an expression of the grammar or exceeds a limit."""


def _tokens(text: str) -> list[str]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NotAnExpressionError
        tokens.append(match[match.lastgroup or 0])
        position = match.end()
    return tokens


class _Parser:
    """Precedence climbing (Richards, 1979) over a list of tokens."""

    def __init__(self, tokens: list[str]):
        self.remaining = tokens[::-1]

    def parse(self) -> Fraction:
        """Return the value of the whole token list."""
        value = self.expression(0, 0)
        if self.remaining:
            raise _NotAnExpressionError
        return value

    def expression(self, outer_precedence: int, depth: int) -> Fraction:
        """Evaluate operands joined by operators of higher precedence than `outer_precedence`, from left to right."""
        value = self.operand(depth)
        while (operation := OPERATORS.get(self.next)) and operation[0] > outer_precedence:
            precedence, apply = operation
            self.take()
            value = _bounded(apply(value, self.expression(precedence, depth)))
        return value

    def operand(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _NotAnExpressionError
        token = self.take()
        if token in ("-", "+"):
            value = self.operand(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.expression(0, depth + 1)
            self.take(")")
            return value
        return self.count_in(token) if token[0] in "\"'" else _number(token)

    def count_in(self, quoted: str) -> Fraction:
        self.take(".count")
        self.take("(")
        substring = self.take()
        self.take(")")
        if substring[0] not in "\"'":
            raise _NotAnExpressionError
        return Fraction(quoted[1:-1].count(substring[1:-1]))

    @property
    def next(self) -> str:
        """Return the next token, or "" at the end, without consuming it."""
        return self.remaining[-1] if self.remaining else ""

    def take(self, wanted: str | None = None) -> str:
        if not self.remaining or wanted not in (None, self.remaining[-1]):
            raise _NotAnExpressionError
        return self.remaining.pop()


def _number(token: str) -> Fraction:
    whole, _, decimals = token.replace(",", "").partition(".")
    if not (whole + decimals).isdigit():
        raise _NotAnExpressionError
    return _bounded(Fraction(int(whole + decimals), 10 ** len(decimals)))


def _bounded(value: Fraction) -> Fraction:
    if abs(value) > MAX_NUMBER:
        raise _NotAnExpressionError
    return value


def _format(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else repr(float(value))


OPERATORS: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
    "//": (2, lambda a, b: Fraction(a // b)),
}
"""Operator → its precedence and its function."""


class Markers(NamedTuple):
    """Ids of the tokens around a call and around its response."""

    start: int
    end: int
    output_start: int
    output_end: int


@dataclass(frozen=True)
class Tool:
    """A tool that responds to calls in a completion's tokens: a `responder.Responder` that answers at once.

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
    is_async: ClassVar[bool] = False
    answer_lag: ClassVar[None] = None
    max_num_seqs: ClassVar[None] = None

    @property
    def pause_id(self) -> int:
        """Marker behind which the model pauses: the end of a call."""
        return self.markers.end

    def answer(self, turn: Turn) -> np.ndarray | None:
        """Return the tokens to append where a call has ended; None ends the completion."""
        is_stopped = turn.ending.reason is FinishReason.STOP_STRING
        if turn.tokens[-1] != self.markers.end or is_stopped or not turn.remaining_tokens:
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


def make_tool(tokenizer: Tokenizer, config: RolloutConfig) -> Tool:
    """Return the tool that `rollout.tool` names.

    Errors: RecipeError when the tokenizer lacks a marker, or a marker equals another one or a stop token.
    """
    markers = _markers(tokenizer, config.tool_markers)
    control = {token for token, added in tokenizer.inner.get_added_tokens_decoder().items() if added.special}
    decode = partial(tokenizer.decode, skip_special=False)
    return Tool(markers, TOOLS[config.tool], decode, tokenizer.encode, frozenset(control - set(markers)))


def _markers(tokenizer: Tokenizer, texts: Sequence[str]) -> Markers:
    where, names = "rollout.tool_markers", Markers._fields
    if len(texts) != len(names) or len(set(texts)) != len(names):
        raise RecipeError(f"these are not four different tokens: {list(texts)}", want=", ".join(names), where=where)
    ids = {text: token for text in texts if (token := tokenizer.inner.token_to_id(text)) is not None}
    if missing := [text for text in texts if text not in ids]:
        raise RecipeError(
            f"the tokenizer has no token {missing[0]!r}, so its model cannot use the tool",
            fix="set rollout.tool to none, or name the model's own markers in rollout.tool_markers",
            where=where,
        )
    if stops := [text for text in texts if ids[text] in tokenizer.stop_ids]:
        raise RecipeError(f"{stops[0]!r} is a stop token: a completion would end there", where=where)
    return Markers(*ids.values())


TOOLS: dict[str, Callable[[str], str | None]] = {"calculator": calculate}
