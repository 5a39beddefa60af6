"""Data sets of two hubs, offered by `covey.hubs`. Their packages are optional and imported only here.

hf:org/name[/config][@revision]  the Hugging Face hub, through `datasets`
tfds:name[/config]               TensorFlow Datasets, through `tensorflow_datasets`
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from covey.config.schema import DataConfig
from covey.data.readers import Record, Records, RequiredColumns, attempt, check_columns
from covey.data.rows import plain_value
from covey.errors import DataError, foreign_errors
from covey.registry import import_package

Splits = Mapping[str, Iterable[Mapping[str, Any]]]
TEST_SPLITS = ("test", "validation")
"""Names that the test split of a hub may have."""
FIXES = {
    "hf": "look at its name and config, and at the network; a gated data set wants a login: hf auth login",
    "tfds": "look at its name, at the network and at the free disk",
}
"""Fix for what the package of a hub raises."""


def open_hub(config: DataConfig, columns: RequiredColumns, hub_config: str | None) -> tuple[Records, Records | None]:
    """Open the splits of the data set at `config.path`; arguments and result are those of `readers.open_records`.

    Raises:
        DataError: there is a test file beside it, or it cannot be read.
    """
    path = str(config.path)
    if config.test_path:
        raise DataError(
            f"data.test_path is set, and {path} has its own test split",
            want="data.test_path beside a file",
            fix="leave it out",
            where="data.test_path",
        )
    hub = path.partition(":")[0]
    with foreign_errors(DataError, f"{path} cannot be read", fix=FIXES[hub], where="data.path"):
        splits: Splits = _load_tfds(path) if hub == "tfds" else _load_hub(path, hub_config)
    held_out = next((name for name in TEST_SPLITS if name in splits), None)
    train = _read_split(path, "train", splits, columns)
    return train, None if held_out is None else _read_split(path, held_out, splits, columns)


def _load_hub(path: str, config: str | None) -> Any:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@([\w./-]+))?", path)
    if not match:
        raise DataError(f"{path!r} names no data set", want="hf:org/name[/config][@revision]", where="data.path")
    datasets = _import_package("datasets", "hub", path)
    return datasets.load_dataset(match[1], match[2] or config, revision=match[3])


def _load_tfds(path: str) -> Any:
    """Load a data set through TFDS's random access, which needs no TensorFlow."""
    tfds = _import_package("tensorflow_datasets", "tfds", path)
    return tfds.data_source(path.removeprefix("tfds:"), builder_kwargs={"file_format": "array_record"})


def _import_package(name: str, extra: str, path: str) -> Any:
    return import_package(name, DataError, f"{path} needs the package {name}", extra, "data.path")


def _read_split(path: str, name: str, splits: Splits, columns: RequiredColumns) -> Records:
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
        yield attempt(check_columns, row, columns, f"{where}, row {number}")
    if not number:
        raise DataError("the split is empty", where=where)
