"""Readers of records: files of five kinds, and two hubs of data sets. `sources` converts the records to rows.

    FILE.jsonl, .json, .csv, .tsv, .parquet   a file; `data.test_path` may name the held-out one
    FOLDER                           train and test of one kind, or main_train.csv and main_test.csv (Kaggle's GSM8K)
    hf:org/name[/config][@revision]  the Hugging Face hub, through `datasets`
    tfds:name[/config]               TensorFlow Datasets, through `tensorflow_datasets`

A record is a dict. A reader yields the records one after the other, and in the place of a malformed one its error, so
that a look at the data can go on behind it; `read_file` raises the first. The packages of the hubs are optional and
imported only here.
"""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from covey.config.schema import HUBS, DataConfig
from covey.data.rows import CHAT_COLUMNS, find_form, format_columns, plain_value
from covey.errors import DataError, foreign_errors, nearest
from covey.files import check_utf8
from covey.registry import import_package

Record = dict[str, Any]
Splits = Mapping[str, Iterable[Mapping[str, Any]]]
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
DELIMITERS = ",;\t|"
"""Characters that may divide the columns of a CSV file."""
MAX_NEIGHBOURS = 500
"""Largest number of files that a mistyped one is compared with."""
TEST_SPLITS = ("test", "validation")
"""Names that the test split of a hub may have."""


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
    if not (config.path or "").startswith(HUBS):
        train, test = _find_files(config, wanted)
        return _open_file(train, columns), None if test is None else _open_file(test, columns)
    path = str(config.path)
    if config.test_path:
        raise DataError(
            f"data.test_path is set, and {path} has its own test split",
            want="data.test_path beside a file",
            fix="leave it out",
            where="data.test_path",
        )
    splits = _load_splits(path, hub_config)
    held_out = next((name for name in TEST_SPLITS if name in splits), None)
    train_records = _read_split(path, "train", splits, columns)
    return train_records, None if held_out is None else _read_split(path, held_out, splits, columns)


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
    read, want = READERS.get(path.suffix.lower(), JSON_LINES)
    is_empty = True
    try:
        with path.open("rb") as file:
            check_utf8(b"" if read is _read_parquet else file.read(4), str(path), DataError)
        for where, record in read(path):
            is_empty = False
            yield record if isinstance(record, DataError) else attempt(_check_columns, record, columns, where)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if is_empty:
        raise DataError("the file is empty", want=want, where=str(path))


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the byte {line[error.start]:#x} is no UTF-8",
            want="UTF-8",
            fix="iconv -f CP1252 -t UTF-8 FILE > NEW, if Windows wrote it; or save it as UTF-8 in your editor",
            where=where,
        ) from None


def _read_jsonl(path: Path) -> Iterator[Located]:
    """Yield the objects of a JSON Lines file; blank lines are skipped."""
    other = (
        "" if path.suffix.lower() in (".jsonl", ".ndjson", ".json") else "; or a name in .json, .csv, .tsv, .parquet"
    )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, attempt(_parse_object, line, where, JSON_LINES[1] + other)


def _read_json(path: Path) -> Iterator[Located]:
    """Yield the objects of a JSON list, or the one of the file; a file of several objects is read as JSON Lines."""
    want = "a list of JSON objects"
    whole = attempt(_parse_json, text := path.read_bytes(), str(path), want)
    if isinstance(whole, DataError) and not text.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _read_jsonl(path)
        return
    whole = required(whole)
    for number, entry in enumerate(_rows_of(whole, str(path)) if isinstance(whole, dict) else whole, 1):
        where = f"{path}, entry {number}"
        yield where, attempt(_check_object, entry, where, want)


def _rows_of(whole: Record, where: str) -> list[Record]:
    """Return the rows of a file that is one JSON object: it is a row, or a dict of columns.

    Raises:
        DataError: the rows stand under a key of it, or its columns are dicts, as pandas writes them.
    """
    columns = [v for v in whole.values() if isinstance(v, list) and v and not isinstance(v[0], dict)]
    if len(columns) == len(whole) and len({*map(len, columns)}) == 1:
        return [dict(zip(whole, values, strict=True)) for values in zip(*columns, strict=True)]
    nested = [name for name, v in whole.items() if isinstance(v, list) and v not in columns]
    is_table = bool(whole) and all(isinstance(value, dict) for value in whole.values())
    if is_table or (nested and not find_form(whole) and "prompt" not in whole):
        raise DataError(
            f"the file is one JSON object, with its rows under {format_columns(dict.fromkeys(nested or whole))}",
            want="a list of JSON objects, or one JSON object a line",
            fix=f"jq '.{next(iter(nested or whole))}' FILE > NEW.json; in pandas: to_json(FILE, orient='records')",
            where=where,
        )
    return [whole]


def _read_csv(path: Path) -> Iterator[Located]:
    """Yield the rows of a CSV file; its first line has the column names, and each row one field per name. A line sep=;
    before it is Excel's.
    """
    where = str(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            excel = re.fullmatch(r'"?sep=(.)"?\r?\n', header)
            header = file.readline() if excel else header
            is_tsv, place = path.suffix.lower() == ".tsv", f"{path}:1"
            delimiter = excel[1] if excel else "\t" if is_tsv else _find_delimiter(header, place)
            reader = csv.DictReader(chain([header], file), strict=True, delimiter=delimiter)
            for row in reader:
                where = f"{path}:{reader.line_num + bool(excel)}"
                yield where, attempt(_check_fields, row, reader.fieldnames or (), where)
    except UnicodeDecodeError:
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            _decode(line, f"{path}:{number}")
    except csv.Error as error:
        long = "a cell after this place has more than 131,072 characters, or a quote is not closed"
        raise DataError(
            long if "field limit" in str(error) else f"is not CSV: {error}",
            want="cells in double quotes, with a quote inside written twice",
            fix="write the rows as a .jsonl file, which has no such limit",
            where=where,
        ) from None


def _check_fields(row: dict[Any, Any], names: Sequence[str], where: str) -> Record:
    other = None in row or None in row.values()
    if other or sum(map(bool, row)) < sum(map(bool, names)):
        what = "has not as many fields as there are columns" if other else "two columns have the same name"
        raise DataError(what, want=", ".join(names) or "a line of column names, as the first", where=where)
    return row


def _find_delimiter(header: str, where: str) -> str:
    """Return the one character of `DELIMITERS` that divides the line of column names; a comma if there is one column.

    The line of names decides alone (`csv.Sniffer` counts characters of the texts below it as well, and guesses).
    """
    dividing = [one for one in DELIMITERS if len(next(csv.reader([header], delimiter=one), [])) > 1]
    if len(dividing) > 1:
        raise DataError(
            f"{' and '.join(map(repr, dividing))} could each divide the column names {header.strip()[:80]!r}",
            want="one delimiter",
            fix="put each column name in double quotes",
            where=where,
        )
    return dividing[0] if dividing else ","


def _read_parquet(path: Path) -> Iterator[Located]:
    """Yield the rows of a Parquet file, through pyarrow."""
    parquet = _import_package("pyarrow.parquet", "hub", str(path))
    with foreign_errors(DataError, "is no Parquet file that can be read", where=str(path)):
        batches = parquet.ParquetFile(path).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _parse_object(line: bytes, where: str, want: str) -> Record:
    return _check_object(_parse_json(line, where, want), where, want)


def _parse_json(text: bytes, where: str, want: str) -> Any:
    decoded = _decode(text, where)
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


def _check_object(row: Any, where: str, want: str) -> Record:
    if not isinstance(row, dict):
        raise DataError(f"is a JSON {type(row).__name__}, not an object", want=want, where=where)
    return row


def _check_columns(row: Record, columns: RequiredColumns, where: str) -> Record:
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
    if name and Path(text).suffix not in (".jsonl", *READERS):
        return f"for a data set on the Hugging Face hub write {option} hf:{name[1] or name[2]}"
    return f"download the file: {option} FILE" if "://" in text else ""


# --- hubs


def _load_splits(path: str, config: str | None) -> Splits:
    load, fix = HUB_LOADERS[path.partition(":")[0]]
    with foreign_errors(DataError, f"{path} cannot be read", fix=fix, where="data.path"):
        splits: Splits = load(path, config)
    return splits


def _load_hub(path: str, config: str | None) -> Any:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@([\w./-]+))?", path)
    if not match:
        raise DataError(f"{path!r} names no data set", want="hf:org/name[/config][@revision]", where="data.path")
    datasets = _import_package("datasets", "hub", path)
    return datasets.load_dataset(match[1], match[2] or config, revision=match[3])


def _load_tfds(path: str, config: str | None) -> Any:
    """Load a data set through TFDS's random access, which needs no TensorFlow."""
    tfds = _import_package("tensorflow_datasets", "tfds", path)
    return tfds.data_source(path.removeprefix("tfds:"), builder_kwargs={"file_format": "array_record"})


def _import_package(name: str, extra: str, path: str) -> Any:
    return import_package(name, DataError, f"{path} needs the package {name}", extra, "data.path")


def _read_split(path: str, name: str, splits: Mapping[str, Any], columns: RequiredColumns) -> Records:
    where = f"{path}, {name}"
    if name not in splits:
        raise DataError(
            f"{path} has no split {name!r}, only: {', '.join(splits)}",
            fix="write the split that you mean to a file: datasets.load_dataset(...)[SPLIT].to_json('train.jsonl')",
            where="data.path",
        )
    return Records(where, _iter_split(splits[name], columns, where))


def _iter_split(
    split: Iterable[Mapping[str, Any]], columns: RequiredColumns, where: str
) -> Iterator[Record | DataError]:
    number = 0
    for number, record in enumerate(split, 1):
        row = {key: plain_value(value) for key, value in record.items()}
        yield attempt(_check_columns, row, columns, f"{where}, row {number}")
    if not number:
        raise DataError("the split is empty", where=where)


JSON_LINES: tuple[Reader, str] = (_read_jsonl, "one JSON object a line")
READERS: dict[str, tuple[Reader, str]] = {
    ".json": (_read_json, "a list of JSON objects, or one JSON object a line"),
    ".csv": (_read_csv, "a line of column names, and rows"),
    ".tsv": (_read_csv, "a line of column names, and rows"),
    ".parquet": (_read_parquet, "a Parquet file with rows"),
}
"""Reader for each file suffix, and what it reads; files with any other suffix are read as JSON Lines."""

HUB_LOADERS: dict[str, tuple[Callable[[str, str | None], Any], str]] = {
    "hf": (
        _load_hub,
        "look at its name and config, and at the network; a gated data set wants a login: hf auth login",
    ),
    "tfds": (_load_tfds, "look at its name, at the network and at the free disk"),
}
"""Loader for each hub, and the fix for what it raises."""
