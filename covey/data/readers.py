"""Readers of records. `sources` converts the records to rows.

    FILE.jsonl                       a file; `data.test_path` may name the held-out one
    FILE.json, .csv, .tsv, .parquet  the same, read by a package that offers it by the entry point `covey.formats`
    FOLDER                           train and test of one kind, or main_train.csv and main_test.csv (Kaggle's GSM8K)
    hf:org/name, tfds:name           a hub, opened by a package that offers it by the entry point `covey.hubs`

A record is a dict. A reader yields the records one after the other, and in the place of a malformed one its error, so
that a look at the data can go on behind it; `read_file` raises the first.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from covey.config.schema import HUBS, DataConfig
from covey.data.rows import CHAT_COLUMNS, format_columns
from covey.errors import DataError, nearest
from covey.files import check_utf8
from covey.registry import offered

Record = dict[str, Any]
Located = tuple[str, Record | DataError]
"""A place in a file, for errors, and the record there, or why there is none."""
Reader = Callable[[Path], Iterator[Located]]
T = TypeVar("T")
RequiredColumns = Sequence[str | tuple[str, ...]]
"""Columns that each record must have; of a tuple it needs one."""
FOLDER_LAYOUTS = (
    ("train.jsonl", "test.jsonl"),
    ("train.json", "test.json"),
    ("train.parquet", "test.parquet"),
    ("train.csv", "test.csv"),
    ("main_train.csv", "main_test.csv"),
)
"""File names of the training and the test set in a folder."""
OTHER_FORMATS = (".json", ".csv", ".tsv", ".parquet")
"""Suffixes of the files that packages read; a file with another suffix is read as JSON Lines."""
MAX_NEIGHBOURS = 500
"""Largest number of files that a mistyped one is compared with."""


class Format(NamedTuple):
    """Format of a file.

    Attributes:
        read: yields the records of a file.
        want: content of such a file, for errors.
        is_text: whether it is text, in UTF-8.
    """

    read: Reader
    want: str
    is_text: bool = True


class Records(NamedTuple):
    """Records, and the name of their source in errors."""

    name: str
    records: Iterable[Record | DataError]


def open_records(
    config: DataConfig, columns: RequiredColumns, wanted: str, hub_config: str | None = None
) -> tuple[Records, Records | None]:
    """Open the training records and, if there are any, the test records at `config.path`: they are read one by one.

    Args:
        columns: columns that each record must have.
        wanted: what the path should lead to, for errors.
        hub_config: config of a hub's data set, if the path names none.

    Raises:
        DataError: the path does not exist; while they are read, that it cannot be read or is empty.
    """
    path = config.path or ""
    if path.startswith(HUBS):
        return offered("covey.hubs", path.partition(":")[0], path)(config, columns, hub_config)  # type: ignore[no-any-return]
    train, test = _find_files(config, wanted)
    return _open_file(train, columns), None if test is None else _open_file(test, columns)


def read_file(path: Path, columns: RequiredColumns) -> list[Record]:
    """Read the records of a file; its suffix names the format.

    Raises:
        DataError: the file cannot be read, is empty, is not in this format, or a record lacks `columns`.
    """
    return [required(record) for record in _open_file(path, columns).records]


def required(item: T | DataError) -> T:
    """Return a record or row, or raise the error in its place."""
    if isinstance(item, DataError):
        raise item
    return item


def attempt(function: Callable[..., T], *arguments: Any) -> T | DataError:
    """Call `function`; return its result, or the `DataError` that it raises."""
    try:
        return function(*arguments)
    except DataError as error:
        return error


def _open_file(path: Path, columns: RequiredColumns) -> Records:
    _require_file(path)
    return Records(str(path), _iter_file(path, columns))


def _iter_file(path: Path, columns: RequiredColumns) -> Iterator[Record | DataError]:
    """Yield the records of a file, each of which has `columns`, or why it is none."""
    suffix, is_empty = path.suffix.lower(), True
    form: Format = offered("covey.formats", suffix[1:], str(path)) if suffix in OTHER_FORMATS else JSON_LINES
    try:
        with path.open("rb") as file:
            check_utf8(file.read(4) if form.is_text else b"", str(path), DataError)
        for where, record in form.read(path):
            is_empty = False
            yield record if isinstance(record, DataError) else attempt(check_columns, record, columns, where)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if is_empty:
        raise DataError("the file is empty", want=form.want, where=str(path))


def decode(line: bytes, where: str) -> str:
    """Decode a line or a whole text; a byte order mark is left out.

    Raises:
        DataError: it is no UTF-8.
    """
    try:
        return line.decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the byte {line[error.start]:#x} is no UTF-8",
            want="UTF-8",
            fix="iconv -f CP1252 -t UTF-8 FILE > NEW, if Windows wrote it; or save it as UTF-8 in your editor",
            where=where,
        ) from None


def read_jsonl(path: Path) -> Iterator[Located]:
    """Yield the objects of a JSON Lines file; blank lines are skipped."""
    other = (
        "" if path.suffix.lower() in (".jsonl", ".ndjson", ".json") else "; or a name in .json, .csv, .tsv, .parquet"
    )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, attempt(_parse_object, line, where, JSON_LINES.want + other)


def _parse_object(line: bytes, where: str, want: str) -> Record:
    return check_object(parse_json(line, where, want), where, want)


def parse_json(text: bytes, where: str, want: str) -> Any:
    """Parse JSON text without a repeated key; NaN is null.

    Raises:
        DataError: it is no such text.
    """
    decoded = decode(text, where)
    try:
        return json.loads(
            decoded, object_pairs_hook=_unique_keys, parse_constant=lambda name: None if name == "NaN" else float(name)
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}", want=want, where=where) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> Record:
    if len(record := dict(pairs)) < len(pairs):
        raise ValueError(f"a key is there twice, among {format_columns(record)}")
    return record


def check_object(row: Any, where: str, want: str) -> Record:
    """Return a JSON value that is an object; refuse any other."""
    if not isinstance(row, dict):
        raise DataError(f"is a JSON {type(row).__name__}, not an object", want=want, where=where)
    return row


def check_columns(row: Record, columns: RequiredColumns, where: str) -> Record:
    """Return a record that has the required columns; refuse any other."""
    alternatives = [(column,) if isinstance(column, str) else column for column in columns]
    missing = [names for names in alternatives if not any(name in row for name in names)]
    if missing:
        raise _missing_columns(row, missing, where)
    return row


def _missing_columns(row: Record, missing: Sequence[tuple[str, ...]], where: str) -> DataError:
    """Return the error that names every missing column; one of several names is that of the prompt."""
    fixes = [nearest(names[0], row) for names in missing] if row else []
    for index, names in enumerate(missing[: len(fixes)]):
        if len(names) > 1:
            fixes[index] = f"--data.prompt-column COLUMN: {fixes[index]}"
    lacking = " and no column ".join(repr(names[0]) for names in missing)
    chats = [f"{names[0]}; or {CHAT_COLUMNS}" for names in missing if len(names) > 1]
    have = format_columns(row)
    fix = "; ".join(dict.fromkeys(fixes))
    return DataError(f"has no column {lacking}; its columns are {have}", want="".join(chats), fix=fix, where=where)


# --- files


def _find_files(config: DataConfig, wanted: str) -> tuple[Path, Path | None]:
    path = existing_path(config.path, "data.path", wanted)
    if not path.is_dir():
        return path, existing_path(config.test_path, "data.test_path", wanted) if config.test_path else None
    layouts = [(path / train, path / test) for train, test in FOLDER_LAYOUTS]
    present = [pair for pair in layouts if any(file.is_file() for file in pair)] or layouts[:1]
    if len(present) > 1:
        raise DataError(
            f"the folder has {', '.join(file.name for pair in present for file in pair if file.is_file())}",
            want="one training and one test file",
            fix=f"name it: --data.path {present[0][0]} --data.test-path {present[0][1]}",
            where=str(path),
        )
    train, test = present[0]
    for file in (train, test):
        if not file.is_file():
            have = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise DataError(f"the folder has no {file.name}, only: {have}", want=wanted, where=str(path))
    return train, test


def _require_file(path: Path) -> None:
    """Refuse a named pipe or a device: it may have no end, and a run reads its data again when it is resumed.

    Raises:
        DataError: it is one.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(
            "this is a pipe or a device, and no file",
            want="a file: a run reads its data again when it is resumed",
            fix="write the rows to a file first",
            where=str(path),
        )


def existing_path(text: str | None, key: str, want: str) -> Path:
    """Return the path `text`, which the setting `key` names.

    Raises:
        DataError: there is nothing: the error suggests the nearest name, or a data set on the hub; or it is a pipe or a
            device.
    """
    option = "--" + key.replace("_", "-")
    if not text:
        raise DataError(f"{key} is not set", want=want, fix=f"{option} PATH", where=key)
    path = Path(text).expanduser()
    if path.exists():
        _require_file(path)
        return path
    raise DataError(
        f"there is no {text}", want=want, fix=_near_name(path) or _on_hub(text, option) or f"{option} PATH", where=key
    )


def _near_name(path: Path) -> str:
    """Return "did you mean ...?" for the nearest name in the folder of `path`; "" if none is near."""
    names = [file.name for file in islice(path.parent.glob("*"), MAX_NEIGHBOURS)]
    hint = nearest(path.name, names) if names else ""
    return hint if hint.startswith("did you mean") else ""


def _on_hub(text: str, option: str) -> str:
    """Return the fix for the name or the address of a data set on the hub; for another address, to download it."""
    name = re.fullmatch(r"(\w[\w.-]*/[\w.-]+)|https?://huggingface\.co/datasets/([\w.-]+/[\w.-]+)(?:[/?#].*)?", text)
    if name and Path(text).suffix not in (".jsonl", *OTHER_FORMATS):
        return f"for a data set on the Hugging Face hub write {option} hf:{name[1] or name[2]}"
    return f"download the file: {option} FILE" if "://" in text else ""


JSON_LINES = Format(read_jsonl, "one JSON object a line")
