"""From `DataConfig` to training and test rows: two tasks made on the fly, GSM8K, and any JSONL file."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.configs import DataConfig
from covey.data import arithmetic, first_letter, gsm8k
from covey.data.rows import Row, as_prompt
from covey.errors import DataError, nearest
from covey.types import Message

Splits = tuple[list[Row], list[Row]]
"""Training rows and test rows."""


@dataclass(frozen=True)
class Dataset:
    """What a run trains on and is tested on.

    Attributes:
        name: the task.
        train: rows in the order of the seed, `train_fraction` of them.
        test: held-out rows, in a fixed order.
        system: the system message that stands before each prompt; None when there is none.
    """

    name: str
    train: Sequence[Row]
    test: Sequence[Row]
    system: str | None = None


def load(config: DataConfig) -> Dataset:
    """The data that `config` names.

    Raises:
        DataError: an unknown task, a path that is not there, a malformed line (with file and line), a missing column,
            an empty set.
    """
    if config.task not in TASKS:
        raise DataError(f"there is no task {config.task!r}", fix=nearest(config.task, TASKS), where="data.task")
    read, own_system = TASKS[config.task]
    train, test = read(config)
    random.Random(config.seed).shuffle(train)
    train = train[: max(1, int(len(train) * config.train_fraction))]
    system = (own_system if config.system is None else config.system) or None
    return Dataset(config.task, _under(system, train), _under(system, test), system)


def read_jsonl(path: Path, columns: Sequence[str]) -> list[Row]:
    """The objects of a JSON Lines file; blank lines are skipped.

    Raises:
        DataError: the file cannot be read, is empty, or a line is no JSON object with `columns`.
    """
    try:
        with path.open("rb") as file:
            lines = [(f"{path}:{number}", line) for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if not lines:
        raise DataError("the file is empty", want="one JSON object a line", where=str(path))
    return [_object(line, columns, where) for where, line in lines]


def _object(line: bytes, columns: Sequence[str], where: str) -> Row:
    want = "one JSON object a line"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}", want=want, where=where) from None
    if not isinstance(row, dict):
        raise DataError(f"is a JSON {type(row).__name__}, not an object", want=want, where=where)
    for name in columns:
        if name not in row:
            raise DataError(f"has no column {name!r}", fix=nearest(name, row) if row else "", where=where)
    return row


def _first_letter(config: DataConfig) -> Splits:
    return first_letter.make(config.seed)


def _arithmetic(config: DataConfig) -> Splits:
    return arithmetic.make(config.seed)


def _gsm8k(config: DataConfig) -> Splits:
    train, test = _both_files(config, "GSM8K's folder, with train.jsonl and test.jsonl")
    return _split(config, train, test, lambda file: [gsm8k.row(r) for r in read_jsonl(file, gsm8k.COLUMNS)])


def _jsonl(config: DataConfig) -> Splits:
    train, test = _both_files(config, "a .jsonl file")
    return _split(config, train, test, lambda file: list(_prompted(file, config.prompt_column)))


def _prompted(file: Path, column: str) -> Iterator[Row]:
    for number, row in enumerate(read_jsonl(file, [column]), 1):
        prompt = as_prompt(row.pop(column), f"{file}, row {number}, column {column!r}")
        yield {**row, "prompt": prompt}


def _split(config: DataConfig, train: Path, test: Path | None, read: Callable[[Path], list[Row]]) -> Splits:
    """The rows of both files; without a test file the last tenth of the training rows."""
    rows = read(train)
    if test is not None:
        return rows, read(test)
    held_out = max(1, len(rows) // 10)
    if held_out == len(rows):
        what = "one row cannot be both trained on and held out"
        raise DataError(what, fix="more rows, or --data.test-path FILE", where=str(train))
    return rows[:-held_out], rows[-held_out:]


def _both_files(config: DataConfig, wanted: str) -> tuple[Path, Path | None]:
    path = _existing(config.path, "data.path", wanted)
    if not path.is_dir():
        return path, _existing(config.test_path, "data.test_path", wanted) if config.test_path else None
    train, test = path / "train.jsonl", path / "test.jsonl"
    for file in (train, test):
        if not file.is_file():
            have = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise DataError(f"the folder has no {file.name}, only: {have}", want=wanted, where=str(path))
    return train, test


def _existing(given: str | None, key: str, wanted: str) -> Path:
    option = "--" + key.replace("_", "-")
    if not given:
        raise DataError(f"{key} is not set", want=wanted, fix=f"{option} PATH", where=key)
    path = Path(given).expanduser()
    if path.exists():
        return path
    near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    fix = nearest(path.name, near) if 0 < len(near) < 50 else f"{option} PATH"
    raise DataError(f"there is no {given}", want=wanted, fix=fix, where=key)


def _under(system: str | None, rows: Sequence[Row]) -> list[Row]:
    """The rows with a system message before each prompt, in place of one that is there."""
    if system is None:
        return list(rows)
    first: Message = {"role": "system", "content": system}
    return [{**row, "prompt": [first, *_turns(row["prompt"])]} for row in rows]


def _turns(prompt: str | Sequence[Message]) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [message for message in prompt if message["role"] != "system"]


TASKS: dict[str, tuple[Callable[[DataConfig], Splits], str | None]] = {
    "first-letter": (_first_letter, first_letter.SYSTEM),
    "arithmetic": (_arithmetic, arithmetic.SYSTEM),
    "gsm8k": (_gsm8k, gsm8k.REASONING),
    "jsonl": (_jsonl, None),
}
"""Task → what reads or makes its rows, and its own system message."""
