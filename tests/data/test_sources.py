import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.schema import DataConfig
from covey.data import load_data
from covey.errors import CoveyError, DataError

SAMPLE = [
    {"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n:,}"}
    for n in range(1, 2001, 40)
]


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.jsonl", SAMPLE[:40])
    write(tmp_path / "test.jsonl", SAMPLE[40:])
    return tmp_path


def jsonl(path, **options):
    return load_data(DataConfig(task="jsonl", path=str(path), **options))


# --- splits


def test_training_rows_are_shuffled_by_the_seed_and_test_rows_keep_the_files_order(folder):
    questions = [r["question"] for r in SAMPLE]
    data = jsonl(folder, prompt_column="question")
    order = [row["prompt"] for row in data.train]
    expected = questions[:40]
    random.Random(42).shuffle(expected)
    assert order == expected != questions[:40]
    assert [row["prompt"] for row in data.test] == questions[40:]
    assert [row["prompt"] for row in jsonl(folder, prompt_column="question", seed=1).train] != order


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 40), (0.5, 20), (0.26, 10), (0.001, 1)])
def test_a_fraction_is_a_part_of_the_same_order(folder, fraction, count):
    whole = jsonl(folder, prompt_column="question")
    part = jsonl(folder, prompt_column="question", train_fraction=fraction)
    assert part.train == whole.train[:count]
    assert part.test == whole.test


def test_one_file_holds_out_its_last_tenth(folder):
    data = jsonl(folder / "train.jsonl", prompt_column="question")
    assert [row["prompt"] for row in data.test] == [r["question"] for r in SAMPLE[36:40]]
    both = jsonl(folder / "train.jsonl", prompt_column="question", test_path=str(folder / "test.jsonl"))
    assert (len(both.train), len(both.test)) == (40, 10)


# JSONL


def test_jsonl_rows_keep_their_columns_and_the_prompt_is_taken_from_its_column(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"ask": f"q{i}", "answer": i, "tags": ["x"]} for i in range(20)])
    data = jsonl(path, prompt_column="ask")
    assert data.system is None
    assert data.test == [{"prompt": "q18", "answer": 18, "tags": ["x"]}, {"prompt": "q19", "answer": 19, "tags": ["x"]}]
    assert sorted(row["answer"] for row in data.train) == list(range(18))


def test_text_stays_text_until_a_system_message_makes_it_a_chat(tmp_path):
    chat = [{"role": "system", "content": "old"}, {"role": "user", "content": "q"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": "q"}, {"prompt": "q"}, {"prompt": chat}])
    assert jsonl(path).train[0]["prompt"] == "q"
    assert jsonl(path).test[0]["prompt"] == chat
    told = jsonl(path, system="new")
    expected = [{"role": "system", "content": "new"}, {"role": "user", "content": "q"}]
    assert told.train[0]["prompt"] == told.test[0]["prompt"] == expected


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "\xc3\xa9"}')
    data = jsonl(path)
    assert [r["prompt"] for r in (*data.train, *data.test)] == ["a", "é"]


BROKEN = {
    "not JSON": ('{"prompt": "a"}\n{"prompt": \n', r"a\.jsonl:2: is not JSON"),
    "after blank lines": ('{"prompt": "a"}\n\n\n{prompt: 1}\n', r"a\.jsonl:4: is not JSON"),
    "cut off": ('{"prompt": "a"}\n{"prompt": "b', r"a\.jsonl:2: is not JSON"),
    "an array": ('["a", "b"]\n', r"a\.jsonl:1: is a JSON list, not an object"),
    "a text": ('"a"\n', r"a\.jsonl:1: is a JSON str"),
    "a missing column": ('{"prompt": "a"}\n{"promt": "a"}\n', r"a\.jsonl:2: has no column 'prompt'[\s\S]*'promt'"),
    "no columns": ("{}\n", r"a\.jsonl:1: has no column 'prompt'"),
    "an empty prompt": ('{"prompt": "a"}\n{"prompt": ""}\n', r"row 2, column 'prompt': the prompt is ''"),
    "a number": ('{"prompt": 3}\n', "row 1"),
    "a bad message": ('{"prompt": [{"role": "user"}]}\n', "row 1"),
    "an empty file": ("", "the file is empty"),
    "blank": (" \n\n", "the file is empty"),
    "one row": ('{"prompt": "a"}\n', r"one row[\s\S]*--data.test-path"),
    "too deep": ("[" * 100_000, r"a\.jsonl:1: is not JSON"),
    "a huge number": ('{"prompt": ' + "9" * 10_000 + "}", r"a\.jsonl:1: is not JSON"),
    "no text": ('{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n', r"a\.jsonl:2: the byte 0xff is no UTF-8"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_told_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=message):
        jsonl(path)


# Paths


def test_wrong_paths_are_answered_with_what_is_there(folder):
    cases = {
        ("jsonl", None): r"data\.path is not set[\s\S]*--data\.path PATH",
        ("jsonl", str(folder / "no" / "such")): "there is no",
        ("jsonl", str(folder / "trian.jsonl")): r"there is no[\s\S]*did you mean 'train.jsonl'",
        ("jsonl", str(folder.parent)): "the folder has no train.jsonl",
    }
    for (task, path), message in cases.items():
        with pytest.raises(DataError, match=message):
            load_data(DataConfig(task=task, path=path))
    with pytest.raises(DataError, match=r"data\.test_path[\s\S]*--data\.test-path"):
        jsonl(folder / "train.jsonl", prompt_column="question", test_path=str(folder / "x" / "y.jsonl"))


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(CoveyError, match="did you mean 'first-letter'"):
        load_data(DataConfig(task="first_letter"))  # type: ignore[arg-type]


def test_a_path_that_the_task_would_not_read_is_refused(folder):
    """Training on made problems instead of the file that was named, without a word."""
    for settings in ({"path": str(folder)}, {"test_path": "x.jsonl"}, {"prompt_column": "question"}):
        with pytest.raises(
            DataError, match=r"data\.\w+ is .*first-letter does not read it\n  wanted: --data.task jsonl"
        ):
            load_data(DataConfig(**settings))


def test_a_file_that_cannot_be_opened_is_told(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        jsonl(folder / "train.jsonl")


@given(st.lists(st.one_of(st.text(max_size=30), st.just('{"prompt": "a"}')), max_size=6))
def test_any_file_is_data_or_a_data_error(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    try:
        data = jsonl(path)
    except DataError:
        return
    assert data.train
    assert data.test
