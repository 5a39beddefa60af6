"""The two tasks made on the fly: repeatable, and tested on what was not trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.schema import DataConfig
from covey.data import arithmetic, first_letter, load, long_sums
from covey.envs.calls import FORMATS
from covey.envs.tools import calculator
from covey.rewards.numbers import arithmetic_answer

SEEDS = st.integers(0, 2**31 - 1)


def pairs(rows):
    return {(row["topic"], row["letter"]) for row in rows}


def question(row):
    return row["prompt"][-1]["content"]


@given(SEEDS)
def test_no_topic_of_the_test_is_in_training(seed):
    train, test = first_letter.make_rows(seed)
    assert not {row["topic"] for row in train} & {row["topic"] for row in test}
    assert not pairs(train) & pairs(test)
    assert pairs(train) | pairs(test) == {(t, c) for t in first_letter.TOPICS for c in first_letter.LETTERS}


def test_first_letter_has_room_for_a_test_of_a_hundred_prompts():
    train, test = first_letter.make_rows(42)
    assert len(train) == len(pairs(train)) == 1296
    assert len(test) == len(pairs(test)) == 432
    first = test[:100]
    assert len({row["topic"] for row in first}) > 20, "the first hundred are a fair sample"
    assert {row["letter"] for row in first} == set(first_letter.LETTERS)


def test_no_long_sum_of_the_test_is_trained_and_the_shown_call_is_one_that_works():
    train, test = long_sums.make_rows(0)
    problems = [{tuple(sorted(question(row).rstrip("?").split()[2::2])) for row in rows} for rows in (train, test)]
    assert not problems[0] & problems[1]
    assert [len(part) for part in problems] == [len(train), len(test)] == [3600, 400]
    call, result = test[0]["prompt"][1]["content"], test[0]["prompt"][2]["content"]
    [shown] = FORMATS["smollm"].parse(call)
    assert calculator(**shown.arguments) in result
    assert all(sum(map(int, question(row).rstrip("?").split()[2::2])) == int(row["answer"]) for row in train[:50])
    assert long_sums.make_rows(0) == (train, test)


def test_the_topics_are_plain_and_different():
    assert 60 <= len(first_letter.TOPICS) == len(set(first_letter.TOPICS)) <= 100
    shown = {topic for topic, _, _ in first_letter.FEW_SHOT}
    assert not shown & set(first_letter.TOPICS)
    assert all(topic == topic.lower() and len(topic.split()) <= 2 for topic in first_letter.TOPICS)


def test_the_request_names_topic_and_letter():
    row = first_letter.make_rows(0)[0][0]
    assert question(row) == (
        f"Write one short sentence about {row['topic']} that starts with the letter {row['letter']}."
    )
    assert [m["role"] for m in row["prompt"]] == ["user", "assistant", "user", "assistant", "user"]


@given(SEEDS, st.sampled_from(list(arithmetic.LEVELS)))
def test_no_problem_of_the_test_is_trained_in_either_order(seed, level):
    train, test = arithmetic.make_rows(seed, level)

    def problems(rows):
        words = [question(row).rstrip("?").split() for row in rows]
        return {(w[3], *sorted((int(w[2]), int(w[4])))) for w in words}

    shown = {(operation, *sorted(p)) for operation, *p in arithmetic.FEW_SHOT}
    assert not problems(train) & problems(test)
    assert not shown & (problems(train) | problems(test))
    assert train
    assert test


@pytest.mark.parametrize(("level", "count"), [("sums", 229), ("products", 98), ("mixed", 327)])
def test_every_problem_is_there_once_in_each_order(level, count):
    train, test = arithmetic.make_rows(7, level)
    questions = [question(row) for row in [*train, *test]]
    assert len(questions) == len(set(questions)) == count


def test_arithmetic_answers_are_right_and_within_the_level():
    train, test = arithmetic.make_rows(0)
    assert len(test) >= 100
    for row in [*train, *test]:
        _, _, a, operation, b = question(row).rstrip("?").split()
        value = int(a) + int(b) if operation == "+" else int(a) * int(b)
        assert arithmetic_answer([""], [row["answer"]], [value]) == [1.0]
        assert value <= (20 if operation == "+" else 81)


@pytest.mark.parametrize("task", ["first-letter", "arithmetic"])
def test_a_seed_fixes_the_data_and_another_changes_it(task):
    one, again, other = (load(DataConfig(task=task, seed=seed)) for seed in (1, 1, 2))
    assert (one.train, one.test) == (again.train, again.test)
    assert one.train != other.train
    assert one.test != other.test


@pytest.mark.parametrize("task", ["first-letter", "arithmetic"])
def test_the_system_message_stands_first_and_can_be_changed_or_left_out(task):
    def roles(**options):
        return [m["role"] for m in load(DataConfig(task=task, **options)).train[0]["prompt"]]

    assert roles()[0] == "system"
    assert roles()[1:] == roles(system="")
    own = load(DataConfig(task=task, system="Be kind."))
    assert own.system == "Be kind."
    assert own.train[0]["prompt"][0] == own.test[0]["prompt"][0] == {"role": "system", "content": "Be kind."}
