"""The summary of a recipe's data as lines for the terminal."""

from collections.abc import Iterator, Sequence
from functools import partial

from rich.text import Text

from covey.display import printable
from covey_report.data_summary import DataSummary, ShownRow
from covey_report.lengths import Lengths

BAR = 40
"""Number of characters of the longest bar of the histogram."""
STYLES = {"template": "dim", "system": "magenta", "user": "cyan", "prompt": "cyan", "assistant": "green"}
"""Styles of the tokens of a role; others are learnt, and bold."""
MAX_SHOWN = 2000
"""Number of characters of a segment that are shown: half of them from its beginning."""


def lines_of(summary: DataSummary) -> Iterator[Text]:
    """Yield the lines of the summary for the terminal."""
    heading = partial(Text, style="bold")
    left = f", of which data.train_fraction leaves {summary.used:,}" if summary.used < summary.train else ""
    yield Text(printable(f"{summary.source}: {summary.train:,} training rows{left}, {summary.held_out:,} held out"))
    yield heading("\nfindings")
    yield from _findings(summary)
    yield heading("\nrows as the model gets them")
    for row in summary.shown:
        yield from _row(row)
    if summary.lengths is not None:
        yield heading("\nlengths in tokens")
        yield from _lengths(summary.lengths, summary)
    yield heading("\nduplicates: rows that are equal in")
    for entry in summary.duplicates:
        counts = f"{entry.distinct:>11,} distinct {entry.repeated:>11,} repeated {entry.held_out:>9,} held out too"
        yield Text(f"  {entry.equal_in:<34}{counts}")
    yield heading("\ncolumns")
    width = max((len(column.name) for column in summary.columns), default=0)
    for column in summary.columns:
        lacking = f", None in {column.lacking:,}" if column.lacking else ""
        by = ", ".join(column.read_by) or ("the model" if column.name in ("prompt", "completion") else "nothing")
        yield Text(printable(f"  {column.name:<{width}}  {column.filled:,} rows{lacking}, read by {by}"))
    yield Text(f"\n{summary.seconds:.1f} s", "dim")


def _findings(summary: DataSummary) -> Iterator[Text]:
    if not summary.findings:
        yield Text("  nothing wrong was found", "green")
    for finding in summary.findings:
        yield Text(printable(f"  {finding.title}"), "red" if finding.level == "problem" else "yellow")
        for text in (finding.evidence, *finding.samples, finding.setting and f"change: {finding.setting}"):
            if text:
                yield Text(printable(f"    {text}"))


def _row(row: ShownRow) -> Iterator[Text]:
    """Yield a row: a line for each of its segments, with role, number of tokens, and text."""
    counts: dict[str, int] = {}
    for segment in row.segments:
        counts[segment.role] = counts.get(segment.role, 0) + len(segment.texts)
    total = f"{sum(counts.values()):,} tokens: " + ", ".join(f"{count:,} {role}" for role, count in counts.items())
    yield Text(printable(f"  {row.title}, {total}"), "underline")
    for segment in row.segments:
        style = STYLES.get(segment.role, "bold green")
        for number, line in enumerate(_shown("".join(segment.texts), segment.role == "template")):
            label = f"{segment.role:<10}{len(segment.texts):>5} " if not number else " " * 16
            yield Text.assemble((f"  {printable(label)} ", "dim"), (printable(line), style))


def _shown(text: str, escaped: bool) -> Sequence[str]:
    """Return the lines of a text that are shown: one, with its line breaks escaped, of a template."""
    if len(text) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        text = f"{text[:half]} … {len(text) - MAX_SHOWN:,} characters … {text[-half:]}"
    return [text] if escaped else text.split("\n")


def _lengths(lengths: Lengths, summary: DataSummary) -> Iterator[Text]:
    limit, most = summary.limit, max(bar.rows for bar in lengths.bars)
    of = "" if summary.every == 1 else f" of one row in {summary.every}"
    yield Text(
        f"  mean {lengths.mean:g}, median {lengths.median:g}, 99 % up to {lengths.p99:.0f}, longest "
        f"{lengths.longest:,}{of}; {limit.setting} {limit.tokens:,}: {lengths.over:,} longer"
    )
    for bar in lengths.bars:
        full = round(BAR * bar.rows / most) or int(bar.rows > 0)
        red = round(full * bar.over / bar.rows) if bar.rows else 0
        label = f"  {bar.first:>7,}-{bar.last:<7,} {bar.rows:>9,} "
        yield Text.assemble(label, ("█" * (full - red), "cyan"), ("█" * red, "red"))
