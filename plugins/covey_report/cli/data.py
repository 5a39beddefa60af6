"""Execute `covey data`: look at the data of a recipe before a run."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from covey.cli.checks import check_source
from covey.cli.parse import Line
from covey.config import recipe
from covey.display import echo, make_console, printable

if TYPE_CHECKING:
    from rich.text import Text

    from covey_report.data_summary import DataSummary, ShownRow  # late in what follows: it needs JAX
    from covey_report.lengths import Lengths

BAR = 40
"""Number of characters of the longest bar of the histogram."""
STYLES = {"template": "dim", "system": "magenta", "user": "cyan", "prompt": "cyan", "assistant": "green"}
"""Styles of the tokens of a role; others are learnt, and bold."""
MAX_SHOWN = 2000
"""Number of characters of a segment that are shown: half of them from its beginning."""


def show_data(line: Line) -> int:
    """Execute `covey data NAME_OR_YAML [--rows N] [--html FILE] [--json] [settings]`.

    Returns:
        0, or 2 if a run would refuse the data.

    Raises:
        CoveyError: the recipe, the model's tokenizer or the source of the data cannot be read.
    """
    loaded = recipe.load_any(line.arguments[0], line.settings)
    assert isinstance(loaded, recipe.Recipe | recipe.SFTRecipe)
    page = Path(line.options["--html"]).expanduser() if "--html" in line.options else None
    rows = line.whole_number("--rows")
    if page is not None:
        from covey_report.page import check_replaceable

        check_replaceable(page)
    check_source(loaded.model.source)
    from covey_report import data_summary  # late: it needs JAX

    summary = data_summary.summarize(loaded, rows or data_summary.SHOWN)
    if page is not None:
        from covey_report.data_page import write_data_page

        size = write_data_page(page, summary.to_json())
        echo(f"{page}: {size:,} bytes; it holds {len(summary.shown)} rows of the data", file=sys.stderr)
    if "--json" in line.options:
        echo(json.dumps(summary.to_json()))
    elif page is None:
        console = make_console(highlight=False)
        for text in _lines(summary):
            console.print(text)
    return 2 if summary.refused else 0


def _lines(summary: "DataSummary") -> Iterator["Text | str"]:
    """Yield the lines of the summary for the terminal."""
    from rich.text import Text

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


def _findings(summary: "DataSummary") -> Iterator["Text"]:
    from rich.text import Text

    if not summary.findings:
        yield Text("  nothing wrong was found", "green")
    for finding in summary.findings:
        yield Text(printable(f"  {finding.title}"), "red" if finding.level == "problem" else "yellow")
        for text in (finding.evidence, *finding.samples, finding.setting and f"change: {finding.setting}"):
            if text:
                yield Text(printable(f"    {text}"))


def _row(row: "ShownRow") -> Iterator["Text"]:
    """Yield a row: a line for each of its segments, with role, number of tokens, and text."""
    from rich.text import Text

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


def _lengths(lengths: "Lengths", summary: "DataSummary") -> Iterator["Text"]:
    from rich.text import Text

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
