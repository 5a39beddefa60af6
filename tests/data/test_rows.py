"""Every form in which users hold prompts comes out as the same rows (one container type only is a known trap)."""

import itertools

import grain
import numpy as np
import pandas
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.data import rows as rows_module
from covey.data.rows import as_rows
from covey.errors import DataError

ROWS = [{"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?", "answer": "6"}]
CHAT = [{"role": "user", "content": "2+2?"}]


class HubLike:
    """Rows by number and columns by name, as Hugging Face data sets have them."""

    column_names = ("prompt", "answer")

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, key):
        return ROWS[key] if isinstance(key, int) else [row[key] for row in ROWS]


class PolarsLike:
    """A frame that iterates over columns, and gives its rows as Polars does."""

    columns = ("prompt", "answer")

    def __iter__(self):
        return iter([[row[name] for row in ROWS] for name in self.columns])

    def to_dicts(self):
        return ROWS


class DaskLike:
    """A frame of another library: it iterates over the names of its columns."""

    columns = ("prompt", "answer")

    def __iter__(self):
        return iter(self.columns)


FORMS = {
    "rows": ROWS,
    "a tuple of rows": tuple(ROWS),
    "a generator of rows": (row for row in ROWS),
    "rows with prompts": [{"prompts": r["prompt"], "answer": r["answer"]} for r in ROWS],
    "columns": {"prompt": ["2+2?", "3+3?"], "answer": ["4", "6"]},
    "columns of arrays": {"prompts": np.array(["2+2?", "3+3?"]), "answer": np.array(["4", "6"])},
    "columns of bytes": {"prompts": np.array([b"2+2?", b"3+3?"]), "answer": [b"4", b"6"]},
    "columns of objects": {"prompts": np.array(["2+2?", "3+3?"], dtype=object), "answer": ("4", "6")},
    "a hub data set": HubLike(),
    "one batch": [{"prompts": ["2+2?", "3+3?"], "answer": ["4", "6"]}],
    "batches of arrays": [
        {"prompts": np.array(["2+2?"]), "answer": np.array(["4"])},
        {"prompts": np.array([b"3+3?"]), "answer": np.array([b"6"])},
    ],
    "rows of NumPy scalars": [{"prompt": np.str_(r["prompt"]), "answer": np.bytes_(r["answer"])} for r in ROWS],
    "rows of 0-d arrays": [{"prompt": np.array(r["prompt"]), "answer": np.array(r["answer"])} for r in ROWS],
    "a pandas frame": pandas.DataFrame(ROWS),
    "a pandas frame of Arrow": pandas.DataFrame(ROWS).convert_dtypes(dtype_backend="pyarrow"),
    "an Arrow table": pyarrow.Table.from_pylist(ROWS),
    "Arrow batches": pyarrow.Table.from_pylist(ROWS).to_batches(max_chunksize=1),
    "an Arrow reader": pyarrow.Table.from_pylist(ROWS).to_reader(),
    "a Polars frame": PolarsLike(),
    "a grain data set": grain.MapDataset.source(ROWS),
    "a grain data set of batches": grain.MapDataset.source(ROWS).batch(2),
    "a grain iterator": grain.MapDataset.source(ROWS).to_iter_dataset(),
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_rows(data):
    rows = as_rows(data)
    assert rows == ROWS
    assert {type(value) for row in rows for value in row.values()} == {str}


PROMPTS = {
    "texts": ["2+2?", "3+3?"],
    "a tuple of texts": ("2+2?", "3+3?"),
    "an array of texts": np.array(["2+2?", "3+3?"]),
    "an array of bytes": np.array([b"2+2?", b"3+3?"]),
    "an array of objects": np.array(["2+2?", "3+3?"], dtype=object),
    "bytes": [b"2+2?", b"3+3?"],
    "a pandas series": pandas.Series(["2+2?", "3+3?"]),
    "an Arrow array": pyarrow.array(["2+2?", "3+3?"]),
}


@pytest.mark.parametrize("data", PROMPTS.values(), ids=PROMPTS)
def test_prompts_alone_are_rows(data):
    assert as_rows(data) == [{"prompt": "2+2?"}, {"prompt": "3+3?"}]


@pytest.mark.parametrize(
    "data",
    [
        [CHAT],
        [tuple(CHAT)],
        [{"prompt": CHAT}],
        {"prompt": [CHAT]},
        [{"prompts": [CHAT]}],
        [{"prompts": np.array([[m] for m in CHAT], dtype=object)}],
    ],
    ids=["chats", "tuples", "rows", "columns", "a batch", "an array"],
)
def test_chat_prompts_stay_message_lists(data):
    assert as_rows(data) == [{"prompt": CHAT}]


def test_columns_keep_their_types_and_single_values_hold_for_all():
    data = {"prompt": ["a", "b"], "n": np.array([1, 2]), "x": np.float32([0.5, 0.25]), "level": "easy", "none": None}
    rows = as_rows(data)
    assert rows[1] == {"prompt": "b", "n": 2, "x": 0.25, "level": "easy", "none": None}
    assert type(rows[1]["n"]) is int


KEPT = {
    "several turns": [{"prompt": [{"role": "system", "content": "Be brief."}, *CHAT], "answer": "4"}],
    "lists, which are no batches": [{"prompt": "a", "choices": ["x", "y", "z"]}],
    "bytes that are no text": [{"prompt": "a", "image": b"\xff\xfe"}],
    "None, for which pandas has NaN": [
        {"prompt": "a", "answer": "4", "n": 1.0, "chat": CHAT},
        {"prompt": "b", "answer": None, "n": None, "chat": None},
    ],
}


@pytest.mark.parametrize("rows", KEPT.values(), ids=KEPT)
def test_values_of_rows_stay_as_they_are(rows):
    assert as_rows(rows) == as_rows(pandas.DataFrame(rows)) == rows


def test_examples_come_from_frames_and_tables_too() -> None:
    as_examples = pytest.importorskip("covey_sft.examples").as_examples
    rows = [{"prompt": "2+2?", "completion": "4"}, {"prompt": "3+3?", "completion": "6"}]
    assert as_examples(pandas.DataFrame(rows)) == as_examples(pyarrow.Table.from_pylist(rows)) == rows
    chats = [{"messages": [*CHAT, {"role": "assistant", "content": "4"}]}]
    assert as_examples(pyarrow.Table.from_pylist(chats)) == [{"prompt": CHAT, "completion": "4"}]


ANSWERED = [*CHAT, {"role": "assistant", "content": "4"}]
SHAREGPT = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    ("data", "answered"),
    [
        ([{"messages": ANSWERED}], True),
        ([{"messages": CHAT}], False),
        ({"messages": [ANSWERED]}, True),
        ([{"messages": [ANSWERED]}], True),
        ([{"conversations": SHAREGPT}], True),
        ([{"conversations": [SHAREGPT]}], True),
        ([{"instruction": "2+2?", "output": "4"}], True),
        ([{"instruction": "2+2?"}], False),
        ({"instruction": ["2+2?"], "input": [""], "output": ["4"]}, True),
    ],
)
def test_a_chat_without_a_prompt_is_asked_up_to_its_answer(data, answered) -> None:
    assert as_rows(data) == [{"prompt": CHAT, "completion": "4"} if answered else {"prompt": CHAT}]


REFUSED = {
    "an empty frame": (pandas.DataFrame({"prompt": []}), "empty"),
    "empty list": ([], "empty"),
    "empty columns": ({"prompt": []}, "empty"),
    "nothing": ({}, "no prompt"),
    "a path": ("train.jsonl", "one text"),
    "a number": (3, "int"),
    "None": (None, "NoneType"),
    "no prompt column": ([{"promt": "a"}], "item 1.*no prompt; the columns are 'promt'\n[\\s\\S]*did you mean 'promt'"),
    "splits": ({"train": [], "test": []}, "several splits[\\s\\S]*data\\['train'\\]"),
    "ragged columns": ({"prompt": ["a", "b"], "answer": ["1"]}, "'answer' has 1 entries and 'prompt' has 2"),
    "a prompt for a column": ({"prompt": "a"}, "column 'prompt' is a str"),
    "an empty prompt": (["a", " "], "item 2"),
    "a missing prompt": ([{"prompt": None}], "item 1"),
    "a number for a prompt": ([{"prompt": 3}], "item 1"),
    "a message without a role": ([{"prompt": [{"content": "a"}]}], "item 1"),
    "a message of parts": ([[{"role": "user", "content": [{"type": "image"}]}]], "item 1"),
    "an answer alone": ([{"messages": ANSWERED[1:]}], "item 1.*the prompt is"),
    "rows of a frame": (pandas.DataFrame(ROWS).iterrows(), "item 1 .* tuple out of a table.*\n.*\n.*the table itself"),
    "tuples of a frame": (pandas.DataFrame(ROWS).itertuples(), "item 1 .* out of a table"),
    "series of a frame": ([row for _, row in pandas.DataFrame(ROWS).iterrows()], "item 1 .* Series out of a table"),
    "a frame of another library": (DaskLike(), "names of its columns .'prompt'.[\\s\\S]*rows as a list of dicts"),
    "a frame without prompts": (pandas.DataFrame({"promt": ["a"]}), "item 1.*no prompt[\\s\\S]*did you mean 'promt'"),
    "rows in rows": ([[{"prompt": "a"}]], "item 1"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_what_holds_no_prompts_is_refused_by_name(data, message):
    with pytest.raises(DataError, match=message):
        as_rows(data)


def test_our_own_data_set_is_told_to_pass_a_part():
    from covey.data.sources import Dataset

    with pytest.raises(DataError, match=r"pass .train"):
        as_rows(Dataset("x", ROWS, ROWS))


def test_endless_data_is_refused(monkeypatch):
    with pytest.raises(DataError, match="before repeat"):
        as_rows(grain.MapDataset.source(ROWS).repeat())
    monkeypatch.setattr(rows_module, "MAX_ROWS", 100)
    with pytest.raises(DataError, match="before repeat"):
        as_rows(itertools.cycle(ROWS))


@given(st.lists(st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text())), max_size=5))
def test_any_list_of_dicts_is_rows_or_a_data_error(data):
    try:
        rows = as_rows(data)
    except DataError:
        return
    assert as_rows(rows) == rows


def test_a_column_that_only_some_rows_have_is_none_in_the_others() -> None:
    """A batch without any row that has it would else refuse the reward function that a larger batch serves."""
    rows = as_rows([{"prompt": "a", "answer": "1"}, {"prompt": "b"}, "c"])
    assert rows == [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": None}]
