"""The guessing game: its answers, its rows, and games whose player follows the answers."""

import math
import re

import pytest

from covey.data import games as data
from covey.envs.games import Guess


def test_it_answers_in_the_form_of_its_prompt() -> None:
    text, chat = Guess({"prompt": "10-40:", "number": 20}), Guess({"prompt": [{"role": "user"}], "number": "20"})
    assert text.reset() == "10-40:"
    assert [text.step(reply).messages for reply in ("19", " 21. ", "20")] == [">", "<", "="]
    assert [chat.step(reply).messages for reply in ("19", "21", "20")] == ["Higher.", "Lower.", "Right!"]


def test_only_the_number_pays_and_only_it_or_nonsense_ends_the_game() -> None:
    game = Guess({"prompt": "10-40:", "number": 20})
    found = {reply: game.step(reply) for reply in ("19", "20", "twenty", "20 or 21", "", "-20", "2" * 5000)}
    assert [step.reward for step in found.values()] == [0, 1, 0, 0, 0, 0, 0]
    assert [step.done for step in found.values()] == [False, True, True, True, True, True, True]


def test_what_a_guess_excludes_at_least_earns_half_of_the_reward() -> None:
    game = Guess({"prompt": "10-40:", "number": 20, "low": 10, "high": 40})
    rewards = [game.step(str(guess)).reward for guess in (25, 50, 5, 17)]
    sure = [(31, 15), (1, 1), (1, 1), (15, 7)]  # of 10 to 24, the guess 17 leaves seven
    assert rewards == pytest.approx([0.5 * math.log(a / b) / math.log(31) for a, b in sure])
    assert sum([*rewards, game.step("20").reward]) == 1


def test_no_test_range_is_trained_on_and_five_guesses_are_enough() -> None:
    train, test = data.make_ranges(42)
    ranges = [{row["prompt"] for row in part} for part in (train, test)]
    assert not ranges[0] & ranges[1]
    assert len(ranges[1]) == round(0.2 * (len(ranges[0]) + len(ranges[1])))
    for row in test:
        low, high = map(int, re.findall(r"\d+", row["prompt"]))
        assert 10 <= low <= row["number"] <= high <= 99
        assert high - low < 2**5 - 1
    assert data.make_ranges(42)[0] == train
    assert data.make_ranges(0)[1] != test


def test_the_player_of_the_examples_follows_the_answers() -> None:
    for row in data.make_range_games(0)[1][:200]:
        low, high = map(int, re.findall(r"\d+", row["prompt"]))
        turns = re.fullmatch(r"(\d\d<eos>[<>]){0,4}\d\d<eos>", row["completion"])
        assert turns, row
        for guess, answer in re.findall(r"(\d\d)<eos>([<>]?)", row["completion"]):
            assert low <= int(guess) <= high
            assert answer == ("" if int(guess) == row["number"] or not answer else "<>"[row["number"] > int(guess)])
            low, high = (int(guess) + 1, high) if answer == ">" else (low, int(guess) - 1)
