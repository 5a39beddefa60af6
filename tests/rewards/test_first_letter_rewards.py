import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.data.first_letter import FEW_SHOT, TOPICS
from covey.rewards.first_letter import RULES, broken_rules, first_letter, sentence, starts_with_letter

LETTER = [
    ("Bees like rain.", 1.0),
    ("  Bees like rain.", 1.0),
    ("bees like rain.", 0.0),
    ('"Bees like rain."', 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("text", "reward"), LETTER)
def test_the_first_character_is_the_letter(text, reward):
    assert first_letter(prompts=["p"], completions=[text], letter=["B"]) == [reward]
    assert first_letter(prompts=["p"], completions=[text], letter=["b"]) == [reward]


SENTENCES = [
    ("Rainy days make me happy!", "rain"),
    ("It rained on Bob's house, and on ours.", "rain"),
    ("A city never sleeps.", "cities"),
    ("Old parties end, new ones begin.", "party"),
    ("Elephants' ears are very large.", "elephants"),
    ("I dance when nobody looks.", "dancing"),
    ("Warm ice cream is just sweet soup.", "ice cream"),
    ("Eels and fish swim together.", "fish"),
    ("Many well-known cafés sell good coffee.", "coffee"),
    ("The sun is the star at the center of the solar system.", "the sun"),
    ("Over 300 trains leave the station daily.", "trains"),
]


@pytest.mark.parametrize(("text", "topic"), SENTENCES)
def test_an_honest_sentence_breaks_no_rule(text, topic):
    assert broken_rules(text, topic) == []
    assert sentence(["p"], [text], topic=[topic]) == [1.0]
    assert starts_with_letter(["p"], [text], letter=[text[0]], topic=[topic]) == [1.0]


@pytest.mark.parametrize(("topic", "letter", "text"), FEW_SHOT)
def test_the_examples_in_the_prompt_are_right_themselves(topic, letter, text):
    assert starts_with_letter(["p"], [text], letter=[letter], topic=[topic]) == [1.0]


TRICKS = [
    # what a model could do instead, and the rules that see it
    ("B is for rain in the garden.", {"real words"}),
    ("B: bees love the rain.", {"one sentence", "real words"}),
    ("Bb bees love the rain.", {"real words"}),
    ("Bbees love the rain.", {"real words"}),
    ("Beginning with the letter B, it may rain.", {"real words", "no echo"}),
    ("Best short sentence about rain.", {"no echo"}),
    ("Bees love honey and flowers.", {"about the topic"}),
    ("Bees love the rainbow.", {"about the topic"}),
    ("Beautiful rain", {"one sentence", "short"}),
    ("Rain.", {"short"}),
    ("Bees love the rain. They dance.", {"one sentence"}),
    ("Bees love the rain", {"one sentence"}),
    ("Bees love the rain\nand the sun.", {"one sentence"}),
    ("Bees love the **rain** today.", {"one sentence"}),
    ("Bees, birds, bats, bears love rain.", {"one sentence"}),
    ("Bees love the rain \U0001f41d.", {"one sentence"}),
    ("Beautiful rain rain falls down.", {"no repetition"}),
    ("Bees bring rain, rain brings bees, bees bring rain.", {"no repetition"}),
    (
        "Bring rain " + "and so on to every house near the big river " * 2 + ".",
        {"short", "one sentence", "no repetition"},
    ),
    ("Bxtr plm the rain.", {"real words"}),
    ("Babababababababababa the rain fell.", {"real words"}),
    ("", {"one sentence", "short", "about the topic", "real words"}),
    ("Be the rain_maker now.", {"one sentence"}),
]


@pytest.mark.parametrize(("text", "rules"), TRICKS)
def test_ways_round_the_task_are_seen(text, rules):
    broken = set(broken_rules(text, "rain"))
    assert rules <= broken
    assert sentence(["p"], [text], topic=["rain"]) == [pytest.approx(0.5 - 0.5 * len(broken) / len(RULES))]
    assert starts_with_letter(["p"], [text], letter=["B"], topic=["rain"]) == [0.0]


def test_every_rule_is_needed_by_some_trick():
    assert set().union(*(rules for _, rules in TRICKS)) == set(RULES)


@pytest.mark.parametrize("missing", [None, "", " ", 3, ["B"]])
def test_a_row_without_letter_or_topic_scores_nothing_for_it(missing):
    text = "Bees love the rain."
    assert first_letter(["p"], [text], letter=[missing]) == [0.0]
    assert broken_rules(text, missing) == ["about the topic"]
    assert starts_with_letter(["p"], [text], letter=["B"], topic=[missing]) == [0.0]


def test_the_letter_alone_is_not_the_task_nor_is_the_sentence():
    texts = ["Bees love rain.", "Bees love.", "Some bees love rain."]
    assert starts_with_letter(["p"] * 3, texts, letter=["B"] * 3, topic=["rain"] * 3) == [1.0, 0.0, 0.0]
    assert first_letter(["p"] * 3, texts, letter=["B"] * 3) == [1.0, 1.0, 0.0]
    assert [s == 1.0 for s in sentence(["p"] * 3, texts, topic=["rain"] * 3)] == [True, False, True]


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_can_be_talked_about(topic):
    assert broken_rules(f"Everyone here talks about {topic}.", topic) == []


@given(st.text(), st.sampled_from(TOPICS))
def test_any_text_is_judged(text, topic):
    shape = sentence(["p"], [text], topic=[topic])[0]
    assert 0.0 <= shape <= 1.0
    strict = starts_with_letter(["p"], [text], letter=["A"], topic=[topic])[0]
    assert strict == float(shape == 1.0 and first_letter(["p"], [text], letter=["A"]) == [1.0])


@pytest.mark.slow
def test_a_megabyte_of_one_sentence_is_judged():
    for text in ("a" * 1_000_000, "a " * 500_000, "a'" * 500_000, "B" + ",-" * 500_000):
        assert broken_rules(text, "rain")
