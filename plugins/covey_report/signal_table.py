"""Print the learning signal of groups: a table of the reward functions, correlations, and examples."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from covey.display import echo, make_console
from covey.monitor.formats import excerpt, sparkline
from covey_report.signal import EMPTY, LENGTH, TOTAL, FunctionSignal, Signal

CORRELATION = "correlation with"
"""Heading of the table of correlations."""
WIDTH = 100
"""Largest number of characters of a prompt or completion that are shown."""
NOT_INCLUDED = "not included: {}; a run adds to the reward what they give"
"""Line about the parts of a run's reward that this command leaves out."""


def print_signal(signal: Signal, examples: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> None:
    """Print the table of functions, their correlations, the extremes, and the verdict."""
    shares = f"{signal.truncated:.0%} cut at the limit, {signal.empty:.0%} empty"
    echo(f"{signal.completions} completions of {signal.groups} prompts, {shares}\n", keep="\n")
    width = max(len(function.name) for function in signal.functions)
    echo(f"{'function':<{width}}  {'mean':>8}  {'spread':>8}  {'differ':>6}  {'scored':>6}  {'failed':>6}  scores")
    for function in signal.functions:
        echo(f"{function.name:<{width}}  {_row(function)}")
    if missing:
        echo(NOT_INCLUDED.format(", ".join(missing)))
    echo("\nspread: mean standard deviation within a group; differ: share of groups with different scores;", keep="\n")
    echo("scores: each score, or the beginning of a range, with the number of completions")
    _print_correlations(signal, width)
    _print_extremes(examples)
    echo(f"\n{signal.sentence}.", keep="\n")
    for warning in signal.warnings:
        echo(f"But {warning}.")
    if signal.setting:
        echo(f"try: {signal.setting}: {signal.advice}")


def _row(function: FunctionSignal) -> str:
    mean, spread = ("none" if value is None else f"{value:.3f}" for value in (function.mean, function.within_std))
    differ = f"{'none':>6}" if function.informative is None else f"{function.informative:>6.0%}"
    bars = sparkline([*function.histogram.values()]) if len(function.histogram) > 1 else ""
    scores = ", ".join(f"{score:.3g} × {count}" for score, count in function.histogram.items())
    return f"{mean:>8}  {spread:>8}  {differ}  {function.scored:>6}  {function.failed:>6}  {bars} {scores}".rstrip()


def _print_correlations(signal: Signal, width: int) -> None:
    """Print the correlations of the functions with each other, the length and the emptiness of a completion."""
    rows = signal.functions[: 1 if len(signal.functions) == 2 else None]  # the total of one function is its score
    used = {name for row in rows for name in row.correlations}
    names = [name for name in (*(row.name for row in signal.functions[:-1]), LENGTH, EMPTY) if name in used]
    if not names:
        return
    width = max(width, len(CORRELATION))
    echo(f"\n{CORRELATION:<{width}}  " + "  ".join(f"{name:>8}" for name in names), keep="\n")
    for function in rows:
        values = (function.correlations.get(name) for name in names)
        cells = ("-" if value is None else f"{value:+.2f}" for value in values)
        echo(
            f"{function.name:<{width}}  "
            + "  ".join(f"{c:>{max(8, len(n))}}" for c, n in zip(cells, names, strict=True))
        )


def _print_extremes(examples: Sequence[Mapping[str, Any]]) -> None:
    """Print the best and the worst completions side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("by", "prompt", "best", "worst"):
        table.add_column(heading, overflow="fold", ratio=None if heading == "by" else 1)
    for example in examples:
        by, ends = example["by"], (example["best"], example["worst"])
        shown = [f"{_score_of(end, by)}  {shown_text(end['text'])}" for end in ends]
        table.add_row(*map(Text, (by, excerpt(example["best"]["prompt"], WIDTH), *shown)))
    echo("")
    make_console(highlight=False).print(table)


def _score_of(example: Mapping[str, Any], by: str) -> str:
    score = example["rewards"].get(by, example["reward"])
    return "none" if score is None else f"{score:+.3g}"


def shown_text(text: str) -> str:
    """Return a completion in one line, with a mark where there is none."""
    return excerpt(text, WIDTH) or ("(white space)" if text else "(empty)")


def print_scores(example: Mapping[str, Any], failed: Mapping[str, int], missing: Sequence[str]) -> None:
    """Print the scores of one completion that was written by hand."""
    completion = example["best"]
    echo(f"prompt      {excerpt(completion['prompt'])}")
    echo(f"completion  {shown_text(completion['text'])}")
    for name, score in {**completion["rewards"], TOTAL: completion["reward"]}.items():
        echo(f"{name:<24} {'failed' if failed.get(name) else 'none' if score is None else f'{score:+.4g}'}")
    if missing:
        echo(NOT_INCLUDED.format(", ".join(missing)))
