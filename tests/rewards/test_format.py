import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rewards.gsm8k import TAGS, format_approximate, format_exact, sections

GOOD = "<reasoning>2 and 2 make 4</reasoning><answer>4</answer>"

TABLE = [
    # completion, reward 1 (exact), reward 2 (approximate)
    (GOOD, 3.0, 2.0),
    (f"\n  {GOOD} \n", 3.0, 2.0),
    ("<reasoning>\nline\nline\n</reasoning>\n<answer>\n4\n</answer>\n", 3.0, 2.0),
    ("<reasoning>r</reasoning> so <answer>4</answer>", 3.0, 2.0),
    (f"Sure! {GOOD}", 0.0, 2.0),
    (f"Sure!\n{GOOD}", 0.0, 2.0),
    (f"{GOOD} Done.", 0.0, 2.0),
    (f"{GOOD}\nDone.", 0.0, 2.0),
    ("<reasoning></reasoning><answer>4</answer>", 0.0, 2.0),
    ("<reasoning>r</reasoning><answer> </answer>", 0.0, 2.0),
    ("<answer>4</answer><reasoning>r</reasoning>", 0.0, 2.0),
    ("<reasoning>r<answer>4</answer></reasoning>", 0.0, 2.0),
    ("</reasoning>r<reasoning><answer>4</answer>", 0.0, 2.0),
    ("<reasoning>r</reasoning><answer>4", 0.0, 1.0),
    ("<reasoning>r<answer>4</answer>", 0.0, 1.0),
    ("<answer>4</answer>", 0.0, 0.0),
    ("<reasoning>r</reasoning>", 0.0, 0.0),
    ("</answer>", 0.0, -1.0),
    ("4", 0.0, -2.0),
    ("", 0.0, -2.0),
    (f"{GOOD}<answer>5</answer>", 0.0, 0.0),
    (GOOD + GOOD, 0.0, -2.0),
    ("<Reasoning>r</Reasoning><Answer>4</Answer>", 0.0, -2.0),
    ("<reasoning >r</reasoning ><answer >4</answer >", 0.0, -2.0),
    ("<reasoning>" * 3 + "r</reasoning><answer>4</answer>", 0.0, 1.0),
]


@pytest.mark.parametrize(("text", "exact", "approximate"), TABLE)
def test_rewards_1_and_2_line_by_line(text, exact, approximate):
    assert format_exact(prompts=["p"], completions=[text]) == [exact]
    assert format_approximate(prompts=["p"], completions=[text]) == [approximate]


def test_completions_as_chat_messages_count_the_same():
    chats = [[{"role": "assistant", "content": text}] for text, _, _ in TABLE]
    texts = [text for text, _, _ in TABLE]
    assert format_exact(chats, chats) == format_exact(texts, texts)
    assert format_approximate(chats, chats) == format_approximate(texts, texts)


def test_extra_columns_are_allowed():
    assert format_exact(["p"], [GOOD], answer=["4"], question=["2+2?"]) == [3.0]


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
