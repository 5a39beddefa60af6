"""The task long-sums: no problem of its test is trained on, and the call that a prompt shows is right."""

from covey_envs import long_sums
from covey_envs.tool_calls import FORMATS
from covey_envs.tools import calculator
from tests.data.test_tasks import problem, unordered


def test_no_long_sum_of_the_test_is_trained_and_the_shown_call_is_one_that_works():
    train, test = long_sums.make_rows(0)
    assert not unordered(train) & unordered(test)
    assert [len(unordered(part)) for part in (train, test)] == [len(train), len(test)] == [3600, 400]
    call, result = test[0]["prompt"][1]["content"], test[0]["prompt"][2]["content"]
    [shown] = FORMATS["smollm"].parse(call)
    assert calculator(**shown.arguments) in result
    assert all(sum(problem(row)[::2]) == int(row["answer"]) for row in train[:50])
    assert long_sums.make_rows(0) == (train, test)
