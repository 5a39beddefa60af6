"""Records from files and hubs. The hubs' packages are played by stand-ins: no test goes to the network."""

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey import registry
from covey.cli.checks import check_run
from covey.config import recipe
from covey.config.schema import DataConfig, SFTDataConfig
from covey.data import load_data, readers
from covey.errors import DataError
from covey.recipes.build import load_inputs

HEADER = "question,answer\n"
PROBLEMS = [
    {"question": f'What is {n}, "doubled"?\nSay it.', "answer": f"2 * {n} = <<2*{n}={2 * n}>>{2 * n}\n#### {2 * n:,}"}
    for n in range(600, 630)
]


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def as_csv(records: list[dict[str, str]]) -> str:
    return HEADER + "".join(f"{quoted(r['question'])},{quoted(r['answer'])}\n" for r in records)


def gsm8k(path: Any, **options: Any) -> Any:
    return load_data(DataConfig(task="gsm8k", path=str(path), **options))


PARTS = {"train": PROBLEMS[:20], "test": PROBLEMS[20:]}


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """The same records as JSON Lines."""
    folder = tmp_path / "jsonl"
    folder.mkdir()
    for name, part in PARTS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    return folder


def described(data: Any) -> Any:
    return data.train, data.test, data.system


# --- every source of GSM8K gives the same rows


WRITERS: dict[str, Callable[[Path, Any], Any]] = {
    "{}.json": lambda path, records: path.write_text(json.dumps(records, indent=1)),
    "{}.parquet": lambda path, records: pandas.DataFrame(records).to_parquet(path),
    "{}.csv": lambda path, records: pandas.DataFrame(records).to_csv(path, index=False),
    "main_{}.csv": lambda path, records: path.write_text(as_csv(records)),  # of Kaggle's archive
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_every_kind_are_the_same_data_set(tmp_path: Path, jsonl: Path, name: str) -> None:
    wanted = described(gsm8k(jsonl))
    assert (len(wanted[0]), len(wanted[1]), wanted[1][0]["answer"]) == (20, 10, "1,240")
    (tmp_path / "socratic_train.csv").write_text("not looked at")
    for part, records in PARTS.items():
        WRITERS[name](tmp_path / name.format(part), records)
    assert described(gsm8k(tmp_path)) == wanted
    single = gsm8k(tmp_path / name.format("train"), test_path=str(tmp_path / name.format("test")))
    assert described(single) == wanted


ASKED, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CHATS = [
    {"messages": [ASKED, ANSWER]},
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    {"instruction": "2+2?", "input": "", "output": "4"},
]


@pytest.mark.parametrize("row", CHATS, ids=["messages", "sharegpt", "alpaca"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_chats_in_files_are_learnt_or_asked(tmp_path: Path, row: dict[str, Any], kind: str) -> None:
    path, rows = tmp_path / f"a.{kind}", [row | {"level": n} for n in range(2)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(r) + "\n" for r in rows))
    learnt = load_data(SFTDataConfig(path=str(path)))
    asked = load_data(DataConfig(task="jsonl", path=str(path)))
    for data in (learnt, asked):
        assert data.train == [{"prompt": [ASKED], "completion": "4", "level": 0}]
        assert [row["level"] for row in data.test] == [1]


def test_a_run_tells_the_forms_of_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps([*CHATS, *CHATS[1:2], {"prompt": "2+2?"}, {"prompt": "held out"}]))
    load_inputs(recipe.Recipe(data=DataConfig(task="jsonl", path=str(tmp_path / "a.json")), rewards=()))
    said = "1 rows as chat (messages), 2 as ShareGPT (conversations), 1 as Alpaca (instruction, output), 2 as prompt"
    assert f"a.json: {said}\n" in capsys.readouterr().out.replace("\n  ", " ")
    (tmp_path / "b.json").write_text(json.dumps([{"text": "a"}, {"asked": "b", "given": "c"}] * 2))
    learnt = recipe.SFTRecipe(
        data=SFTDataConfig(path=str(tmp_path / "b.json"), prompt_column="asked", completion_column="given")
    )
    load_inputs(learnt)
    assert "b.json: 2 rows as text, 2 as prompt and completion\n" in capsys.readouterr().out.replace("\n  ", " ")


def test_json_lines_under_the_name_of_a_list_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert load_data(DataConfig(task="jsonl", path=str(tmp_path / "a.json"))).train == [{"prompt": "a"}]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_csv_file_is_that_of_its_column_names(tmp_path: Path, delimiter: str) -> None:
    """The texts hold all of the others, a quoted name the delimiter itself; a byte order mark is no part of a name."""
    text, more = "2 + 3, 4; or | and \t?", f"more{delimiter}names"
    rows = [["prompt", "answer", more], *([text, str(n), ""] for n in range(2))]
    (tmp_path / "a.csv").write_text("\n".join(delimiter.join(map(quoted, row)) for row in rows), encoding="utf-8-sig")
    assert load_data(DataConfig(task="jsonl", path=str(tmp_path / "a.csv"))).train == [
        {"prompt": text, "answer": "0", more: ""}
    ]


def test_a_csv_file_of_one_column_needs_no_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\na; b\nc|d\n")
    assert load_data(DataConfig(task="jsonl", path=str(tmp_path / "a.csv"))).train == [{"prompt": "a; b"}]


PAIRS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
LINES = "".join(json.dumps(row) + "\n" for row in PAIRS)
TABLE = "prompt;completion\r\na;b\r\nc;d\r\n"
READABLE = {
    "tabs": ("a.tsv", TABLE.replace(";", "\t").encode()),
    "tabs, and a comma in a name": ("a.tsv", b'prompt\tcompletion\t"a,b"\na\tb\t\nc\td\t\n'),
    "Excel's separator": ("a.csv", b"sep=;\r\n" + TABLE.encode()),
    "Excel's separator after a byte order mark": ("a.csv", f"\ufeffsep=;\r\n{TABLE}".encode()),
    "a byte order mark": ("a.jsonl", f"\ufeff{LINES}".encode()),
    "columns in an object": ("a.json", json.dumps({"prompt": ["a", "c"], "completion": ["b", "d"]}, indent=1).encode()),
    "JSON lines called .json": ("a.json", LINES.encode()),
    "NaN": ("a.jsonl", (LINES[:-2] + ', "level": NaN}\n').encode()),
}


@pytest.mark.parametrize(("name", "content"), READABLE.values(), ids=READABLE)
def test_the_ways_in_which_other_programs_write_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    rows = readers.read_file(tmp_path / name, ("prompt",))
    assert [{key: row[key] for key in ("prompt", "completion")} for row in rows] == PAIRS
    assert {row.get("level") for row in rows} == {None}


def test_a_json_file_of_one_row_is_a_row(tmp_path: Path) -> None:
    for row in ({"prompt": "a", "meta": {"n": 1}}, {"messages": [ASKED, ANSWER]}, {"prompt": [ASKED], "shown": [{}]}):
        (tmp_path / "a.json").write_text(json.dumps(row, indent=1))
        assert readers.read_file(tmp_path / "a.json", ()) == [row]


def test_a_chat_in_a_cell_is_a_chat(tmp_path: Path) -> None:
    """The trap: a table holds it as JSON text, which is trained on as text, with its answer."""
    turns = {"messages": [ASKED, ANSWER], "conversations": CHATS[1]["conversations"]}
    for name, chat in turns.items():
        (tmp_path / "a.csv").write_text(f"{name},level\n" + f"{quoted(json.dumps(chat))},1\n" * 2)
        for kind in (DataConfig, SFTDataConfig):
            assert load_data(kind(task="jsonl", path=str(tmp_path / "a.csv"))).train == [
                {"prompt": [ASKED], "completion": "4", "level": "1"}
            ]
    pair = f"{quoted(json.dumps([ASKED]))},{quoted(json.dumps([ANSWER]))}\n"
    (tmp_path / "a.csv").write_text("prompt,completion\n" + pair * 2)
    assert load_data(SFTDataConfig(path=str(tmp_path / "a.csv"))).train == [{"prompt": [ASKED], "completion": "4"}]
    (tmp_path / "a.csv").write_text("text\n" + f"{quoted(json.dumps([ASKED, ANSWER]))}\n" * 2)
    assert load_data(SFTDataConfig(path=str(tmp_path / "a.csv"))).train == [{"prompt": [ASKED], "completion": "4"}]
    asked = '[{"role": "user", "content": "a"}] Say it again.'
    (tmp_path / "a.csv").write_text("prompt\n" + f"{quoted(asked)}\n" * 2)
    assert load_data(DataConfig(task="jsonl", path=str(tmp_path / "a.csv"))).train[0]["prompt"] == asked


NO_CHATS = {
    "as Python prints it": ("messages", str([ASKED, ANSWER]), "not JSON[\\s\\S]*fix: write the column with json.dumps"),
    "as NumPy prints it": ("messages", f"[{ASKED}\n {ANSWER}]", "a chat stands here as text that is not JSON"),
    "cut by Excel": ("prompt", json.dumps([ASKED])[:-9], "a chat stands here as text that is not JSON"),
    "plain text": ("messages", "user: 2+2?", "messages is the text 'user: 2\\+2\\?'"),
    "with its answer": ("prompt", json.dumps([ASKED, ANSWER]), "ends with an assistant's message[\\s\\S]*messages"),
}


@pytest.mark.parametrize(("column", "cell", "message"), NO_CHATS.values(), ids=NO_CHATS)
def test_a_cell_that_is_no_chat_is_refused(tmp_path: Path, column: str, cell: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(f"{column},answer\n" + f"{quoted(cell)},4\n" * 2)
    with pytest.raises(DataError, match=message):
        load_data(DataConfig(task="jsonl", path=str(tmp_path / "a.csv")))


FILE_MISTAKES = {
    "Windows' letters, a list": ("a.json", b'[{"prompt": "caf\xe9"}]', r"a\.json: the byte 0xe9 is no UTF-8\n"),
    "UTF-16 without a mark": ("a.csv", "prompt\na\n".encode("utf-16-le"), "in UTF-16"),
    "UTF-32 without a mark": ("a.csv", "prompt\na\n".encode("utf-32-le"), "in UTF-32"),
    "rows under a key": (
        "a.json",
        b'{"version": 1, "data": [{"prompt": "a"}]}',
        r"under 'data'[\s\S]*jq '\.data' FILE",
    ),
    "splits in a file": ("a.json", b'{"train": [{"prompt": "a"}], "test": []}', "under 'train', 'test'"),
    "columns of pandas": ("a.json", b'{"prompt": {"0": "a"}}', "under 'prompt'[\\s\\S]*orient='records'"),
    "a column twice": (
        "a.csv",
        b"prompt,answer,answer\na,b,c\n",
        r"a\.csv:2: two columns have the same name\n  wanted: prompt, answer, answer",
    ),
    "a blank line before the names": (
        "a.csv",
        b"\nprompt,answer\na,b\n",
        "wanted: a line of column names, as the first",
    ),
    "an empty list": ("a.json", b"[]", "the file is empty"),
    "nothing": ("a.json", b"", "the file is empty"),
    "a list cut off": ("a.json", b'[{"prompt": "a"},', "is not JSON[\\s\\S]*a list of JSON objects"),
    "a list of texts": ("a.json", b'[{"prompt": "a"}, "b"]', "entry 2: is a JSON str"),
    "another column": (
        "a.json",
        b'[{"promt": "a"}]',
        "entry 1: has no column 'prompt'; its columns are 'promt'\n"
        "  wanted: prompt; or messages; or conversations; or instruction and output\n",
    ),
    "UTF-16, a list": ("a.json", '[{"prompt": "a"}]'.encode("utf-16"), "a text in UTF-16\n  wanted: UTF-8"),
    "UTF-16, a table": ("a.csv", "prompt\na\n".encode("utf-16"), "in UTF-16"),
    "two delimiters": ("a.csv", b"prompt;a,b\n1;2", r"a\.csv:1: ',' and ';' could each divide"),
    "too deep": ("a.json", b"[" * 100_000, "is not JSON"),
    "no Parquet": ("a.parquet", b"PAR1 and nothing else PAR1", "is no Parquet file"),
    "no bytes": ("a.parquet", b"", "is no Parquet file"),
    "an empty table": ("a.csv", b"", "the file is empty"),
    "only names": ("a.csv", b"prompt,answer\n", "the file is empty"),
    "other names": ("a.csv", b"promt,answer\na,b\n", r"csv:2: has no column 'prompt'[\s\S]*promt"),
    "a field too few": (
        "a.csv",
        b"prompt,answer\na,b\nc\n",
        r"csv:3: has not as many fields[\s\S]*prompt, answer",
    ),
    "a field too many": ("a.csv", b"prompt,answer\na,b,c\n", "csv:2: has not as many fields"),
    "an open quote": ("a.csv", b'prompt,answer\na,"b\n', "is not CSV"),
    "a table of bytes": (
        "a.csv",
        b"prompt,answer\na,\xff\n",
        r"a\.csv:2: the byte 0xff is no UTF-8[\s\S]*fix: iconv -f CP1252",
    ),
    "a huge field": (
        "a.csv",
        b"prompt,answer\na," + b"9" * 200_000 + b"\n",
        "more than 131,072 characters[\\s\\S]*fix: .*jsonl",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), FILE_MISTAKES.values(), ids=FILE_MISTAKES)
def test_a_broken_file_is_told(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_data(DataConfig(task="jsonl", path=str(tmp_path / name)))


def test_parquet_without_its_package_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs the package pyarrow[\s\S]*hub"):
        load_data(DataConfig(task="jsonl", path=str(tmp_path / "a.parquet")))


class FakeHub:
    """Stands for `datasets`: says what it was asked for, gives dicts of Python's types."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.splits: dict[str, Any] = {**PARTS}

    def load_dataset(self, name: str, config: str | None, revision: str | None = None) -> dict[str, Any]:
        self.asked.append((name, config, revision))
        return self.splits


class FakeTFDS:
    """Stands for `tensorflow_datasets`: texts are bytes, in NumPy's scalars."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def data_source(self, name: str, builder_kwargs: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((name, builder_kwargs))
        as_bytes = lambda r: {k: np.bytes_(v.encode()) for k, v in r.items()} | {"short_answer": b"1"}  # noqa: E731
        return {name: list(map(as_bytes, part)) for name, part in PARTS.items()}


Install = Callable[[str, Any], Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name, stand_in)`: what an import of `name` gives; None for a package that is not there."""

    def put(name: str, stand_in: Any) -> Any:
        monkeypatch.setitem(sys.modules, name, stand_in)
        return stand_in

    return put


def test_the_hub_is_the_same_data_set(install: Install, jsonl: Path) -> None:
    hub = install("datasets", FakeHub())
    assert described(gsm8k("hf:openai/gsm8k")) == described(gsm8k(jsonl))
    gsm8k("hf:openai/gsm8k/socratic@refs/pr/1")
    assert hub.asked == [("openai/gsm8k", "main", None), ("openai/gsm8k", "socratic", "refs/pr/1")]


def test_tensorflow_datasets_is_the_same_data_set(install: Install, jsonl: Path) -> None:
    tfds = install("tensorflow_datasets", FakeTFDS())
    assert described(gsm8k("tfds:gsm8k")) == described(gsm8k(jsonl))
    assert tfds.asked == [("gsm8k", {"file_format": "array_record"})]


def test_any_data_set_of_the_hub_holds_prompts(install: Install) -> None:
    hub = install("datasets", FakeHub())
    hub.splits = {"train": [{"q": f"{n}?", "label": n} for n in range(20)], "validation": [{"q": "v?", "label": 0}]}
    found = load_data(DataConfig(task="jsonl", path="hf:someone/questions", prompt_column="q"))
    assert hub.asked == [("someone/questions", None, None)]
    assert [r["prompt"] for r in found.test] == ["v?"]
    assert sorted(r["label"] for r in found.train) == list(range(20))
    del hub.splits["validation"]
    assert len(load_data(DataConfig(task="jsonl", path="hf:someone/questions", prompt_column="q")).test) == 2


# --- mistakes


@pytest.mark.parametrize(("package", "path", "extra"), [
    ("datasets", "hf:openai/gsm8k", "hub"),
    ("tensorflow_datasets", "tfds:gsm8k", "tfds"),
])  # fmt: skip
def test_a_missing_package_is_named_with_what_installs_it(
    install: Install, package: str, path: str, extra: str
) -> None:
    install(package, None)
    with pytest.raises(DataError, match=rf"{package}[\s\S]*fix: {re.escape(registry.install_command(extra))}"):
        gsm8k(path)


def test_what_the_hub_says_is_passed_on_in_one_line(install: Install) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route to host\nand a page of details")

    install("datasets", types.SimpleNamespace(load_dataset=refuse))
    install("tensorflow_datasets", types.SimpleNamespace(data_source=refuse))
    for path in ("hf:openai/gsm8k", "tfds:gsm8k"):
        with pytest.raises(DataError, match="ConnectionError: no route to host\n  fix: ") as caught:
            gsm8k(path)
        assert isinstance(caught.value.__cause__, ConnectionError)


HUB_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no train": ({"tests": PROBLEMS}, "no split 'train', only: tests\n  fix: write the split"),
    "empty": ({"train": []}, "the split is empty"),
    "another column": (
        {"train": [{"question": "?", "anser": "#### 1"}]},
        "row 1: has no column 'answer'[\\s\\S]*anser",
    ),
    "two other columns": ({"train": [{"q": "?", "a": "1"}]}, "no column 'question' and no column 'answer'; its"),
    "a number": ({"train": [{"question": "?", "answer": 5}]}, "train, row 1: the answer is 5"),
    "no question": ({"train": [{"question": " ", "answer": "#### 1"}]}, "the question is ' '"),
}


@pytest.mark.parametrize(("splits", "message"), HUB_MISTAKES.values(), ids=HUB_MISTAKES)
def test_a_data_set_of_another_form_is_told(install: Install, splits: dict[str, Any], message: str) -> None:
    install("datasets", FakeHub()).splits = splits
    with pytest.raises(DataError, match=message):
        gsm8k("hf:openai/gsm8k")


@pytest.mark.parametrize("path", ["hf:", "hf:gsm8k", "hf:a/b/c/d", "hf:a/b@", "hf:a b/c", "hf:a/b@x y"])
def test_a_malformed_name_is_refused_before_anything_is_imported(install: Install, path: str) -> None:
    install("datasets", None)
    with pytest.raises(DataError, match=r"names no data set[\s\S]*hf:org/name"):
        gsm8k(path)


def test_a_test_file_beside_a_hub_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.test_path is set"):
        gsm8k("hf:openai/gsm8k", test_path="x.jsonl")


@given(st.lists(st.lists(st.text(max_size=8), max_size=3), max_size=4))
def test_any_csv_is_records_or_a_data_error(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.csv"
    path.write_bytes((HEADER + "\n".join(",".join(row) for row in rows)).encode("utf-8", "surrogatepass"))
    try:
        records = readers.read_file(path, ("question",))
    except DataError:
        return
    assert all(list(record) == ["question", "answer"] for record in records)


@given(st.lists(st.fixed_dictionaries({"question": st.text(), "answer": st.text()}), min_size=1, max_size=5))
def test_what_is_written_as_csv_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.csv"
    records = [{k: v.replace("\r", "").replace("\x00", "") for k, v in r.items()} for r in records]
    path.write_bytes(as_csv(records).encode("utf-8", "ignore"))
    kept = [{k: v.encode("utf-8", "ignore").decode() for k, v in r.items()} for r in records]
    assert readers.read_file(path, ("question", "answer")) == kept


def test_a_hub_is_no_missing_path_for_the_command(tmp_path: Path) -> None:
    """The check that needs no JAX looks for paths on this disk alone."""
    words = ["model.source=smollm2-135m"]
    check_run(recipe.load("gsm8k-smollm2", ["data.path=hf:openai/gsm8k", *words]))
    check_run(recipe.load("gsm8k-smollm2", ["data.path=tfds:gsm8k", *words]))
    with pytest.raises(DataError, match="there is no"):
        check_run(recipe.load("gsm8k-smollm2", [f"data.path={tmp_path / 'x'}", *words]))
