"""Statistics of rows read one by one: they go on behind malformed rows, and keep little of each row."""

import tracemalloc

import numpy as np
import pytest

from covey.errors import DataError
from covey_data.duplicates import PROMPT, RowHashes, count_duplicates
from covey_report import scan
from covey_report.lengths import describe_lengths
from covey_report.scan import RowScan


def test_malformed_rows_are_counted_by_mistake_and_the_others_keep_their_numbers() -> None:
    rows = [{"prompt": "a", "answer": "1"}, DataError("line 3 is bad", where="f:3"), {"prompt": "b", "answer": None}]
    rows += [DataError(f"line {n} is bad", where=f"f:{n}") for n in range(4, 9)] + [DataError("the text is ''")]
    result = RowScan(PROMPT, lambda row: len(row["prompt"]), keep=5).read(rows)
    assert [(one.what, one.rows, one.places) for one in result.malformed.values()] == [
        ("line 3 is bad", 6, ["f:3", "f:4", "f:5"]),
        ("the text is ''", 1, [""]),
    ]
    assert (len(result), result.number(1), len(result.first)) == (2, 3, 2)
    assert (result.present["answer"], result.empty["answer"]) == (2, 1)


def test_of_many_rows_every_second_fourth_eighth_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_MEASURED", 10)
    result = RowScan(PROMPT, lambda row: int(row["prompt"])).read([{"prompt": str(n)} for n in range(100)])
    assert (result.every, result.lengths().tolist()) == (16, [*range(0, 100, 16)])
    assert result.lengths(0, 48).tolist() == [0, 16, 32]
    assert result.lengths(48).tolist() == [48, 64, 80, 96]


def test_a_row_leaves_less_than_fifty_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are not among the few that are kept whole."""
    count = 2_000
    monkeypatch.setattr(scan, "MAX_SAMPLE", 10)
    tracemalloc.start()
    result = RowScan(PROMPT, lambda _: 1).read({"prompt": f"What is {n} + 1?" * 5} for n in range(count))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(result) == count
    assert held < 50 * count


@pytest.mark.parametrize(
    ("other", "equal"),
    [("Is 1 2 < 3?", 3), ("is 1  2\n< 3?", 1), (" Is 1 2 < 3? ", 1), ("Is 12 < 3?", 0), ("IS É?", 0)],
)
def test_rows_are_equal_but_for_case_and_white_space(other: str, equal: int) -> None:
    tables = [RowHashes(PROMPT, [{"prompt": text}]).table() for text in ("Is 1 2 < 3?", other)]
    assert sum(one.held_out for one in count_duplicates(*tables)) == equal


def test_what_is_trained_on_may_be_equal_where_other_columns_differ() -> None:
    rows = [{"prompt": "2+2?", "id": n} for n in range(5)] + [{"prompt": "3+3?", "id": 9}]
    every, trained, _ = count_duplicates(RowHashes(PROMPT, rows).table(), RowHashes(PROMPT, rows[:1]).table())
    assert (every.distinct, trained.distinct, trained.repeated, trained.most, trained.place) == (6, 2, 4, 5, 0)
    assert (trained.held_out, trained.held_out_place) == (1, 0)


def test_the_bars_have_every_row_and_what_is_over_the_limit() -> None:
    counts = np.array([5] * 90 + [*range(10, 19)] + [100_000])
    lengths = describe_lengths(counts, 15)
    assert lengths is not None
    assert (lengths.median, lengths.longest, lengths.over) == (5, 100_000, 4)
    assert sum(bar.rows for bar in lengths.bars) == 100
    assert sum(bar.over for bar in lengths.bars) == 4
    assert len(lengths.bars) < 30  # one row far from the others does not put them all into one bar
    assert describe_lengths(counts[:0], 15) is None
