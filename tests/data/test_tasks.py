"""Tasks made on the fly: repeatable, right, and tested on what was not trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config import recipe
from covey.config.recipe import SFTRecipe
from covey.config.schema import DataConfig, SFTDataConfig
from covey.data import arithmetic, first_letter, load_data
from covey.models.scratch_checkpoint import ScratchCheckpoint
from covey.rewards.numbers import arithmetic_answer

SEEDS = st.integers(0, 2**31 - 1)


def pairs(rows):
    return {(row["topic"], row["letter"]) for row in rows}


def question(row):
    return row["prompt"][-1]["content"]


def problem(row):
    """First number, operation and second number of a row's problem."""
    if isinstance(row["prompt"], str):
        left, right = row["prompt"].removesuffix("=").split("+")
        return int(left), "+", int(right)
    _, _, a, operation, b = question(row).rstrip("?").split()
    return int(a), operation, int(b)


def unordered(rows):
    return {(operation, frozenset((a, b))) for a, operation, b in map(problem, rows)}


# --- first-letter


@given(SEEDS)
def test_no_topic_of_the_test_is_in_training(seed):
    train, test = first_letter.make_rows(seed)
    assert not {row["topic"] for row in train} & {row["topic"] for row in test}
    assert pairs(train) | pairs(test) == {(t, c) for t in first_letter.TOPICS for c in first_letter.LETTERS}


def test_first_letter_has_room_for_a_test_of_a_hundred_prompts():
    train, test = first_letter.make_rows(42)
    assert len(train) == len(pairs(train)) == 1296
    assert len(test) == len(pairs(test)) == 432
    first = test[:100]
    assert len({row["topic"] for row in first}) > 20, "the first hundred are a fair sample"
    assert {row["letter"] for row in first} == set(first_letter.LETTERS)
    assert not {topic for topic, _, _ in first_letter.FEW_SHOT} & set(first_letter.TOPICS)


# --- numbers


@given(SEEDS, st.sampled_from([arithmetic.make_rows, arithmetic.make_sums]))
def test_no_problem_of_the_test_is_trained_in_either_order(seed, make):
    train, test = make(seed)
    shown = {(operation, frozenset(numbers)) for operation, *numbers in arithmetic.FEW_SHOT}
    assert not unordered(train) & unordered(test)
    assert make is arithmetic.make_sums or not shown & (unordered(train) | unordered(test))
    assert train
    assert test


@pytest.mark.parametrize(
    ("task", "count", "held_out", "most"), [("arithmetic", 327, 1 / 3, 81), ("sums", 3240, 1 / 5, 99)]
)
def test_every_problem_is_there_once_in_each_order_with_its_answer(task, count, held_out, most):
    data = load_data(DataConfig(task=task, seed=7))
    problems = [problem(row) for row in [*data.train, *data.test]]
    assert len(problems) == len(set(problems)) == count
    assert len(data.test) / count == pytest.approx(held_out, abs=0.02)
    for (a, operation, b), row in zip(problems, [*data.train, *data.test], strict=True):
        value = a + b if operation == "+" else a * b
        assert arithmetic_answer([""], [row["answer"]], [value]) == [1.0]
        assert value <= most


def test_the_examples_are_the_problems_with_their_answers():
    asked, taught = load_data(DataConfig(task="sums")), load_data(SFTDataConfig(task="sums"))
    for rows, examples in ((asked.train, taught.train), (asked.test, taught.test)):
        assert [row | {"completion": row["answer"]} for row in rows] == examples


def test_both_recipes_hold_the_same_problems_out_and_have_room_for_them():
    first, second = recipe.load("sft-tiny", (), SFTRecipe), recipe.load("arithmetic-tiny")
    assert first.data.seed == second.data.seed
    data, tokenizer = load_data(second.data), ScratchCheckpoint(first.model.source).tokenizer
    assert len(data.test) >= 300
    for row in [*data.train, *data.test]:
        assert len(tokenizer.encode_prompt(row["prompt"])) <= second.rollout.max_prompt_length
        assert len(tokenizer.encode_completion(row["prompt"], row["answer"])) <= second.rollout.max_new_tokens


# --- all of them


@pytest.mark.parametrize("task", ["first-letter", "arithmetic", "sums"])
def test_a_seed_fixes_the_data_and_another_changes_it(task):
    data, again, other = (load_data(DataConfig(task=task, seed=seed)) for seed in (1, 1, 2))
    assert (data.train, data.test) == (again.train, again.test)
    assert data.train != other.train
    assert data.test != other.test


@pytest.mark.parametrize("task", ["first-letter", "arithmetic"])
def test_the_system_message_stands_first_and_can_be_changed_or_left_out(task):
    def roles(**options):
        return [m["role"] for m in load_data(DataConfig(task=task, **options)).train[0]["prompt"]]

    assert roles()[0] == "system"
    assert roles()[1:] == roles(system="")
    own = load_data(DataConfig(task=task, system="Be kind."))
    assert own.system == "Be kind."
    assert own.train[0]["prompt"][0] == own.test[0]["prompt"][0] == {"role": "system", "content": "Be kind."}
