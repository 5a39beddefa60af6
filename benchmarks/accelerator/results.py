"""Results of the checks: rows beside what was expected, the file that keeps them, and their tables."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import short
from covey.files import replace_file
from covey.monitor.writer import strict_json

SCHEMA = 1
"""Version of the JSON file."""
TITLES = ("check", "quantity", "expected", "measured", "ratio")
PASSED, FAILED, ERROR, NOT_TRIED, NOT_FINISHED = "passed", "failed", "error", "not tried", "not finished"


class NotTriedError(Exception):
    """A check cannot be made on this machine; its message says why."""


@dataclass(frozen=True)
class Row:
    """A measurement beside what was expected.

    Attributes:
        what: quantity that was measured.
        measured: its value in `unit`.
        expected: by the plan or the data sheet; or, with `bound`, the most that is allowed. None where nothing is.
        bound: whether a larger measurement is a failure.
    """

    what: str
    measured: float
    expected: float | None = None
    unit: str = ""
    bound: bool = False

    @property
    def fails(self) -> bool:
        """Whether the measurement is beyond its bound, or no number."""
        return self.bound and not (self.expected is not None and self.measured <= self.expected)

    @property
    def cells(self) -> tuple[str, str, str]:
        """Expected, measured, and measured over expected, in words."""
        if self.expected is None:
            return "", self._number(self.measured), ""
        ratio = f"{self.measured / self.expected:.2g}" if self.expected else ""
        return ("≤ " if self.bound else "") + self._number(self.expected), self._number(self.measured), ratio

    def _number(self, value: float) -> str:
        return f"{value:.3g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    Attributes:
        status: `PASSED`, `FAILED` (a row is beyond its bound), `ERROR` (an exception), `NOT_TRIED`, or `NOT_FINISHED`
            (the minutes were over).
        message: reason of an error, or why the check was not tried or not finished.
    """

    status: str
    rows: tuple[Row, ...] = ()
    message: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Outcome":
        """Return the outcome of a check that came to its end with these rows."""
        measured = tuple(rows)
        return cls(FAILED if any(row.fails for row in measured) else PASSED, measured)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Outcome":
        """Return the outcome whose `asdict` was written as strict JSON, where NaN is null."""
        rows = (row | {"measured": math.nan} if row["measured"] is None else row for row in values["rows"])
        return cls(**{**values, "rows": tuple(Row(**row) for row in rows)})

    @property
    def is_final(self) -> bool:
        """Whether a second call skips the check."""
        return self.status in (PASSED, NOT_TRIED)

    @property
    def fails(self) -> bool:
        """Whether the check found a fault."""
        return self.status in (FAILED, ERROR)


@dataclass
class Results:
    """Outcomes of the checks of one version on one machine.

    Attributes:
        identity: version and devices that the outcomes belong to.
        machine: facts about the machine for the reader.
        checks: outcome of each check by name.
    """

    identity: Mapping[str, Any]
    machine: Mapping[str, Any]
    checks: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def resume(cls, path: Path, identity: Mapping[str, Any], machine: Mapping[str, Any]) -> "Results":
        """Return the results in the file `path`; if they are of another version or device, keep that file under another
        name, and return results without outcomes.
        """
        results = cls(identity, machine)
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.get("schema") == SCHEMA and values["identity"] == identity:
                results.checks = {name: Outcome.from_json(one) for name, one in values["checks"].items()}
            else:
                path.replace(path.with_suffix(".earlier.json"))
        return results

    def save(self, path: Path) -> None:
        """Write the file."""
        checks = {name: asdict(outcome) for name, outcome in self.checks.items()}
        values = {"schema": SCHEMA, "identity": self.identity, "machine": self.machine, "checks": checks}
        replace_file(path, (strict_json(values, indent=1) + "\n").encode())

    def table(self) -> Table:
        """Return the rows of all checks as a table for the terminal."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for number, title in enumerate(TITLES):
            table.add_column(title, justify="left" if number < 2 else "right")
        for cells in self._cells():
            table.add_row(*cells)
        return table

    def markdown(self) -> str:
        """Return the rows of all checks as lines for benchmarks/RESULTS.md."""
        lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in self._cells()]
        return "\n".join(["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES), *lines])

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for name, outcome in self.checks.items():
            if outcome.status in (ERROR, NOT_TRIED, NOT_FINISHED):
                yield name, f"{outcome.status}: {outcome.message.splitlines()[0]}", "", "", ""
            first = name
            for row in outcome.rows:
                yield first, row.what + (" (failed)" if row.fails else ""), *row.cells
                first = ""


def seconds_row(what: str, measured: float, expected: float | None) -> Row:
    """Return the row of a time beside the plan's."""
    return Row(what, short(measured), None if expected is None else short(expected), "s")
