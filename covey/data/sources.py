"""Training and test rows for a `DataConfig`: generated tasks, and any records in files or on a hub. Packages offer more
tasks by the entry points `covey.tasks`.

Rows have prompts, and for supervised training completions. `readers` reads the records. `iter_rows` yields the rows one
by one, for a look at data of any size; `load_data` collects them.
"""

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from covey.config.schema import DataConfig, SFTDataConfig
from covey.config.schema.data import FROM_PYTHON
from covey.data import arithmetic, first_letter, readers
from covey.data.rows import (
    FORMS,
    Form,
    Row,
    as_chat_row,
    as_prompt,
    as_rows,
    chat,
    find_chat_form,
    format_counts,
)
from covey.errors import DataError
from covey.registry import offered
from covey.types import Message

log = logging.getLogger(__name__)

Rows = Iterable[Row | DataError]
"""Rows, and in the place of a malformed one its error."""
Splits = tuple[Rows, Rows | None]
"""Training rows and test rows; without test rows the last tenth of the training rows is held out."""


@dataclass(frozen=True)
class Dataset:
    """Data that a run trains on and is tested on.

    Attributes:
        name: name of the task.
        train: training rows, shuffled by the seed and cut to `train_fraction`.
        test: held-out rows, in a fixed order.
        system: the system message before each prompt; None if there is none.
    """

    name: str
    train: Sequence[Row]
    test: Sequence[Row]
    system: str | None = None


class Task(NamedTuple):
    """A task that the data may be for.

    Attributes:
        rows: reads or makes its rows.
        examples: the same, with the completions to learn.
        system: the task's own system message; None if it has none.
    """

    rows: Callable[[DataConfig], Splits]
    examples: Callable[[SFTDataConfig], Splits]
    system: str | None = None


def load_data(config: DataConfig) -> Dataset:
    """Load the rows that `config` names: hold some out, shuffle the others and cut them to `train_fraction`.

    Args:
        config: the section `data`; for that of supervised training each row has the `completion` to learn: a task's
            worked answer, or the file's own.

    Raises:
        DataError: the task is unknown or has no worked answers, the path does not exist, a line is malformed (with file
            and line), a column is missing, or the set is empty.
    """
    splits = iter_rows(config)
    train, test = ([] if part is None else [readers.required(row) for row in part] for part in splits)
    if splits[1] is None:
        cut = len(train) - num_held_out(len(train))
        if not cut:
            fix = "more rows, or --data.test-path FILE"
            raise DataError("one row cannot be both trained on and held out", fix=fix, where=str(config.path))
        train, test = train[:cut], train[cut:]
    random.Random(config.seed).shuffle(train)
    train = train[: max(1, int(len(train) * config.train_fraction))]
    return Dataset(config.task, train, test, _system_of(config, find_task(config)))


def read_rows(data: Any) -> list[Row]:
    """Return the rows of `data`: what `as_rows` takes, or the path of a file of rows.

    Raises:
        DataError: there is no such file, it is empty, or the rows have an unknown form.
    """
    if not isinstance(data, str | os.PathLike):
        return as_rows(data)
    return [readers.required(row) for row in iter_rows(DataConfig(task="jsonl", path=os.fspath(data)))[0]]


def iter_rows(config: DataConfig) -> Splits:
    """Return the rows that `config` names as they are read, in the order of the source and with the system message.

    Args:
        config: the section `data`; that of supervised training gives rows with completions.

    Raises:
        DataError: the task is unknown or the path does not exist. While the rows are read: a file is no such file, or
            empty.
    """
    task = find_task(config)
    train, test = task.examples(config) if isinstance(config, SFTDataConfig) else task.rows(config)
    system = _system_of(config, task)
    return _add_system(system, train), None if test is None else _add_system(system, test)


def num_held_out(rows: int) -> int:
    """Return the number of rows, the last ones of `rows`, that are held out where the source has no test set."""
    return max(1, rows // 10)


def find_task(config: DataConfig) -> Task:
    """Return the task of the settings `config`; a DataError says what is wrong with them."""
    for problem in config.contradictions_in_recipe():
        raise DataError(problem.what, want=problem.want, where=f"data.{problem.key}")
    if config.task == FROM_PYTHON:
        raise DataError(
            "a script gave this run its data, and no command has them",
            want="to resume, the script that began the run: learner.train(rows, out=FOLDER)",
            fix="to evaluate: covey eval RUN --data.task jsonl --data.path FILE --rewards NAME",
        )
    task: Task = TASKS.get(config.task) or offered("covey.tasks", config.task)
    return task


def _system_of(config: DataConfig, task: Task) -> str | None:
    return (task.system if config.system is None else config.system) or None


def _jsonl(config: DataConfig) -> Splits:
    column = config.prompt_column
    chats = tuple(form.columns[0] for form in FORMS if form.to_chat) if column == DataConfig.prompt_column else ()
    find = lambda record: None if column in record else find_chat_form(record)  # noqa: E731
    return open_rows(
        config, [(column, *chats)], JSONL, lambda record, where: _prompt_row(record, column, where), find=find
    )


def with_answers(make: Callable[[int], tuple[list[Row], list[Row]]], system: str | None = None) -> Task:
    """Return the task of rows that `make` makes from a seed; their answers are the completions to learn."""

    def examples(config: SFTDataConfig) -> Splits:
        train, test = ([{**row, "completion": row["answer"]} for row in part] for part in make(config.seed))
        return train, test

    return Task(lambda config: make(config.seed), examples, system)


def _jsonl_examples(config: SFTDataConfig) -> Splits:
    """Return the examples of a file, which the package of supervised training reads."""
    return offered("covey.examples", "jsonl")(config)  # type: ignore[no-any-return]


def _no_examples(config: SFTDataConfig) -> Splits:
    raise DataError(
        "the first-letter task has no worked answers to learn from",
        fix="--data.task arithmetic, or your own file: --data.task jsonl --data.path FILE.jsonl",
        where="data.task",
    )


def _prompt_row(record: Row, column: str, where: str) -> Row:
    if column not in record:
        return as_chat_row(record, where)
    return {
        **{name: value for name, value in record.items() if name != column},
        "prompt": as_prompt(record[column], f"{where}, column {column!r}"),
    }


def open_rows(
    config: DataConfig,
    columns: readers.RequiredColumns,
    wanted: str,
    row: Callable[[Row, str], Row],
    hub_config: str | None = None,
    find: Callable[[Row], Form | None] | None = None,
) -> Splits:
    """Return the records at `config.path` as rows.

    Args:
        columns, wanted, hub_config: see `readers.open_records`.
        row: converts a record to a row; its second argument names the record in errors.
        find: returns the form of a training record, for the log.
    """
    train, test = readers.open_records(config, columns, wanted, hub_config)
    return _convert_records(train, row, find), None if test is None else _convert_records(test, row)


def _convert_records(
    part: readers.Records, row: Callable[[Row, str], Row], find: Callable[[Row], Form | None] | None = None
) -> Iterator[Row | DataError]:
    forms = Counter[Form | None]()
    for number, record in enumerate(part.records, 1):
        if isinstance(record, DataError):
            yield record
            continue
        if find is not None:
            forms[find(record)] += 1
        yield readers.attempt(row, record, f"{part.name}, row {number}")
    if find is not None:
        log.info(f"{part.name}: {format_counts(forms.elements())}")


def _add_system(system: str | None, rows: Rows) -> Rows:
    """Return the rows with a system message before each prompt; it replaces one that is already there."""
    if system is None:
        return rows
    first: Message = {"role": "system", "content": system}
    return (row if isinstance(row, DataError) else readers.attempt(_with_system, first, row) for row in rows)


def _with_system(first: Message, row: Row) -> Row:
    if row["prompt"] == "":
        raise DataError("plain text has no place for a system message", fix="no data.system", where="data.system")
    turns = chat(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"]
    return {**row, "prompt": [first, *(turn for turn in turns if turn["role"] != "system")]}


JSONL = "a .jsonl, .json, .csv, .tsv or .parquet file, a folder with train.jsonl and test.jsonl, or hf:org/name"

TASKS: dict[str, Task] = {
    "first-letter": Task(lambda config: first_letter.make_rows(config.seed), _no_examples, first_letter.SYSTEM),
    "arithmetic": with_answers(arithmetic.make_rows, arithmetic.SYSTEM),
    "sums": with_answers(arithmetic.make_sums),
    "jsonl": Task(_jsonl, _jsonl_examples),
}
