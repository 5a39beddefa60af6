import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_gsm8k.rewards import (
    TAGS,
    after_marker,
    answer_close,
    answer_number,
    answer_ratio,
    exact_answer,
    exact_answer_strict,
    format_approximate,
    format_exact,
    sections,
)


def tagged(answer):
    return f"<reasoning>because</reasoning><answer>{answer}</answer>"


GOOD = "<reasoning>2 and 2 make 4</reasoning><answer>4</answer>"

LAYOUT = [
    # completion, reward 1 (exact), reward 2 (approximate)
    (GOOD, 3.0, 2.0),
    (f"\n  {GOOD} \n", 3.0, 2.0),
    ("<reasoning>\nline\nline\n</reasoning>\n<answer>\n4\n</answer>\n", 3.0, 2.0),
    ("<reasoning>r</reasoning> so <answer>4</answer>", 3.0, 2.0),
    (f"Sure!\n{GOOD}", 0.0, 2.0),
    (f"{GOOD} Done.", 0.0, 2.0),
    ("<reasoning></reasoning><answer>4</answer>", 0.0, 2.0),
    ("<reasoning>r</reasoning><answer> </answer>", 0.0, 2.0),
    ("<answer>4</answer><reasoning>r</reasoning>", 0.0, 2.0),
    ("</reasoning>r<reasoning><answer>4</answer>", 0.0, 2.0),
    ("<reasoning>r</reasoning><answer>4", 0.0, 1.0),
    ("<answer>4</answer>", 0.0, 0.0),
    ("</answer>", 0.0, -1.0),
    ("", 0.0, -2.0),
    (f"{GOOD}<answer>5</answer>", 0.0, 0.0),
    (GOOD + GOOD, 0.0, -2.0),
    ("<Reasoning>r</Reasoning><Answer>4</Answer>", 0.0, -2.0),
    ("<reasoning>" * 3 + "r</reasoning><answer>4</answer>", 0.0, 1.0),
]


@pytest.mark.parametrize(("text", "exact", "approximate"), LAYOUT)
def test_rewards_1_and_2_line_by_line(text, exact, approximate):
    assert format_exact(prompts=["p"], completions=[text]) == [exact]
    assert format_approximate(prompts=["p"], completions=[text]) == [approximate]


@given(st.lists(st.sampled_from([*TAGS, "4", " ", "\n", "x", "<", ">"]), max_size=12).map("".join))
def test_any_order_of_tags_is_judged(text):
    found = sections(text)
    assert format_exact(["p"], [text]) == [3.0 if found else 0.0]
    assert -2.0 <= format_approximate(["p"], [text])[0] <= 2.0
    if found:
        reasoning, answer = found
        assert text.strip().startswith(f"<reasoning>{reasoning}</reasoning>")
        assert text.strip().endswith(f"<answer>{answer}</answer>")
        assert format_approximate(["p"], [text]) == [2.0]


def test_a_megabyte_of_tags_is_judged():
    for tag in TAGS:
        assert sections(tag * 100_000) is None


RATIO = [
    # guess, truth, reward 3, reward 4, close
    ("18", "18", 3.0, 1.5, 1.0),
    (" 18 ", "18", 1.5, 1.5, 1.0),
    ("18", " 18 ", 1.5, 1.5, 1.0),
    ("18.00", "18", 0.5, 1.5, 1.0),
    ("1000", "1,000", 0.5, 1.5, 1.0),
    ("9", "10", 0.5, 0.0, 1.0),  # 0.9 itself
    ("11", "10", 0.5, 0.0, 1.0),  # 1.1 itself, which floats miss for some numbers
    ("8.99", "10", 0.25, 0.0, 0.0),
    ("11.01", "10", 0.25, 0.0, 0.0),
    ("7.99", "10", -1.0, 0.0, 0.0),
    ("12.01", "10", -1.0, 0.0, 0.0),
    ("-10", "10", -1.0, 0.0, 0.0),
    ("-10.5", "-10", 0.5, 0.0, 1.0),
    ("0", "10", -1.0, 0.0, 0.0),
    ("0.0", "0", 0.5, 1.5, 1.0),
    ("1", "0", -1.0, 0.0, 0.0),
    ("0.01", "0", -1.0, 0.0, 0.0),
    ("about $1,050 or so", "1000", -0.5, 0.0, 1.0),
    ("ten", "10", -0.5, 0.0, 0.0),
    ("10 dollars", "10", -0.5, 1.5, 1.0),
    ("20 or 10", "10", -0.5, 0.0, 0.0),
    ("20/2", "10", -0.5, 0.0, 0.0),
    ("10", "ten", -0.5, 0.0, 0.0),
    ("10", None, 0.0, 0.0, 0.0),
    ("10", "", 0.0, 0.0, 0.0),
    ("None", None, 0.0, 0.0, 0.0),
    ("18", 18, 3.0, 1.5, 1.0),
    ("18", 18.0, 0.5, 1.5, 1.0),
    ("18", np.int64(18), 3.0, 1.5, 1.0),
    ("9" * 5000, "9", -0.5, 0.0, 0.0),
    ("inf", "10", -0.5, 0.0, 0.0),
    ("__import__('os').getcwd()", "10", -0.5, 0.0, 0.0),
]


@pytest.mark.parametrize(("guess", "truth", "ratio", "number", "close"), RATIO)
def test_rewards_3_and_4_and_whether_an_answer_is_close_line_by_line(guess, truth, ratio, number, close):
    assert answer_ratio(["p"], [tagged(guess)], answer=[truth]) == [ratio]
    assert answer_number(["p"], [tagged(guess)], answer=[truth]) == [number]
    assert answer_close(["p"], [tagged(guess)], answer=[truth]) == [close]


@pytest.mark.parametrize("text", ["18", "<answer>18</answer>", f"So: {tagged('18')}", tagged("18") + tagged("18")])
def test_reward_3_is_nothing_without_the_layout(text):
    assert answer_ratio(["p"], [text], answer=["18"]) == [0.0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>18</answer>", 1.5),
        ("<answer>18", 1.5),
        ("<answer>none</answer> 18", 0.0),
        ("<answer></answer><answer>18</answer>", 0.0),
        ("<answer>7</answer><answer>18</answer>", 0.0),
    ],
)
def test_reward_4_reads_the_first_number_inside_the_tag(text, reward):
    assert answer_number(["p"], [text], answer=["18"]) == [reward]
    assert answer_close(["p"], [text], answer=["18"]) == [float(reward > 0)]


EXACT = [
    # completion, reference, as a number, nanochat's rule
    ("#### 10", "10", 1.0, 1.0),
    ("#### 10.", "10", 1.0, 0.0),
    ("#### $10", "10", 1.0, 0.0),
    ("####10", "10", 1.0, 0.0),
    ("####\n10", "10", 1.0, 0.0),
    ("#### 18.00", "18", 1.0, 0.0),
    ("#### 1,000", "1000", 1.0, 1.0),
    ("#### 1000", "1,000", 1.0, 1.0),
    ("#### \u22125", "-5", 1.0, 0.0),
    ("#### 10 dollars", "10", 1.0, 1.0),
    ("#### **10**", "10", 1.0, 0.0),
    ("#### Step 1\n10 + 8\n#### 18", "18", 1.0, 1.0),
    ("#### 18 ####", "18", 1.0, 1.0),
    ("#### 17\n#### 18", "18", 1.0, 0.0),
    ("#### 18\n#### 17", "18", 0.0, 1.0),
    ("##### 18", "18", 1.0, 1.0),
    ("### 18", "18", 0.0, 0.0),
    ("18", "18", 0.0, 0.0),
    ("#### 100", "10", 0.0, 0.0),
    ("#### 20/2", "10", 0.0, 0.0),
    ("####", "10", 0.0, 0.0),
    ("", "", 0.0, 0.0),
    ("####", None, 0.0, 0.0),
    ("#### ,", "", 0.0, 0.0),
    ("#### None", None, 0.0, 0.0),
    ("#### none", "none", 0.0, 0.0),
    ("#### 72", "48+24 = <<48+24=72>>72\n#### 72", 1.0, 1.0),
    ("#### 10", 10, 1.0, 1.0),
    ("#### 10", 10.0, 1.0, 0.0),
    ("#### " + "9" * 5000, "9", 0.0, 0.0),
    ("#### 1e999999999", "1", 0.0, 1.0),
]


@pytest.mark.parametrize(("text", "truth", "exact", "strict"), EXACT)
def test_exact_answer_line_by_line(text, truth, exact, strict):
    assert exact_answer(prompts=["p"], completions=[text], answer=[truth]) == [exact]
    assert exact_answer(prompts=["p"], completions=[text], answer=[truth], strict=True) == [strict]
    assert exact_answer_strict(prompts=["p"], completions=[text], answer=[truth]) == [strict]


def test_a_missing_reference_among_others_does_not_shift_them():
    texts = ["#### 1", "#### 2", "#### 3"]
    assert exact_answer(texts, texts, answer=["1", None, "3"]) == [1.0, 0.0, 1.0]


def test_references_and_completions_must_pair_up():
    with pytest.raises(ValueError, match="zip"):
        exact_answer(["p"] * 2, ["#### 1"] * 2, answer=["1"])


@given(st.text(alphabet="#0123456789 \n.,$-/<answer>reasoning", max_size=60), st.one_of(st.none(), st.text(max_size=8)))
def test_any_text_gets_a_listed_value(text, truth):
    assert exact_answer(["p"], [text], [truth])[0] in (0.0, 1.0)
    assert exact_answer(["p"], [text], [truth], strict=True)[0] in (0.0, 1.0)
    assert answer_ratio(["p"], [text], [truth])[0] in (-1.0, -0.5, 0.0, 0.25, 0.5, 1.5, 3.0)
    assert answer_number(["p"], [text], [truth])[0] in (0.0, 1.5)
    assert answer_close(["p"], [text], [truth])[0] >= float(answer_number(["p"], [text], [truth])[0] > 0)


def test_a_megabyte_of_markers_is_read_once():
    assert after_marker("####" * 250_000) == ""
    assert after_marker("#### 7\n" * 100_000).strip() == "7"
    assert after_marker("#### x\n" * 100_000) == ""
