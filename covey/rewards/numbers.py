"""Numbers in model text, and the rewards for completions that are a number: those of the arithmetic task.

Numbers are parsed with a pattern, without evaluation, as exact fractions.

The pattern accepts signs (the Unicode minus too), currency, thousands groups, decimals, percent signs (a unit: 50% is
50), powers of ten (`1e3`), fractions and mixed numbers. An unevaluated division (`48/2`) is read as its first number.
Hazard: the text may be adversarial. Every repeat in the pattern is possessive or bounded, so a scan is linear in the
text, and a number with more than `MAX_DIGITS` digits is skipped before conversion.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.rewards.completions import Completions, texts

MAX_DIGITS = 64
"""Maximum digits on either side of the decimal point; longer numbers are ignored."""
MAX_EXPONENT = 99
"""Maximum power of ten, as in `1e99`."""

_LOOKALIKES = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\uff0d\ufe63", "-"),
        **dict.fromkeys("\u00a0\u202f\u2009", ","),
        "\u00bd": "\x1f1/2",
        "\u00bc": "\x1f1/4",
        "\u00be": "\x1f3/4",
    }
)
"""Replacements for dashes used as a minus and spaces that group thousands, and \x1f to join 2½ into 2 1/2."""

_NUMBER = re.compile(
    r"""
    (?:(?<![\w)]) (?P<sign>[-+]) \x1f?)?        # after a letter, digit or bracket: a hyphen or an operator
    (?:\\?[$€£¥₹]\ ?)?
    (?:(?<=[$€£¥₹]) (?P<inner_sign>-))?
    (?:
      (?P<whole> \d{1,3}+ (?:,\d{3}(?!\d))++          # 1,234,567
               | \d{1,2}+ (?:,\d\d(?=,)){1,4}+ ,\d{3}(?!\d)  # 12,34,567
               | \d++)
      (?: \.(?P<decimals>\d++) | [\ \x1f](?P<part>\d{1,3}+)/(?P<of>\d{1,3}+) (?![/.,]?\d) )?
    | (?<![\d.]) \.(?P<bare_decimals>\d++)
    )
    (?: [eE](?P<exponent>[-+]?\d++) (?!\w) )?
    (?: \ ?/\ ?(?P<denominator>\d++) (?!\ ?/|[.,]\d) )?
    """,
    re.VERBOSE,
)


def first_number(text: str) -> Fraction | None:
    """Return the first number in `text`, or None.

    >>> first_number("so it costs $1,250.50 in all")
    Fraction(2501, 2)
    """
    for match in _NUMBER.finditer(text.translate(_LOOKALIKES)):
        if (number := _value(match)) is not None:
            return number
    return None


def as_number(value: object) -> Fraction | None:
    """Return `value` as a number when all of it is one, apart from currency, percent, emphasis, full stop; else None.

    >>> as_number(" **$18.00** "), as_number("18 or 19")
    (Fraction(18, 1), None)
    """
    text = str(value).strip(" \t\r\n*_`'\"").rstrip(".%$€£¥₹ ").translate(_LOOKALIKES).lstrip("\x1f")
    match = _NUMBER.fullmatch(text)
    number = _value(match) if match else None
    undone = "/" in text and number is not None and number.denominator == 1
    return None if undone else number


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the number that a match represents, or None when it is too large or divides by zero."""
    parts = {name: text or "" for name, text in match.groupdict().items()}
    whole, decimals = parts["whole"].replace(",", ""), parts["decimals"] or parts["bare_decimals"]
    if max(len(whole), len(decimals), len(parts["denominator"])) > MAX_DIGITS or len(parts["exponent"]) > 4:
        return None
    exponent, denominator = int(parts["exponent"] or 0), int(parts["denominator"] or 1)
    if abs(exponent) > MAX_EXPONENT or denominator == 0:
        return None
    number = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** exponent
    if parts["of"] and 0 < int(parts["part"]) < int(parts["of"]):
        number += Fraction(int(parts["part"]), int(parts["of"]))
    elif (number / denominator).denominator > 1:
        number /= denominator
    return -number if "-" in (parts["sign"], parts["inner_sign"]) else number


def arithmetic_answer(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any
) -> list[float]:
    """Return 1.0 when the whole completion is one number that equals the answer, else 0.0. `12` equals ` 12.0.`."""
    pairs = [(as_number(text), as_number(truth)) for text, truth in zip(texts(completions), answer, strict=True)]
    return [float(guess is not None and guess == truth) for guess, truth in pairs]


def number_only(prompts: Sequence[Any], completions: Completions, **columns: Any) -> list[float]:
    """Return 1.0 when the whole completion is one number, right or wrong, else 0.0. This rewards the format."""
    return [float(as_number(text) is not None) for text in texts(completions)]
