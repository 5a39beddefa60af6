"""What reward functions may return, what they are passed, and how a mistake in one is told."""

import asyncio
import math
import numbers
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest

from covey.config.schema import RewardSafetyConfig
from covey.errors import RecipeError, RewardError
from covey.rewards import scoring
from covey.rewards.call import check_columns, environment_reward, function_names
from covey.rewards.scoring import RewardRunner, score
from covey.types import Completion, Episode, FinishReason, Group


def group(prompt, texts, **columns):
    completions = tuple(
        Completion(np.arange(len(t), dtype=np.int32), np.zeros(len(t)), np.zeros(len(t)), FinishReason.STOP, t)
        for t in texts
    )
    return Group(prompt, np.array([1, 2], dtype=np.int32), completions, columns)


GROUPS = [group("one", ["a", "bb", "ccc"], answer="1"), group("two", ["dddd", ""], answer="2")]


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def returns(values):
    def constant(completions):
        return values

    return constant


def lenient():
    """A runner for which a failure is no score."""
    return RewardRunner(RewardSafetyConfig(on_error="none"))


# What they are passed


def test_all_samples_come_in_one_call_with_columns_repeated():
    seen = []

    def record(prompts, completion_messages, completion_ids, prompt_ids, **columns):
        seen.append((prompts, completion_messages, completion_ids, prompt_ids, columns))
        return [0.0] * len(prompts)

    score(GROUPS, [record])
    ((prompts, messages, ids, prompt_ids, columns),) = seen
    assert prompts == ["one"] * 3 + ["two"] * 2
    assert columns == {"completions": ["a", "bb", "ccc", "dddd", ""], "answer": ["1"] * 3 + ["2"] * 2}
    assert messages == [[{"role": "assistant", "content": text}] for text in columns["completions"]]
    assert (ids, prompt_ids) == ([[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], []], [[1, 2]] * 5)
    assert type(prompt_ids[0][0]) is type(ids[1][0]) is int


def test_a_function_gets_only_what_its_signature_takes():
    def plain(completions):
        return [1.0] * len(completions)

    def keyword_only(*, completions, answer):
        return [float(a) for a in answer]

    def with_default(completions, scale=2.0):
        return [scale] * len(completions)

    (scored,) = score([group("p", ["x"], answer="3", unasked=object())], [plain, keyword_only, with_default])
    assert scored.rewards_by_function == {"plain": [1.0], "keyword_only": [3.0], "with_default": [2.0]}


def test_a_column_that_a_group_lacks_is_none_there():
    groups = [group("p", ["x"], answer="1"), group("q", ["y"], topic="rain")]
    seen = {}
    score(groups, [lambda completions, **columns: seen.update(columns) or [0.0, 0.0]])
    assert (seen["answer"], seen["topic"]) == (["1", None], [None, "rain"])


def test_a_column_cannot_stand_in_for_the_completions():
    groups = [group("p", ["xyz"], completions="fake", prompts="fake", prompt_ids=[9, 9, 9])]
    assert score(groups, [length, lambda prompt_ids: [float(len(ids)) for ids in prompt_ids]])[0].rewards == [5.0]


def test_a_function_that_changes_what_it_gets_changes_nothing_of_others():
    messages = [{"role": "user", "content": "2+2?"}]

    def greedy(prompts, completions, answer, completion_messages, completion_ids, prompt_ids):
        for prompt, chat, ids, tokens in zip(prompts, completion_messages, completion_ids, prompt_ids, strict=True):
            prompt[0]["content"] = chat[0]["content"] = "mine"
            for items in (prompt, ids, tokens):
                items.clear()
        completions.clear()
        answer.reverse()
        return [0.0] * 5

    def after(answer, completion_messages, completion_ids, prompt_ids):
        assert completion_messages[1] == [{"role": "assistant", "content": "bb"}]
        assert (completion_ids[1], prompt_ids[1]) == ([0, 1], [1, 2])
        return [float(a) for a in answer]

    scored = score([replace(g, prompt=messages) for g in GROUPS], [greedy, length, after])
    assert [g.rewards_by_function["length"].tolist() for g in scored] == [[1.0, 2.0, 3.0], [4.0, 0.0]]
    assert [g.rewards_by_function["after"].tolist() for g in scored] == [[1.0] * 3, [2.0] * 2]
    assert all(g.prompt is messages for g in scored)
    assert messages == [{"role": "user", "content": "2+2?"}]


def overwrite(value):
    """Writes into everything inside `value` that can be written into."""
    if isinstance(value, np.ndarray):
        value[...] = 0
    elif isinstance(value, (list, tuple)):
        for inner in value:
            overwrite(inner)
        if isinstance(value, list):
            value.append("mine")
    elif isinstance(value, dict):
        for inner in value.values():
            overwrite(inner)
        value["mine"] = "mine"
    elif isinstance(value, set):
        value.add("mine")
    elif isinstance(value, Case):
        value.inputs.append("mine")


@dataclass
class Case:
    inputs: list


class Unshareable:
    """Something that cannot be copied, as a lock or an open file."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


NESTED = {
    "list": lambda: ["1", ["2"]],
    "dict": lambda: {"cases": [{"input": "1"}]},
    "tuple": lambda: (["1"], {"input": ["2"]}),
    "array": lambda: np.arange(4.0),
    "array of objects": lambda: np.array([["1"], ["2", "3"]], dtype=object),
    "array in a list": lambda: [np.arange(3)],
    "set": lambda: {"1"},
    "object": lambda: Case(["1"]),
}


@pytest.mark.parametrize("sort", NESTED)
def test_a_function_that_writes_into_nested_columns_changes_no_data(sort):
    """Neither the rows that later epochs read, nor what the other samples and functions are passed."""
    value, seen = NESTED[sort](), []

    def vandal(column):
        for entry in column:
            seen.append(repr(entry))
            overwrite(entry)
        return [0.0] * len(column)

    def after(**columns):
        seen.extend(map(repr, columns["column"]))
        return [0.0] * len(columns["column"])

    groups = [group("p", ["a", "b"], column=value), group("q", ["c"], column=value)]
    score(groups, [vandal, after])
    assert set(seen) == {repr(NESTED[sort]())}
    assert len(seen) == 6
    assert repr(value) == repr(NESTED[sort]())


def test_what_cannot_be_copied_is_handed_out_as_it_is_and_what_holds_it_is_copied():
    held = Unshareable()
    column = {"judge": held, "cases": [["1"], (held, ["2"])], "view": MappingProxyType({"cases": ["3"]})}

    def vandal(column):
        assert all(entry["judge"] is held for entry in column)
        for entry in column:
            overwrite(entry["view"]["cases"])
        overwrite(column)
        return [0.0] * 2

    score([group("p", ["a", "b"], column=column)], [vandal])
    assert column == {"judge": held, "cases": [["1"], (held, ["2"])], "view": {"cases": ["3"]}}


def test_functions_are_objects_that_are_called_or_names_and_one_alone_will_do():
    class Judge:
        def __call__(self, completions):
            return [0.5] * len(completions)

    assert score(GROUPS, length)[1].rewards.tolist() == [4.0, 0.0]
    assert score(GROUPS, "number_only")[1].rewards.tolist() == [0.0, 0.0]
    assert score(GROUPS, [Judge()])[0].rewards_by_function["Judge"].tolist() == [0.5] * 3
    assert score([group("p", ["four", "5"], answer="5")], ["arithmetic_answer", "number_only"])[0].rewards.sum() == 2
    functions = [length, length, lambda completions: [], partial(length, extra=1), Judge(), returns([])]
    assert function_names(functions) == ["length", "length_2", "lambda", "length_3", "Judge", "constant"]


def test_names_are_unique_and_hold_letters_digits_and_underscores_alone():
    """A slash would divide the name of a metric; a function keeps its name beside another that is there twice."""
    odd, second = returns([]), returns([])
    odd.__name__, second.__name__ = "math/is right?", "constant_2"
    assert function_names([odd, returns([]), returns([]), second]) == [
        "math_is_right_", "constant", "constant_3", "constant_2"
    ]  # fmt: skip
    runner = RewardRunner(RewardSafetyConfig(on_error_of={"math/is right?": "none"}))
    assert (runner.policy("math_is_right_"), runner.policy("constant")) == ("none", "raise")


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([[0.1, 0.0, 1e-14], [0.2, 0.0, 0.0], [-0.3, 0.0, 0.0]], [0.0, 0.0, 0.0]),
        ([[1e6 + 0.1, 0.1, 0.2], [-1e6, 0.0, 0.0]], [0.1, 0.1, 0.2]),
        ([[0.1, 0.3, None], [0.2, 0.0, None]], [0.3, 0.3, math.nan]),
        ([[1e-20, 2e-20, 1e-20], [0.0, 0.0, 0.0]], [1e-20, 2e-20, 1e-20]),
        ([[1e6, 1e-3, 2e-3], [-1e6, 0.0, 0.0]], [0.0, 1e-3, 2e-3]),
    ],
)
def test_totals_that_differ_by_rounding_alone_are_equal(values, want):
    """The tolerance follows the summands of a completion, and not those of its neighbours."""
    groups, functions = [group("p", ["a", "b", "c"])], [returns(each) for each in values]
    (scored,) = score(groups, functions)
    assert scored.rewards == pytest.approx(want, rel=1e-9, abs=1e-30, nan_ok=True)
    assert [a == b for a in scored.rewards for b in scored.rewards] == [a == b for a in want for b in want]


def test_a_column_that_no_function_can_get_is_told_once(caplog):
    """The argument `completion_ids` is that of the samples."""
    for _ in range(2):
        check_columns(length, [{"prompt": "one", "completion_ids": [1], "answer": "1"}])
    assert [record.message for record in caplog.records] == [
        "no reward function gets the data's column completion_ids: the argument of this name is another; rename it"
    ]


def misspelt(completions, answr):
    return []


def positional(completions, /):
    return []


@pytest.mark.parametrize(
    ("function", "what"),
    [(misspelt, r"asks for 'answr'[\s\S]*did you mean 'answer'"), (positional, "asks for 'completions'")],
)
def test_an_argument_that_nothing_gives_is_named(function, what):
    with pytest.raises(RewardError, match=f"'{function.__name__}' {what}"):
        score(GROUPS, [function])


# What comes out


def test_totals_are_weighted_sums_in_float64_and_groups_keep_their_own():
    scored = score(GROUPS, [length, returns([1, 0, 1, 0, 1])], weights=[0.5, 2.0])
    assert [g.rewards.tolist() for g in scored] == [[2.5, 1.0, 3.5], [2.0, 2.0]]
    assert [g.rewards_by_function["length"].tolist() for g in scored] == [[1.0, 2.0, 3.0], [4.0, 0.0]]
    assert all(g.rewards.dtype == np.float64 for g in scored)
    assert all(r.dtype == np.float64 for g in scored for r in g.rewards_by_function.values())
    assert [g.prompt for g in scored] == ["one", "two"]
    assert GROUPS[0].rewards is None, "the groups given are not changed"


@pytest.mark.parametrize(
    ("weights", "totals"), [([1, 1], [7.0, 1.0, np.nan, 5.0, 5.0]), ([0.5, 0], [np.nan, 0.5, np.nan, 1.0, 0.0])]
)
def test_none_and_a_weight_of_zero_count_for_nothing_and_a_sample_with_no_value_is_nan(weights, totals):
    """A function that is only watched neither adds to a sum nor makes a sample one that was scored."""
    judge, watched = returns([None, 1.0, None, 2.0, 0.0]), returns([7.0, None, None, 3.0, 5.0])
    scored = score(GROUPS, [judge, watched], weights=weights)
    assert np.array_equal(np.concatenate([g.rewards for g in scored]), totals, equal_nan=True)
    shown = np.concatenate([g.rewards_by_function["constant_2"] for g in scored])
    assert np.array_equal(shown, [7.0, np.nan, np.nan, 3.0, 5.0], equal_nan=True)


@pytest.mark.parametrize("of_environment", [environment_reward("game"), "environment"])
def test_an_episode_that_its_environment_does_not_score_is_not_scored_by_others(of_environment):
    """It would count as if it had earned 0: more than one that failed at -1, less than one that solved its task."""
    one = group("one", ["a", "b", "c"])
    earned = zip(one.completions, (1.0, None, -1.0), strict=True)
    one = replace(one, completions=tuple(replace(c, episode=Episode(reward=reward)) for c, reward in earned))
    functions = [of_environment, returns([0.25] * 3)]
    assert np.array_equal(score([one], functions)[0].rewards, [1.25, np.nan, -0.75], equal_nan=True)
    assert score([one], functions, [0.0, 1.0])[0].rewards.tolist() == [0.25] * 3


NUMBERS = [
    [0.7] * 5,
    [0, 0.7, 1, 0.3, 0],
    np.array([1, 0, 1, 0, 1]),
    np.array([0.5] * 5, dtype=ml_dtypes.bfloat16),
    [np.float32(0.7), np.int8(1), np.bool_(True), None, 2],
    [Fraction(7, 10)] * 5,
    [np.array(0.7)] * 5,
]


@pytest.mark.parametrize("values", NUMBERS, ids=lambda v: type(v[0]).__name__ + type(v).__name__)
def test_numbers_of_any_kind_arrive_as_they_are(values):
    scored = score(GROUPS, [returns(values)])
    wanted = [np.nan if value is None else float(value) for value in values]
    assert np.array_equal(np.concatenate([g.rewards for g in scored]), wanted, equal_nan=True)


def test_an_array_of_integers_does_not_truncate_another_functions_floats():
    """A reward of 0.7 stays 0.7, whichever function comes first; in an array of integers it would become 0."""
    whole, part = returns(np.array([1, 0, 1, 0, 1], np.int8)), returns([0.7] * 5)
    for functions in ([whole, part], [part, whole]):
        scored = score(GROUPS, functions)
        np.testing.assert_allclose(np.concatenate([g.rewards for g in scored]), [1.7, 0.7, 1.7, 0.7, 1.7])
        parts = [g.rewards_by_function.values() for g in scored]
        assert sorted({float(x) for values in parts for array in values for x in array}) == [0.0, 0.7, 1.0]


# What is refused


OBJECT = pytest.param(object(), id="object")  # its own name holds an address


@pytest.mark.parametrize("values", [1.0, np.array(1.0), None, "12345", b"12345", {}, OBJECT, [], [1.0], [1.0] * 6])
def test_values_that_are_not_one_for_each_completion_are_refused_and_never_broadcast(values):
    with pytest.raises(RewardError, match=r"'constant' returned [\s\S]*each of the 5 completions"):
        score(GROUPS, [returns(values)])
    with pytest.raises(RewardError, match="returned 3 values, none for sample 4: 'dddd'"):
        score(GROUPS, [returns(number for number in (1.0, 2.0, 3.0))])


@pytest.mark.parametrize(
    "bad", [math.nan, -math.inf, np.float32("nan"), "1.0", [1.0], 1j, 10**400, Fraction(10**400), OBJECT, np.ones(1)]
)
def test_a_value_that_is_no_finite_number_is_told_with_its_sample(bad):
    with pytest.raises(RewardError, match=r"'constant' gave [\s\S]* for sample 3: 'ccc'"):
        score(GROUPS, [returns([1.0, 2.0, bad, 1.0, 1.0])])


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_refused_for_it_has_no_order(kind):
    with pytest.raises(RewardError, match=rf"'constant' returned a {kind.__name__}, which has no order[\s\S]*a list"):
        score(GROUPS, [returns(kind([5.0, 1.0, 2.0, 4.0, 3.0]))])


@pytest.mark.parametrize("as_list", [False, True])
def test_a_masked_entry_is_not_scored(as_list):
    """A hole of a masked array is a number that is not there, whatever lies under the mask."""
    values = np.ma.array([1.0, 0.5, 2.0, 3.0, 4.0], mask=[0, 1, 0, 0, 1])
    whole = [np.ma.array(v, mask=m) for v, m in zip(values.data, values.mask, strict=True)] if as_list else values
    got = np.concatenate([g.rewards for g in score(GROUPS, [returns(whole)])])
    assert np.array_equal(got, [1.0, np.nan, 2.0, 3.0, np.nan], equal_nan=True)


class UnspeakableError(Exception):
    """An exception, and as a number a value, that cannot be shown."""

    def __str__(self):
        raise ValueError("no words")

    __repr__ = __float__ = __str__


class Panic(BaseException):
    """What a library in Rust raises, PyO3's PanicException among them: no `Exception`."""


def raises(error):
    def broken(completions):
        if "ccc" in completions:
            raise error
        return [1.0] * len(completions)

    return broken


@numbers.Real.register
class Strange:
    """A number that raises whatever is asked of it."""

    def __float__(self):
        raise UnspeakableError

    __repr__ = __float__


ERRORS = (UnspeakableError(), Panic("at the disco"), GeneratorExit(), asyncio.CancelledError())
UNFIT = [(raises(error), f"raised {type(error).__name__}") for error in ERRORS]
UNFIT += [(returns([1.0, 1.0, value, 1.0, 1.0]), f"gave a {type(value).__name__}") for value in (ERRORS[0], Strange())]


@pytest.mark.parametrize(("function", "what"), UNFIT, ids=[what for _, what in UNFIT])
def test_no_exception_escapes_the_policy(function, what):
    failed = {}
    scored = score(GROUPS, [function], runner=lenient(), failed=failed)
    assert np.array_equal(np.concatenate([g.rewards for g in scored]), [1, 1, np.nan, 1, 1], equal_nan=True)
    assert failed == {function.__name__: 1}
    with pytest.raises(RewardError, match=rf"{what}[\s\S]*for sample 3: 'ccc'"):
        score(GROUPS, [function])


def test_long_values_and_completions_are_cut_in_the_message():
    with pytest.raises(RewardError) as caught:
        score([group("p", ["x" * 10_000])], [returns([["y" * 10_000]])])
    assert len(str(caught.value)) < 500


def test_an_error_inside_is_told_by_name_with_its_line_and_its_cause():
    def broken(completions):
        return [len(completions) / 0]

    with pytest.raises(RewardError, match="'broken' raised ZeroDivisionError") as caught:
        score(GROUPS, [length, broken])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    line = broken.__code__.co_firstlineno + 1
    assert caught.value.where == f"{__file__}:{line}"


def fails_for(*culprits):
    """A function that raises for these completions."""

    def broken(completions):
        for text in completions:
            assert text not in culprits, "cannot read this"
        return [1.0] * len(completions)

    return broken


def generates(completions):
    yield from (1 / (len(text) - 4) for text in completions)


def needs_a_column(answer):
    return [float(a) for a in answer]


async def awaits(completions):
    await asyncio.sleep(0)
    raise KeyError("x")


def wants_four(completions):
    if len(completions) == 5:
        raise ValueError("not five")
    raise ValueError("another line")


LACKING = [group("p", ["x", "y"], answer="1"), group("q", ["z", "w"], topic="rain")]
CULPRITS = [
    *((GROUPS, fails_for(text), f"sample {n}: '{text}'") for n, text in ((1, "a"), (5, ""))),
    (GROUPS, fails_for("ccc", "bb"), "for sample 2: 'bb'"),  # of several the first
    (GROUPS, generates, "ZeroDivisionError: .*for sample 4: 'dddd'"),
    (LACKING, needs_a_column, r"raised TypeError: [\s\S]*\(for sample 3: 'z'\)"),
    (GROUPS, awaits, r"'awaits' raised KeyError: 'x' \(for the batch of 5"),
    (GROUPS, wants_four, r"\(for the batch of 5 that begins with 'a'\)"),  # only the whole batch raises
]


@pytest.mark.parametrize(("groups", "function", "what"), CULPRITS)
def test_the_sample_that_a_function_raises_for_is_named(groups, function, what):
    with pytest.raises(RewardError, match=what):
        score(groups, [function])


def indexed(completions, **kwargs):
    """As TRL's conversational rewards begin."""
    return [float("4" in completion[0]["content"]) for completion in completions]


def asked(completions, **kwargs):
    return [
        float("4" in (completion if "#" not in completion else completion.get("content"))) for completion in completions
    ]


async def awaited(completions, **kwargs):
    return indexed(completions)


@pytest.mark.parametrize("function", [indexed, asked, awaited])
def test_a_reward_that_reads_texts_as_chat_messages_is_told_of_completion_messages(function, caplog):
    groups = [group("2+2?", ["#### 4", "#### 5"])]
    with pytest.raises(RewardError, match=r"fix: completions are texts[\s\S]*take completion_messages"):
        score(groups, [function])
    runner = RewardRunner(RewardSafetyConfig(on_error="none"))
    score(groups, [function], runner=runner)
    assert "take completion_messages" in caplog.messages[0]


def test_another_error_is_not_taken_for_a_chat():
    def broken(completions):
        raise TypeError("unhashable type: 'list'")

    with pytest.raises(RewardError) as caught:
        score(GROUPS, [broken])
    assert "completion_messages" not in str(caught.value)


def test_a_slow_function_is_not_called_again_to_find_the_sample(monkeypatch):
    """A judge that timed out would time out many times over."""
    calls = []
    monkeypatch.setattr(scoring, "SEARCH_SECONDS", 0.0)

    def broken(completions):
        calls.append(len(completions))
        raise KeyError("x")

    with pytest.raises(RewardError, match="for the batch of 5"):
        score(GROUPS, [broken])
    assert calls == [5]


def test_ctrl_c_inside_a_function_is_not_a_mistake_of_it():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(GROUPS, [interrupted])


@pytest.mark.parametrize(
    ("functions", "weights", "what"),
    [
        *(([length] * 2, w, "for 2 reward functions") for w in ([1.0], [1.0] * 3, [], [[1.0, 1.0]], [1.0, math.nan])),
        ([length] * 2, [0.0, -0.0], "weights are all 0"),
        ([3], None, "is no reward function"),
        ([dict], None, "is no reward function"),
        ([], None, "no reward function"),
    ],
)
def test_functions_and_weights_that_make_no_sense_are_refused(functions, weights, what):
    with pytest.raises(RecipeError, match=what):
        score(GROUPS, functions, weights=weights)


# Async


def test_async_functions_run_side_by_side():
    met = asyncio.Barrier(2)

    async def left(completions):
        await met.wait()
        return [1.0] * len(completions)

    async def right(completions):
        await met.wait()
        return [2.0] * len(completions)

    scored = score(GROUPS, [left, length, right])
    assert scored[0].rewards.tolist() == [4.0, 5.0, 6.0]
    assert list(scored[0].rewards_by_function) == ["left", "length", "right"]


def test_async_functions_run_where_a_loop_is_already_running():
    async def later(completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def notebook():
        return score(GROUPS, [later])

    assert asyncio.run(notebook())[0].rewards.tolist() == [1.0] * 3


@pytest.mark.parametrize("error", [SystemExit(0), Panic("in a task")])
def test_an_exit_in_a_task_of_an_async_function_is_a_failure_of_it(error):
    """asyncio hands an exit of a task to the loop, past the function that awaits it."""

    async def one(text):
        await asyncio.sleep(0)
        if text == "ccc":
            raise error
        return 1.0

    async def judge(completions):
        return await asyncio.gather(*map(one, completions))

    async def at_once(completions):
        return [2.0] * len(completions)

    failed = {}
    scored = score(GROUPS, [judge, length, at_once], runner=lenient(), failed=failed)
    assert failed == {"judge": 5, "length": 0, "at_once": 0}
    assert [g.rewards_by_function["length"].tolist() for g in scored] == [[1.0, 2.0, 3.0], [4.0, 0.0]]
    with pytest.raises(RewardError, match=rf"'judge' raised {type(error).__name__}"):
        score(GROUPS, [judge])


def test_a_coroutine_that_is_no_longer_wanted_is_closed():
    async def later(completions):
        return [1.0] * len(completions)

    def broken(completions):
        raise KeyError("x")

    with pytest.raises(RewardError, match="'broken'"):
        score(GROUPS, [later, broken])  # an unclosed coroutine would warn, and warnings are errors here


def test_a_function_that_raises_before_it_awaits_scores_the_others():
    async def later(completions):
        return [float(len(text)) for text in completions]

    def judge(completions):
        if "ccc" in completions:
            raise KeyError("x")
        return later(completions)

    scored = score(GROUPS, [judge], runner=lenient())
    assert np.array_equal(np.concatenate([g.rewards for g in scored]), [1, 2, np.nan, 4, 0], equal_nan=True)
