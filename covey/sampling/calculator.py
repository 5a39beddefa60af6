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
"""

import operator
import re
from collections.abc import Callable
from fractions import Fraction

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
    except (_RefusedError, ZeroDivisionError):  # most model text is not an expression
        return None


class _RefusedError(Exception):
    """Raised when the text is not an expression of the grammar or exceeds a limit."""


def _tokens(text: str) -> list[str]:
    found, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _RefusedError
        found.append(match[match.lastgroup or 0])
        position = match.end()
    return found


class _Parser:
    """Precedence climbing (Richards, 1979) over a list of tokens."""

    def __init__(self, tokens: list[str]):
        self.remaining = tokens[::-1]

    def parse(self) -> Fraction:
        """Return the value of the whole token list."""
        value = self.expression(0, 0)
        if self.remaining:
            raise _RefusedError
        return value

    def expression(self, outer_precedence: int, depth: int) -> Fraction:
        """Evaluate operands joined by operators of higher precedence than `outer_precedence`, from left to right."""
        value = self.operand(depth)
        while (found := OPERATORS.get(self.next)) and found[0] > outer_precedence:
            precedence, apply = found
            self.take()
            value = _bounded(apply(value, self.expression(precedence, depth)))
        return value

    def operand(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _RefusedError
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
            raise _RefusedError
        return Fraction(quoted[1:-1].count(substring[1:-1]))

    @property
    def next(self) -> str:
        """Return the next token, or "" at the end, without consuming it."""
        return self.remaining[-1] if self.remaining else ""

    def take(self, wanted: str | None = None) -> str:
        if not self.remaining or wanted not in (None, self.remaining[-1]):
            raise _RefusedError
        return self.remaining.pop()


def _number(token: str) -> Fraction:
    whole, _, decimals = token.replace(",", "").partition(".")
    if not (whole + decimals).isdigit():
        raise _RefusedError
    return _bounded(Fraction(int(whole + decimals), 10 ** len(decimals)))


def _bounded(value: Fraction) -> Fraction:
    if abs(value) > MAX_NUMBER:
        raise _RefusedError
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
