import sys
import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rewards import numbers
from covey.rewards.numbers import arithmetic_answer, as_number, first_number, number_only

FIRST = [
    # plain
    ("7", 7),
    ("the answer is 42", 42),
    ("007", 7),
    ("0", 0),
    ("(5)", 5),
    ("٤٢", 42),
    # none
    ("", None),
    ("no number here", None),
    ("$", None),
    ("-", None),
    (",.,", None),
    ("inf", None),
    # decimals and full stops
    ("18.00", 18),
    ("3.14.", Fraction(157, 50)),
    ("10.", 10),
    (".5", Fraction(1, 2)),
    ("-.25", Fraction(-1, 4)),
    ("1.2.3", Fraction(6, 5)),
    # thousands
    ("1,234,567.89", Fraction(123456789, 100)),
    ("12,34,567", 1234567),
    ("10,20", 10),
    ("10, 20", 10),
    ("1,2345", 1),
    ("1\u202f000\u202f000", 1000000),
    ("10\u00a0000", 10000),
    ("5\u00a0dollars", 5),
    # signs
    ("-5", -5),
    ("+5", 5),
    ("\u22125", -5),
    ("\u20135", -5),
    ("10-20", 10),
    ("10\u201320", 10),
    ("pages-7", 7),
    ("(a)-4", 4),
    ("- 5 apples", 5),
    # currency and percent
    ("$ 10", 10),
    ("-$10.50", Fraction(-21, 2)),
    ("$-10", -10),
    ("\\$10", 10),
    ("€1,250", 1250),
    ("£3", 3),
    ("50%", 50),
    ("US$5", 5),
    # powers of ten
    ("1.5e-2", Fraction(3, 200)),
    ("2E+2", 200),
    ("3east", 3),
    ("1e", 1),
    # fractions
    ("3 / 4 of it", Fraction(3, 4)),
    ("2 1/2 hours", Fraction(5, 2)),
    ("2½", Fraction(5, 2)),
    ("½", Fraction(1, 2)),
    ("48/2", 48),
    ("1/2/2020", 1),
    ("10 3/2", 10),
    # too much to be a number: passed over
    ("5/0", None),
    ("9" * 65, None),
    ("9" * 64, int("9" * 64)),
    ("9" * 65 + " 3", 3),
    ("1e9999", None),
    ("1e100 2", 2),
    ("1." + "0" * 65, None),
    # around it
    ("\\boxed{10}", 10),
    ("<<48/2=24>>24", 48),
]


@pytest.mark.parametrize(("text", "number"), FIRST)
def test_first_number(text, number):
    assert first_number(text) == number


WHOLE = [
    ("18", 18),
    (" 18.00 \n", 18),
    ("$18", 18),
    ("$18$", 18),
    ("**18**", 18),
    ("50 %", 50),
    ("\u221218", -18),
    ("2 1/2", Fraction(5, 2)),
    ("½", Fraction(1, 2)),
    (18, 18),
    (18.0, 18),
    (0.1, Fraction(1, 10)),
    (1e22, 10**22),
    (Fraction(1, 3), Fraction(1, 3)),
    ("18 dollars", None),
    ("48/2", None),
    ("5/0", None),
    ("10,20", None),
    ("", None),
    (".", None),
    (None, None),
    (True, None),
    (float("nan"), None),
    (float("inf"), None),
    ("1e9999", None),
    ("9" * 65, None),
]


@pytest.mark.parametrize(("value", "number"), WHOLE)
def test_as_number_takes_the_whole_text_or_nothing(value, number):
    assert as_number(value) == number


@given(st.text())
def test_no_text_raises(text):
    assert first_number(text) is None or isinstance(first_number(text), Fraction)
    assert as_number(text) is None or isinstance(as_number(text), Fraction)


@given(st.text(alphabet="0123456789.,-+$%/eE½ \u2212\u00a0)x", max_size=40))
def test_no_number_like_text_raises_and_a_whole_number_is_also_the_first(text):
    whole, first = as_number(text), first_number(text)
    assert whole is None or whole == first


@given(
    st.fractions(max_denominator=1).map(int), st.sampled_from(["{}", "${}", " {} ", "{}.", "{}.00", "{:,}", "**{}**"])
)
def test_a_written_integer_is_read_back(number, style):
    text = style.format(number)
    assert as_number(text) == number
    assert first_number(text) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_a_written_decimal_is_read_back_exactly(number):
    assert first_number(f"so it is {number}, I think") == Fraction(number)


LONG = 200_000
HOSTILE = {
    "digits": "9" * LONG,
    "digits and a letter": "1e" + "9" * LONG + "x",
    "thousands": "1" + ",234" * (LONG // 4),
    "commas": "," * LONG,
    "points": "1." * (LONG // 2),
    "denominator": "1/" + "9" * LONG + "/",
    "exponents": "1e" * (LONG // 2),
    "signs": "-" * LONG,
    "dollars": "$" * LONG,
    "blanks": " " * LONG,
    "fullwidth": "\uff19" * LONG,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_long_text_of_anything_is_read_at_once_without_converting_long_digit_strings(text):
    limit, began = sys.get_int_max_str_digits(), time.process_time()
    sys.set_int_max_str_digits(640)  # a longer conversion would raise
    try:
        for read in (first_number, as_number):
            assert read(text) is None or abs(read(text)) < 10**64
    finally:
        sys.set_int_max_str_digits(limit)
    assert time.process_time() - began < 5  # minutes if a repeat gave characters back


def test_the_scan_tries_each_place_once(monkeypatch):
    tried = []
    monkeypatch.setattr(numbers, "_value", lambda match: tried.append(match.span()))
    assert first_number("7 " * 10_000) is None
    assert len(tried) == 10_000
    assert all(a[1] <= b[0] for a, b in pairwise(tried))


ARITHMETIC = [
    # completion, right, only a number (the answer is 12)
    ("12", 1.0, 1.0),
    ("**12**", 1.0, 1.0),
    ("13", 0.0, 1.0),
    ("-12", 0.0, 1.0),
    ("12 13", 0.0, 0.0),
    ("The answer is 12.", 0.0, 0.0),
    ("24/2", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "right", "number"), ARITHMETIC)
def test_the_whole_completion_is_the_number(text, right, number):
    assert arithmetic_answer(prompts=["p"], completions=[text], answer=["12"]) == [right]
    assert arithmetic_answer(prompts=["p"], completions=[text], answer=[12]) == [right]
    assert number_only(prompts=["p"], completions=[text]) == [number]


@pytest.mark.parametrize("text", ["", "None", "nan"])
def test_no_answer_equals_no_answer(text):
    assert arithmetic_answer(["p"], [text], answer=[None]) == [0.0]


@given(st.text(), st.integers())
def test_any_text_is_judged_and_right_means_a_number(text, answer):
    right = arithmetic_answer(["p"], [text], [answer])[0]
    assert right in (0.0, 1.0)
    assert right <= number_only(["p"], [text])[0]
