"""Findings on the data of a recipe before a run, as the diagnosis of a run has them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from covey.data.loader import BESIDE_PROMPT
from covey.data.rows import PLAIN
from covey_data.duplicates import describe_overlap, describe_repeated
from covey_report.diagnosis import Finding

if TYPE_CHECKING:
    from covey_report.data_summary import DataSummary

TREATMENT = {"drop": "dropped", "truncate": "cut", "error": "refused, as are the data"}
"""Treatment of rows that are too long, by `training.too_long`."""
MANY = 0.05
"""Share of rows from which it is a problem, and no note, that they are dropped, cut, empty, or held out and trained on,
or that their answer stands in their prompt.
"""


def find_problems(summary: "DataSummary") -> list[Finding]:
    """Return the findings; first come reasons for which a run refuses the data."""
    told = [*_malformed(summary), *_missing(summary), *_too_long(summary), *_answers(summary)]
    told += [*_ordered(summary), *_duplicates(summary), *_columns(summary)]
    return [*told, *([_finding(f"{summary.plain:,} {PLAIN[0]}", *PLAIN[1:], level="note")] if summary.plain else [])]


def _malformed(summary: "DataSummary") -> Iterator[Finding]:
    if count := sum(rows.rows for rows in summary.malformed):
        seen = f"a run refuses the data; {summary.train + summary.held_out:,} others are right"
        lines = (
            f"{rows.rows:,} as in {', '.join(rows.places)}: {rows.what}{f' ({rows.fix})' if rows.fix else ''}"
            for rows in summary.malformed
        )
        title = "1 row is malformed" if count == 1 else f"{count:,} rows are malformed"
        yield _finding(title, seen, "mend them or leave them out", tuple(lines))
    for name, count in {"training": summary.train, "held-out": summary.held_out}.items():
        if not count:
            yield _finding(f"there is no {name} row", "", "more rows")


def _missing(summary: "DataSummary") -> Iterator[Finding]:
    for error in summary.missing:
        title = f"{error.where}: {error.what}" if error.where else error.what
        yield _finding(title, f"there are {error.want}", error.fix or "--rewards with another function")


def _too_long(summary: "DataSummary") -> Iterator[Finding]:
    lengths, limit = summary.lengths, summary.limit
    if lengths is None or not lengths.over + summary.held_out_over:
        return
    parts = {"training": lengths.over * summary.every, "held-out": summary.held_out_over}
    about = "" if summary.every == 1 else "about "
    rows = " and ".join(f"{count:,} {name} row{'s' * (count > 1)}" for name, count in parts.items() if count)
    is_bad = limit.policy == "error" or lengths.over > MANY * lengths.measured
    flag = f"--{limit.setting}".replace("_", "-")
    others = " or ".join(policy for policy in ("drop", "truncate") if policy != limit.policy)
    yield _finding(
        f"longer than {limit.tokens:,} tokens: {about}{rows}, {TREATMENT[limit.policy]}",
        f"the longest training row has {lengths.longest:,} tokens; training.too_long is {limit.policy}",
        f"{flag} {max(lengths.longest, limit.tokens)}, or --training.too-long {others}",
        level="problem" if is_bad else "note",
    )


def _duplicates(summary: "DataSummary") -> Iterator[Finding]:
    if overlap := describe_overlap(summary.duplicates, summary.held_out):
        why = "held-out results cannot tell what is learnt from what is remembered"
        change = "hold out rows that are not trained on: --data.test-path FILE"
        is_bad = summary.duplicates[-1].held_out > MANY * summary.held_out
        yield _finding(overlap, why, change, level="problem" if is_bad else "note")
    if repeated := describe_repeated(summary.duplicates):
        most = summary.duplicates[-1]
        often = f"the most frequent one is there {most.most:,} times"
        change = "leave the repeated rows out" if most.repeated > MANY * summary.train else ""
        yield _finding(repeated, often, change, level="problem" if most.distinct == 1 else "note")


def _answers(summary: "DataSummary") -> Iterator[Finding]:
    for name, (rows, of, ends) in summary.answered.items():
        yield _finding(
            f"the {name} stands in the prompt of {rows:,} of {of:,} training rows",
            "the model can copy it",
            "leave it out of the prompt, unless to find it there is the task",
            tuple(f"row {number}: …{end!r}" for number, end in ends.items()),
            level="problem" if rows > MANY * of else "note",
        )
    prompts, *places = summary.contradictions
    if prompts:
        yield _finding(
            "1 prompt has several answers" if prompts == 1 else f"{prompts:,} prompts have several answers",
            f"as rows {' and '.join(map(str, places))}, but for case and white space",
            "keep the right one of them; several right answers are fine in supervised training",
            level="note",
        )


def _ordered(summary: "DataSummary") -> Iterator[Finding]:
    for first, last in [*summary.ordered.values()][:1]:
        yield _finding(
            f"the held-out rows are the last of a file that is sorted by {', '.join(map(repr, summary.ordered))}",
            f"from {first!r:.40} in the first row to {last!r:.40} in the last: they are not like the training rows",
            "shuffle the rows of the file, or --data.test-path FILE",
            level="note" if [*summary.ordered] == ["prompt"] else "problem",  # prompts may be numbered
        )


def _columns(summary: "DataSummary") -> Iterator[Finding]:
    for column in summary.columns:
        if column.read_by and column.lacking:
            yield _finding(
                f"the column {column.name!r} is empty in {column.lacking:,} of {column.lacking + column.filled:,} rows",
                f"it is read by {', '.join(column.read_by)}; as in rows {', '.join(map(str, column.places))}",
                "",
                level="problem" if column.lacking > MANY * column.filled else "note",
            )
        if column.name in BESIDE_PROMPT and column.filled:
            title = f"no prompt has what stands in the column {column.name!r}"
            change = "write it into the chat, or leave the column out"
            yield _finding(title, "other trainers put it there or learn from it", change, level="note")


def _finding(title: str, evidence: str, change: str, samples: tuple[str, ...] = (), level: str = "problem") -> Finding:
    return Finding(title, "", evidence, change, level=level, samples=samples)
