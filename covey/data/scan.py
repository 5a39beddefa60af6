"""Statistics of rows that are read one by one: malformed rows, columns, lengths in tokens, and hashes.

Of a row 28 bytes and a count of tokens are kept, so that a million rows fit in a small memory. To count the tokens of a
chat takes a third of a millisecond: of more than `MAX_MEASURED` rows every second, fourth, eighth ... is measured.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from covey.data.duplicates import RowHashes
from covey.data.rows import Row
from covey.data.sources import Rows
from covey.errors import DataError

if TYPE_CHECKING:
    import numpy as np

MAX_MEASURED = 20_000
"""Largest number of rows whose counts of tokens are kept: then every second count is dropped."""
MAX_PLACES = 3
"""Number of malformed rows whose places are kept, for each mistake."""
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
        empty: number of these in which its value is None.
        every: one row in so many was measured.
    """

    def __init__(self, columns: Sequence[str] | None, measure: Measure, keep: int = 0):
        self._measure, self._keep = measure, keep
        self._hashes, self._numbers, self._lengths = RowHashes(columns), array("I"), array("I")
        self.first: list[Row] = []
        self.longest: tuple[int, Row] | None = None
        self.malformed: dict[str, Malformed] = {}
        self.present, self.empty = Counter[str](), Counter[str]()
        self.every = 1

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

    def hashes(self) -> "np.ndarray":
        """Return the hashes of the rows, int64 [rows, 3]."""
        return self._hashes.table()

    def lengths(self, begin: int = 0, end: int | None = None) -> "np.ndarray":
        """Return the tokens of the measured ones among the rows from `begin` to `end`, int64 [n]."""
        import numpy as np

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
        self.empty.update(name for name, value in row.items() if value is None)

    def _measure_row(self, row: Row) -> None:
        tokens = self._measure(row)
        if self.longest is None or tokens > self.longest[0]:
            self.longest = tokens, row
        self._lengths.append(tokens)
        if len(self._lengths) > MAX_MEASURED:
            self._lengths, self.every = self._lengths[::2], 2 * self.every
