"""Records from files of JSON Lines, and folders of them."""

import gzip
import importlib.metadata
from pathlib import Path

import pytest

from covey.config.schema import DataConfig
from covey.data import load_data
from covey.data.loader import PromptLoader
from covey.errors import CoveyError, DataError

ASKED = {"role": "user", "content": "2+2?"}
LINES = '{"prompt": "a"}\n{"prompt": "b"}\n'


def test_columns_that_no_prompt_has_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once, where a run and a script make their batches; a system message beside messages is read."""
    rows = [{"prompt": "2+2?", "completion": "4", "system": "Count.", "tools": [{}], "history": [], "level": 1}]
    PromptLoader(rows, 1)
    PromptLoader([{"messages": [ASKED], "system": "Count.", "images": None}], 1)
    assert [record.message for record in caplog.records] == [
        "no prompt has what 'system' and 'tools' hold: write it into the chat"
    ]


def test_a_folder_with_two_training_files_is_refused(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "train.csv", "test.csv"):
        (tmp_path / name).write_text(LINES)
    with pytest.raises(
        DataError,
        match=r"has train\.jsonl, test\.jsonl, train\.csv, test\.csv\n[\s\S]*--data\.path .*train\.jsonl --data\.test",
    ):
        load_data(DataConfig(task="jsonl", path=str(tmp_path)))


def test_a_folder_with_one_of_two_files_names_the_other(tmp_path: Path) -> None:
    for name in ("main_train.csv", "socratic_train.csv"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"no main_test\.csv, only: main_train\.csv, socratic_train\.csv"):
        load_data(DataConfig(task="jsonl", path=str(tmp_path)))


FILE_MISTAKES = {
    "gzip": ("a.jsonl.gz", gzip.compress(LINES.encode()), "this is gzip data[\\s\\S]*fix: gunzip -k FILE"),
    "a workbook": ("a.xlsx", b"PK\x03\x04...", "an Excel workbook[\\s\\S]*CSV in UTF-8"),
    "Zstandard": ("a.jsonl.zst", b"(\xb5/\xfd...", "Zstandard data[\\s\\S]*zstd -d"),
    "Parquet by another name": ("a.jsonl", b"PAR1...PAR1", "a Parquet file[\\s\\S]*FILE.parquet"),
    "text": ("a.txt", b"hello\n", r"is not JSON[\s\S]*or a name in \.json, \.csv, \.tsv, \.parquet"),
    "Windows' letters": ("a.jsonl", b'{"prompt": "caf\xe9"}\n', r"a\.jsonl:1: the byte 0xe9 is no UTF-8\n"),
    "a key twice": ("a.jsonl", b'{"prompt": "a", "prompt": "b"}\n', "a key is there twice, among 'prompt'"),
    "UTF-32": ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-32"), "a text in UTF-32[\\s\\S]*iconv -f UTF-32"),
}


@pytest.mark.parametrize(("name", "content", "message"), FILE_MISTAKES.values(), ids=FILE_MISTAKES)
def test_a_broken_file_is_told(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_data(DataConfig(task="jsonl", path=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("path", "wanted"),
    [("a.csv", "'csv' by the entry point covey.formats"), ("hf:org/name", "'hf' by the entry point covey.hubs")],
)
def test_what_no_package_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("covey.registry.entry_points", lambda **_: importlib.metadata.EntryPoints())
    Path("a.csv").write_text("prompt\na\n")
    with pytest.raises(CoveyError, match=f"^{path} needs a package that offers {wanted}"):
        load_data(DataConfig(task="jsonl", path=path))
