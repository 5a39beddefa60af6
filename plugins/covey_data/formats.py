"""Formats of files besides JSON Lines, offered by `covey.formats`: a JSON list or object, CSV and TSV, Parquet."""

import codecs
import csv
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from covey.data.readers import (
    Format,
    Located,
    Record,
    attempt,
    check_object,
    decode,
    parse_json,
    read_jsonl,
    required,
)
from covey.data.rows import find_form, format_columns
from covey.errors import DataError, foreign_errors
from covey.registry import import_package

DELIMITERS = ",;\t|"
"""Characters that may divide the columns of a CSV file."""


def _read_json(path: Path) -> Iterator[Located]:
    """Yield the objects of a JSON list, or the one of the file; a file of several objects is read as JSON Lines."""
    want = "a list of JSON objects"
    whole = attempt(parse_json, text := path.read_bytes(), str(path), want)
    if isinstance(whole, DataError) and not text.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from read_jsonl(path)
        return
    whole = required(whole)
    for number, entry in enumerate(_rows_of(whole, str(path)) if isinstance(whole, dict) else whole, 1):
        where = f"{path}, entry {number}"
        yield where, attempt(check_object, entry, where, want)


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
            decode(line, f"{path}:{number}")
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
    parquet = import_package(
        "pyarrow.parquet", DataError, f"{path} needs the package pyarrow.parquet", "hub", "data.path"
    )
    with foreign_errors(DataError, "is no Parquet file that can be read", where=str(path)):
        batches = parquet.ParquetFile(path).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


JSON = Format(_read_json, "a list of JSON objects, or one JSON object a line")
CSV = Format(_read_csv, "a line of column names, and rows")
PARQUET = Format(_read_parquet, "a Parquet file with rows", is_text=False)
