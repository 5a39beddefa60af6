"""Statistics of rows that are read one by one: malformed rows, columns, lengths in tokens, and hashes; and of a sample
of whole rows the order in which they come, and answers that stand in their prompts.

Of a row 36 bytes and a count of tokens are kept, so that a million rows fit in a small memory. To count the tokens of a
chat takes a third of a millisecond: of more than `MAX_MEASURED` rows every second, fourth, eighth ... is measured. The
sample has every row of up to `MAX_SAMPLE`, and every second, fourth, eighth ... of more.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from covey.data.rows import Row
from covey.data.sources import Rows
from covey.errors import DataError
from covey_data.duplicates import ANSWERS, PROMPT, RowHashes

MAX_MEASURED = 20_000
"""Largest number of rows whose counts of tokens are kept: then every second count is dropped."""
MAX_SAMPLE = 1000
"""Largest number of rows that are kept whole: then every second one is dropped."""
MAX_PLACES = 3
"""Number of rows that are examples of one mistake."""
LONG = 20
"""Number of characters from which an answer does not stand in a text by chance."""
MIN_ORDERED, MOST_EQUAL = 20, 0.9
"""Fewest rows whose order means something, and largest share of them that may have the same value."""
LENGTH = "length of the prompt"
"""Name of what rows may be sorted by besides their columns."""
MARK = re.compile(r"\b(?:answer|solution|label|output|response)\b(?: is)?|[?=]|####|\\boxed\{")
"""Pattern of what an answer follows at the end of a prompt."""
SAID = re.compile(r"\b(?:answer|solution|label|hint|result)\W{0,3}(?:is\b|[:=])")
"""Pattern of words that an answer follows anywhere in a prompt."""
VALUES = re.compile(r"'[^']*'|\d+")
"""Pattern of what differs between errors of the same mistake: numbers and quoted values."""

Measure = Callable[[Row], int]
"""Function that counts the tokens of a row."""


class Malformed(NamedTuple):
    """Rows with the same mistake.

    Attributes:
        what: the mistake of the first of them.
        fix: how to fix it, or what would be right.
        rows: number of these rows.
        places: places of the first of them.
    """

    what: str
    fix: str
    rows: int
    places: list[str]


class RowScan:
    """Statistics of the rows that `read` has read.

    Args:
        columns: what is trained on, as for `RowHashes`.
        measure: counts the tokens of a row.
        keep: number of rows at the beginning that are kept whole.

    Attributes:
        first: the first `keep` rows.
        longest: the longest row that was measured, and its number of tokens.
        malformed: malformed rows by mistake.
        present: number of rows that have a column, by its name.
        empty: number of these in which its value is None or an empty text.
        sample: rows that are kept whole, with their numbers.
        every: one row in so many was measured.
    """

    def __init__(self, columns: Sequence[str] | None, measure: Measure, keep: int = 0):
        self._measure, self._keep = measure, keep
        self._hashes, self._numbers, self._lengths = RowHashes(columns), array("I"), array("I")
        self.first: list[Row] = []
        self.longest: tuple[int, Row] | None = None
        self.malformed: dict[str, Malformed] = {}
        self.present, self.empty = Counter[str](), Counter[str]()
        self.sample: list[tuple[int, Row]] = []
        self.every = self._every_kept = 1

    def __len__(self) -> int:
        """Return the number of rows that are not malformed."""
        return len(self._numbers)

    def read(self, rows: Rows) -> "RowScan":
        """Read `rows`; return itself."""
        for number, row in enumerate(rows, 1):
            try:
                self._add(number, row)
            except DataError as error:  # the row's own, or that of its tokens
                mistake = VALUES.sub("", error.what)
                fix = error.fix or (f"wanted: {error.want}" if error.want else "")
                what, fix, count, places = self.malformed.get(mistake, (error.what, fix, 0, []))
                self.malformed[mistake] = Malformed(what, fix, count + 1, [*places, error.where][:MAX_PLACES])
        return self

    def number(self, index: int) -> int:
        """Return the number in the source, from 1, of a row that is not malformed."""
        return self._numbers[index]

    def hashes(self) -> np.ndarray:
        """Return the hashes of the rows, int64 [rows, 3]."""
        return self._hashes.table()

    def lengths(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return the tokens of the measured ones among the rows from `begin` to `end`, int64 [n]."""
        stop = len(self) if end is None else end
        return np.array(self._lengths[-(-begin // self.every) : -(-stop // self.every)], np.int64)

    def _add(self, number: int, row: Row | DataError) -> None:
        if isinstance(row, DataError):
            raise row
        if len(self) % self.every == 0:
            self._measure_row(row)
        self._numbers.append(number)
        self._hashes.add(row)
        if len(self.first) < self._keep:
            self.first.append(row)
        self.present.update(row.keys())
        self.empty.update(name for name, value in row.items() if is_empty(value))
        if len(self) % self._every_kept == 0:
            self.sample.append((number, row))
        if len(self.sample) > MAX_SAMPLE:
            self.sample, self._every_kept = self.sample[::2], 2 * self._every_kept

    def _measure_row(self, row: Row) -> None:
        tokens = self._measure(row)
        if self.longest is None or tokens > self.longest[0]:
            self.longest = tokens, row
        self._lengths.append(tokens)
        if len(self._lengths) > MAX_MEASURED:
            self._lengths, self.every = self._lengths[::2], 2 * self.every


def is_empty(value: Any) -> bool:
    """Tell whether a column has no value: None, or a text of white space."""
    return value is None or not str(value).strip()


def rows_with_answer(sample: Sequence[tuple[int, Row]]) -> dict[str, tuple[int, int, dict[int, str]]]:
    """Return the columns of `ANSWERS` whose value stands in the prompt, with the number of these rows, the number of
    rows with an answer, and the ends of the first of these prompts.

    An answer stands there if it follows the last question mark, equals sign or word such as "answer", if it follows
    "the answer is", or if it is long and anywhere in the last message. Columns whose values fit as often into the
    prompt of the next row are left out.
    """
    result = {}
    for name in ANSWERS:
        rows = [(n, _asked(row), str(row[name])) for n, row in sample if isinstance(row.get(name), str | int | float)]
        found = {number: prompt[-60:] for number, prompt, answer in rows if _stands_in(prompt, answer)}
        by_chance = sum(a[2] != b[2] and _stands_in(b[1], a[2]) for a, b in pairwise(rows))
        if len(found) > 3 * by_chance:
            result[name] = len(found), len(rows), dict(islice(found.items(), MAX_PLACES))
    return result


def _asked(row: Row) -> str:
    """Return the text of a prompt, or of its last message."""
    return str(row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"])


def _stands_in(prompt: str, answer: str) -> bool:
    text, wanted = prompt.casefold(), answer.strip().casefold()
    ends = [mark.end() for mark in SAID.finditer(text)] + [mark.end() for mark in MARK.finditer(text)][-1:]
    after = [text[end : end + len(wanted) + 20].lstrip(" :*=\"'$(\n") for end in ends]
    follows = any(part.startswith(wanted) and not part[len(wanted) :][:1].isalnum() for part in after)
    return bool(wanted) and (follows or (len(wanted) >= LONG and wanted in text))


def sorted_columns(sample: Sequence[tuple[int, Row]]) -> dict[str, tuple[Any, Any]]:
    """Return the columns by which the rows are sorted or grouped, each with its first and last value."""
    rows, prompts = [row for _, row in sample], [_asked(row) for _, row in sample]
    columns: dict[str, list[Any]] = {key: [row.get(key) for row in rows] for key in dict.fromkeys(chain(*rows))}
    columns |= {"prompt": prompts, LENGTH: list(map(len, prompts))}
    return {name: (values[0], values[-1]) for name, values in columns.items() if _is_sorted(name, values)}


def _is_sorted(name: str, values: Sequence[Any]) -> bool:
    """Tell whether the values of a column rise, fall or come in groups; numbers of rows and other ids do not count."""
    known = [_sort_key(value) for value in values if isinstance(value, str | int | float)]
    groups, distinct = 1 + sum(a != b for a, b in pairwise(known)), len({*known})
    if len(known) < MIN_ORDERED or groups != distinct or max(Counter(known).values()) > MOST_EQUAL * len(known):
        return False
    rises_or_falls = known in (ordered := sorted(known), ordered[::-1])
    if name == LENGTH:  # numbered prompts become longer too
        return rises_or_falls and max(values) > 2 * min(values)
    is_no_id = name in (*ANSWERS, "prompt") or all(re.fullmatch(r"-?\d+\.\d+", str(value)) for value in values)
    return (rises_or_falls and is_no_id) or 2 * distinct < len(known)


def _sort_key(value: Any) -> tuple[float | str, ...]:
    """Return a key that sorts texts by the size of the numbers in them."""
    return tuple(float(part) if n % 2 else part for n, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", str(value))))


def find_contradictions(columns: Sequence[str] | None, table: np.ndarray) -> list[int]:
    """Return the number of prompts that have several answers, and the indices of two such rows if there are any.

    Args:
        columns: what is trained on, as for `RowHashes`; of whole rows nothing is an answer.
        table: hashes of the training rows.
    """
    given = np.flatnonzero(table[:, 3] if columns else [])
    prompts, answers = table[given, 2:].T if columns == PROMPT else table[given, :1:-1].T
    order = np.lexsort((answers, prompts))
    differ = np.flatnonzero((np.diff(prompts[order]) == 0) & (np.diff(answers[order]) != 0))
    return [np.unique(prompts[order[differ]]).size, *given[order[[*differ[:1], *differ[:1] + 1]]].tolist()]
