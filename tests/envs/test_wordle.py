"""The word game: its marks, its rows, and games whose player heeds the last marks."""

import re
from itertools import pairwise

import pytest

from covey.data import games as data
from covey.data.games import mark_letters
from covey.envs.games import Wordle


@pytest.mark.parametrize(
    ("word", "guess", "marks"),
    [("abc", "abc", "+++"), ("abc", "cab", "~~~"), ("abc", "adb", "+-~"), ("abb", "bbb", "-++"), ("bab", "bbc", "+~-")],
)
def test_a_letter_is_marked_as_often_as_the_word_has_it(word: str, guess: str, marks: str) -> None:
    assert mark_letters(word, guess) == marks


def test_it_answers_in_the_form_of_its_prompt() -> None:
    text, chat = Wordle({"prompt": "?", "word": "abc"}), Wordle({"prompt": [{"role": "user"}], "word": "Crane"})
    assert text.reset() == "?"
    assert [text.step(reply).messages for reply in ("cba", " ABC.")] == ["~+~", "+++"]
    assert (
        chat.step("caper").messages
        == "c is right, a is elsewhere, p is not in the word, e is elsewhere, r is elsewhere."
    )


def test_only_the_word_pays_and_only_it_or_nonsense_ends_the_game() -> None:
    game = Wordle({"prompt": "?", "word": "abc"})
    found = {reply: game.step(reply) for reply in ("abd", "abc", "ab", "abcd", "", "a b", "+-~")}
    assert [step.reward for step in found.values()] == [0, 1, 0, 0, 0, 0, 0]
    assert [step.done for step in found.values()] == [False, True, True, True, True, True, True]


def test_no_test_word_is_the_word_of_a_training_game() -> None:
    train, test = ({row["word"] for row in part} for part in data.make_words(42))
    assert (len(train), len(test), train & test) == (269, 67, set())
    assert train | test == set(data.WORDS)
    assert data.make_words(0)[1] != data.make_words(42)[1]


def test_the_player_of_the_examples_heeds_the_last_marks() -> None:
    games = data.make_word_games(0)[1]
    for row in games:
        assert re.fullmatch(r"([a-h]{3}<eos>[+~-]{3}){0,4}[a-h]{3}<eos>", row["completion"])
        turns = re.findall(r"([a-h]{3})<eos>([+~-]{3})?", row["completion"])
        assert turns[-1][0] == row["word"] or len(turns) == data.MAX_GUESSES
        for (guess, marks), (following, _) in pairwise(turns):
            assert marks == mark_letters(row["word"], guess) == mark_letters(following, guess)
