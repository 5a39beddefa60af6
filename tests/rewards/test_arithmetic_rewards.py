import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rewards.numbers import arithmetic_answer, number_only

TABLE = [
    # completion, right, only a number (the answer is 12)
    ("12", 1.0, 1.0),
    (" 12\n", 1.0, 1.0),
    ("12.", 1.0, 1.0),
    ("12.0", 1.0, 1.0),
    ("**12**", 1.0, 1.0),
    ("13", 0.0, 1.0),
    ("-12", 0.0, 1.0),
    ("121", 0.0, 1.0),
    ("12 13", 0.0, 0.0),
    ("The answer is 12.", 0.0, 0.0),
    ("3 × 4 = 12", 0.0, 0.0),
    ("24/2", 0.0, 0.0),
    ("twelve", 0.0, 0.0),
    ("10 11 12 13", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "right", "number"), TABLE)
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
