"""The task of the smallest models: right sums, each problem once, none of the test's in training in either order."""

from hypothesis import given
from hypothesis import strategies as st

from covey.config import recipe
from covey.config.recipe import SFTRecipe
from covey.config.schema import DataConfig, SFTDataConfig
from covey.data import load, sources, sums
from covey.models.scratch_checkpoint import ScratchCheckpoint
from covey.rewards.numbers import arithmetic_answer
from covey.types import Prompt


def numbers(prompt: Prompt) -> tuple[int, int]:
    left, right = str(prompt).removesuffix("=").split("+")
    return int(left), int(right)


@given(st.integers(0, 2**31 - 1))
def test_no_problem_of_the_test_is_trained_in_either_order(seed: int) -> None:
    train, test = ([numbers(row["prompt"]) for row in part] for part in sums.make_rows(seed))
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in test}
    every = sorted([*train, *test])
    low, high = sums.NUMBERS.start, sums.NUMBERS.stop
    assert every == [(a, b) for a in range(low, high) for b in range(low, high) if a + b < sums.SUM_LIMIT]
    assert abs(len(test) / len(every) - sums.TEST_FRACTION) < 0.01


def test_answers_are_right_and_the_seed_picks_what_is_held_out() -> None:
    one, again, other = (load(DataConfig(task="sums", seed=seed)) for seed in (1, 1, 2))
    assert (one.train, one.test) == (again.train, again.test)
    assert {row["prompt"] for row in one.test} != {row["prompt"] for row in other.test}
    for row in [*one.train, *one.test]:
        assert arithmetic_answer([""], [row["answer"]], [sum(numbers(row["prompt"]))]) == [1.0]


def test_the_examples_are_the_problems_with_their_answers() -> None:
    asked, taught = load(DataConfig(task="sums")), sources.load_examples(SFTDataConfig(task="sums"))
    assert [row["prompt"] for row in asked.train] == [row["prompt"] for row in taught.train]
    assert [row["prompt"] for row in asked.test] == [row["prompt"] for row in taught.test]
    assert all(row["completion"] == row["answer"] for row in [*taught.train, *taught.test])


def test_both_recipes_hold_the_same_problems_out_and_have_room_for_them() -> None:
    first, second = recipe.load("sft-tiny", (), SFTRecipe), recipe.load("arithmetic-tiny")
    assert first.data.seed == second.data.seed
    data, tokenizer = load(second.data), ScratchCheckpoint(first.model.source).tokenizer
    assert len(data.test) >= 300
    for row in [*data.train, *data.test]:
        assert len(tokenizer.encode_prompt(row["prompt"])) <= second.rollout.max_prompt_length
        assert len(tokenizer.encode_completion(row["prompt"], row["answer"])) <= second.rollout.max_new_tokens
