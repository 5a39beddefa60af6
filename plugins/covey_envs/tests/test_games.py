"""The built-in games: their answers, their rows, and games whose player follows the answers."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest

from covey_envs import game_rows as games
from covey_envs.game_rows import mark_letters
from covey_envs.games import Guess, Wordle

CAPER = "c is right, a is elsewhere, p is not in the word, e is elsewhere, r is elsewhere."
CHAT = [{"role": "user"}]
ANSWERS = [
    (Guess, {"prompt": "10-40:", "number": 20}, {"19": ">", " 21. ": "<", "20": "="}),
    (Guess, {"prompt": CHAT, "number": "20"}, {"19": "Higher.", "21": "Lower.", "20": "Right!"}),
    (Wordle, {"prompt": "?", "word": "abc"}, {"cba": "~+~", " ABC.": "+++"}),
    (Wordle, {"prompt": CHAT, "word": "Crane"}, {"caper": CAPER}),
]


@pytest.mark.parametrize(("game", "row", "answers"), ANSWERS)
def test_a_game_answers_in_the_form_of_its_prompt(game: Any, row: dict[str, Any], answers: dict[str, str]) -> None:
    episode = game(row)
    assert episode.reset() == row["prompt"]
    assert {reply: episode.step(reply).messages for reply in answers} == answers


@pytest.mark.parametrize(
    ("game", "replies"),
    [
        (Guess({"prompt": "10-40:", "number": 20}), ("19", "20", "twenty", "20 or 21", "", "-20", "2" * 5000)),
        (Wordle({"prompt": "?", "word": "abc"}), ("abd", "abc", "ab", "abcd", "", "a b", "+-~")),
    ],
)
def test_only_what_is_right_pays_and_only_it_or_nonsense_ends_the_game(game: Any, replies: tuple[str, ...]) -> None:
    steps = [game.step(reply) for reply in replies]
    assert [step.reward for step in steps] == [0, 1, 0, 0, 0, 0, 0]
    assert [step.done for step in steps] == [False, True, True, True, True, True, True]


def test_what_a_guess_excludes_at_least_earns_half_of_the_reward() -> None:
    game = Guess({"prompt": "10-40:", "number": 20, "low": 10, "high": 40})
    rewards = [game.step(str(guess)).reward for guess in (25, 50, 5, 17)]
    sure = [(31, 15), (1, 1), (1, 1), (15, 7)]  # of 10 to 24, the guess 17 leaves seven
    assert rewards == pytest.approx([0.5 * math.log(a / b) / math.log(31) for a, b in sure])
    assert sum([*rewards, game.step("20").reward]) == 1


def test_no_test_range_is_trained_on_and_five_guesses_are_enough() -> None:
    train, test = games.make_ranges(42)
    ranges = [{row["prompt"] for row in part} for part in (train, test)]
    assert not ranges[0] & ranges[1]
    assert len(ranges[1]) == round(0.2 * (len(ranges[0]) + len(ranges[1])))
    for row in test:
        low, high = map(int, re.findall(r"\d+", row["prompt"]))
        assert 10 <= low <= row["number"] <= high <= 99
        assert high - low < 2**5 - 1
    assert games.make_ranges(42)[0] == train
    assert games.make_ranges(0)[1] != test


def test_the_guesser_of_the_examples_follows_the_answers() -> None:
    for row in games.make_range_games(0)[1][:200]:
        low, high = map(int, re.findall(r"\d+", row["prompt"]))
        turns = re.fullmatch(r"(\d\d<eos>[<>]){0,4}\d\d<eos>", row["completion"])
        assert turns, row
        for number, answer in re.findall(r"(\d\d)<eos>([<>]?)", row["completion"]):
            assert low <= int(number) <= high
            assert answer == ("" if int(number) == row["number"] or not answer else "<>"[row["number"] > int(number)])
            low, high = (int(number) + 1, high) if answer == ">" else (low, int(number) - 1)


@pytest.mark.parametrize(
    ("word", "guess", "marks"),
    [("abc", "abc", "+++"), ("abc", "cab", "~~~"), ("abc", "adb", "+-~"), ("abb", "bbb", "-++"), ("bab", "bbc", "+~-")],
)
def test_a_letter_is_marked_as_often_as_the_word_has_it(word: str, guess: str, marks: str) -> None:
    assert mark_letters(word, guess) == marks


def test_no_test_word_is_the_word_of_a_training_game() -> None:
    train, test = ({row["word"] for row in part} for part in games.make_words(42))
    assert (len(train), len(test), train & test) == (269, 67, set())
    assert train | test == set(games.WORDS)
    assert games.make_words(0)[1] != games.make_words(42)[1]


def test_the_word_player_of_the_examples_heeds_the_last_marks() -> None:
    for row in games.make_word_games(0)[1]:
        assert re.fullmatch(r"([a-h]{3}<eos>[+~-]{3}){0,4}[a-h]{3}<eos>", row["completion"])
        turns = re.findall(r"([a-h]{3})<eos>([+~-]{3})?", row["completion"])
        assert turns[-1][0] == row["word"] or len(turns) == games.MAX_GUESSES
        for (word, marks), (following, _) in pairwise(turns):
            assert marks == mark_letters(row["word"], word) == mark_letters(following, word)
