"""Examples for supervised training: the forms that are taken, what is refused, and the worked answers of the tasks."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.cli.main import main
from covey.config.schema import DataConfig, SFTDataConfig
from covey.data import load_data
from covey.data.rows import FORMS
from covey.errors import DataError
from covey.rewards.numbers import arithmetic_answer, number_only
from covey_sft.examples import as_example, as_examples

ROOT = Path(__file__).parents[3]
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
EARLIER = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
SYSTEM = {"role": "system", "content": "C."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
RESULT = {"role": "tool", "content": "4"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# --- forms


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2+2?", "completion": "4"}, "2+2?"),
        ({"prompt": [USER], "completion": "4"}, [USER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER]),
        ({"prompt": "2+2?", "completion": ANSWER}, [USER]),
        ({"messages": [USER, ANSWER]}, [USER]),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, [USER, ANSWER, USER]),
        ({"text": "4"}, ""),
        ({"prompt": "", "completion": "4"}, ""),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, [USER]),
        ({"conversations": [USER, ANSWER], "system": "Count."}, [{"role": "system", "content": "Count."}, USER]),
        ({"instruction": "2+2?", "output": "4"}, [USER]),
        ({"instruction": "2+2?", "input": "", "output": "4", "text": "all of it"}, [USER]),
        ({"instruction": "Add.", "input": "2, 2", "output": "4"}, [{"role": "user", "content": "Add.\n\n2, 2"}]),
        ({"instruction": "2+2?", "output": "4", "system": "C."}, [{"role": "system", "content": "C."}, USER]),
        ({"instruction": "2+2?", "output": "4", "history": [["1+1?", "2"]]}, [*EARLIER, USER]),
        ({"instruction": "2+2?", "output": "4", "history": '[["1+1?", "2"]]'}, [*EARLIER, USER]),
        ({"instruction": "2+2?", "output": "4", "history": None}, [USER]),
        ({"messages": [USER, ANSWER], "system": "C."}, [{"role": "system", "content": "C."}, USER]),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "C."}, [SYSTEM, USER]),
        ({"messages": [PARTS, ANSWER]}, [USER]),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]}, [USER]),
        ({"prompt": [PARTS], "completion": ANSWER}, [USER]),
        ({"messages": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, [USER]),
        ({"messages": [USER, CALL | {"content": None}, RESULT, ANSWER]}, [USER, CALL, RESULT]),
    ],
)
def test_every_form_becomes_a_prompt_and_a_completion(row: dict[str, Any], prompt: Any) -> None:
    example = as_example(row | {"level": 3}, "here")
    example.pop("text", None)
    assert example == {"prompt": prompt, "completion": "4", "level": 3}
    assert as_examples([example]) == [example]  # what is one already stays as it is


def test_columns_and_arrays_are_taken_too() -> None:
    columns = {"prompt": ["a", "b"], "completion": np.array(["x", "y"]).tolist(), "level": [1, 2]}
    rows = [{"prompt": "a", "completion": "x", "level": 1}, {"prompt": "b", "completion": "y", "level": 2}]
    assert as_examples(columns) == as_examples(iter(rows)) == rows
    assert as_examples(columns | {"level": 3}) == [row | {"level": 3} for row in rows]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a"}, "no column 'completion'"),
        ({"prompt": "a", "completions": "b"}, "did you mean 'completions'?"),
        ({"question": "a", "answer": "b"}, "no column 'prompt'"),
        ({"question": "a", "answer": "b"}, "its columns are 'question', 'answer'"),
        (
            {"x" * 10**6: 1, **dict.fromkeys("abcdefghij")},
            f"its columns are '{'x' * 40}', 'a', 'b', 'c', 'd', 'e', 'f', 'g', …",
        ),
        ({}, "its columns are none"),
        ({}, "prompt and completion; or messages; or conversations; or instruction and output; or text"),
        ("a text", "is a str"),
        ({"prompt": "a", "completion": "  "}, "the completion is '  '"),
        ({"prompt": "a", "completion": None}, "the completion is None"),
        ({"prompt": "a", "completion": [USER]}, "one assistant's turn"),
        ({"prompt": "a", "completion": [ANSWER, ANSWER]}, "one assistant's turn"),
        ({"prompt": 3, "completion": "b"}, "the prompt is 3"),
        ({"messages": [USER]}, "do not end with an answer"),
        ({"messages": [ANSWER]}, "do not end with an answer"),
        ({"messages": [USER, ANSWER, USER]}, "do not end with an answer"),
        ({"messages": []}, "the prompt is []"),
        ({"conversations": [{"from": "observation", "value": "a"}]}, "is from 'observation'"),
        ({"conversations": [{"from": "human", "value": None}]}, "the prompt is"),
        ({"conversations": "a"}, "conversations is the text 'a'"),
        ({"conversations": 3}, "the prompt is 3"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "do not end with an answer"),
        ({"instruction": "a"}, "no column 'output'"),
        ({"instruction": "a", "output": None}, "do not end with an answer"),
        ({"instruction": "", "output": "a"}, "the instruction is ''"),
        ({"instruction": "a", "output": " "}, "the completion is ' '"),
        ({"text": ""}, "the completion is ''"),
        ({"instruction": "a", "output": "b", "history": "a, b"}, "the history is 'a, b'"),
        ({"instruction": "a", "output": "b", "history": [{"user": "a", "assistant": "b"}]}, "the history is [{'user'"),
        ({"instruction": "a", "output": "b", "history": ["ab"]}, "the history is ['ab']"),
        ({"instruction": "a", "output": "b", "input": ["c"]}, "the input ['c']"),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "D."}, "the column 'system' is 'D.', and the chat begins with"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "rows with images"),
        ({"messages": [USER, CALL | {"content": "Let me add."}]}, "the answer has tool_calls"),
        ({"messages": [USER, ANSWER | {"reasoning_content": "2 and 2"}]}, "the answer has reasoning_content"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, "the answer has weight"),
        ({"prompt": [USER, ANSWER], "completion": "4"}, "ends with an assistant's message"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "give 'chosen' the name completion"),
    ],
)
def test_what_cannot_be_learnt_is_refused_with_its_place(row: Any, told: str) -> None:
    with pytest.raises(DataError, match="example 2") as caught:
        as_examples([{"text": "fine"}, row])
    assert told in str(caught.value)


@pytest.mark.parametrize("data", [[], {"prompt": ["a"], "completion": []}, "a text", 3, {"prompt": []}])
def test_data_that_are_none_are_refused(data: Any) -> None:
    with pytest.raises(DataError):
        as_examples(data)


def test_one_table_of_forms_serves_errors_help_and_docs(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [", ".join(form.columns) for form in FORMS]
    with pytest.raises(DataError) as caught:
        as_examples([{}])
    assert re.split("; (?:or )?", str(caught.value).partition("wanted: ")[2]) == [
        c.replace(", ", " and ") for c in columns
    ]
    assert main(["sft", "--help"]) == 0
    shown = capsys.readouterr().out
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("## Rows with answers")[2]
    assert re.findall(r"^\| (`.*`) \| (.*) \|$", page.partition("\n## ")[0], re.M) == [
        (re.sub(r"(\w+)", r"`\1`", named), form.description) for named, form in zip(columns, FORMS, strict=True)
    ]
    for named, form in zip(columns, FORMS, strict=True):
        assert re.search(rf"^  {named} +{re.escape(form.description)}$", shown, re.M)


def test_the_rows_on_the_page_are_read_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("One row of each form:")[2]
    (block, *_) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(block, {})
    said = capsys.readouterr().out.splitlines()
    assert said == re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
    assert len(said) == 2
    assert all(re.search(rf'"{name}":', block) for form in FORMS for name in form.columns)


# --- files


def jsonl(path: str, **settings: Any) -> Any:
    return load_data(SFTDataConfig(path=path, **settings))


def test_a_file_may_mix_forms_and_hold_out_its_last_tenth(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"prompt": "a", "completion": "b"}] * 10
    data = jsonl(write(tmp_path / "mine.jsonl", rows))
    assert (len(data.train), len(data.test)) == (18, 2)
    assert data.test == [{"prompt": [USER], "completion": "4"}, {"prompt": "a", "completion": "b"}]


def test_columns_can_be_named_and_a_system_message_set(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"question": "2+2?", "reply": "4"}] * 3)
    data = jsonl(path, prompt_column="question", completion_column="reply", system="Be short.", test_path=path)
    chat = [{"role": "system", "content": "Be short."}, USER]
    assert data.train == [{"prompt": chat, "completion": "4"}] * 3


def test_a_row_of_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"text": "a"}, {"prompt": "b"}])
    with pytest.raises(DataError, match=r"mine\.jsonl, row 2: there is nothing to learn: no column 'completion'"):
        jsonl(path)


def test_plain_text_takes_no_system_message(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"text": "a"}] * 3)
    with pytest.raises(DataError, match="no place for a system message"):
        jsonl(path, system="Be short.")


# --- tasks


def test_the_answers_of_arithmetic_are_worth_the_full_reward() -> None:
    data = load_data(SFTDataConfig(task="arithmetic"))
    assert [{k: row[k] for k in row if k != "completion"} for row in data.train] == load_data(
        DataConfig("arithmetic")
    ).train
    for rows in (data.train, data.test):
        completions, answers = [row["completion"] for row in rows], [row["answer"] for row in rows]
        assert set(arithmetic_answer([], completions, answers)) == set(number_only([], completions)) == {1.0}


def test_a_task_without_answers_says_so() -> None:
    with pytest.raises(DataError, match="no worked answers") as caught:
        load_data(SFTDataConfig(task="first-letter"))
    assert "--data.task" in str(caught.value)
