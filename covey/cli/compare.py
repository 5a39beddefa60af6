"""Implement `covey compare`: what differs between runs, and their results with standard errors, in the terminal."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.words import take_switches
from covey.config.overrides import split
from covey.display import make_console, printable
from covey.errors import CoveyError

if TYPE_CHECKING:
    from rich.table import Table  # late in what follows: mistakes are answered without it

    from covey.report.comparison import Figure
    from covey.report.run_data import RunData

USAGE = "covey compare RUN RUN [RUN ...] [--json]"


def parse(words: Sequence[str]) -> Callable[[], None]:
    """Parse `covey compare RUN RUN [RUN ...] [--json]`."""
    switches, words = take_switches(words, ("--json",))
    runs, pairs = split(words, len(words))
    if pairs:
        raise CoveyError(f"compare has no setting {pairs[0][0]}", want=USAGE)
    if len(runs) < 2:
        raise CoveyError("there are not two runs to compare", want=USAGE)
    return partial(compare, [Path(run) for run in runs], bool(switches))


def compare(folders: Sequence[Path], as_json: bool = False) -> None:
    """Print the differences and the results of the runs in `folders`.

    Raises:
        CoveyError: one of them is no run folder.
    """
    from covey.report.comparison import results_table, settings_table  # late, here and below: they need NumPy
    from covey.report.run_data import read_run

    runs = [read_run(folder) for folder in folders]
    settings = {row["name"]: row["values"] for row in settings_table(runs) if row["differs"]}
    results = results_table(runs)
    if as_json:
        figures = {name: [one and one._asdict() for one in row] for name, row in results.items()}
        states = [run.state for run in runs]
        found: dict[str, Any] = {"runs": [str(folder) for folder in folders], "states": states}
        print(json.dumps(found | {"settings": settings, "results": figures}))
        return
    _print(runs, settings, results)


def _print(
    runs: "Sequence[RunData]", settings: dict[str, list[str | None]], results: "dict[str, list[Figure | None]]"
) -> None:
    table = _table("setting that differs", [str(run.path) for run in runs])
    for name, values in settings.items():
        table.add_row(printable(name), *("not set" if value is None else printable(value) for value in values))
    console = make_console(highlight=False, markup=False)
    if settings:
        console.print(table)
    else:
        console.print("The settings are the same.\n")
    table = _table("result", [f"{run.path.name} ({run.state})" for run in runs])
    for name, figures in results.items():
        table.add_row(name, *(_shown(figure) for figure in figures))
    console.print(table)
    console.print(NOTE, soft_wrap=True)


def _table(first: str, runs: Sequence[str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for run in runs:
        table.add_column(Text(printable(run)), justify="right", overflow="fold")
    return table


def _shown(figure: "Figure | None") -> str:
    if figure is None:
        return "-"
    text = f"{figure.value:,}" if isinstance(figure.value, int) else f"{figure.value:.4g}"
    text += "" if figure.error is None else f" ± {figure.error:.2g}"
    return text if figure.step is None else f"{text} at {figure.step}"


NOTE = """
before, after: held-out prompts. final: mean over the last tenth of the steps. best: best step, biased upward by noise.
± is one standard error. covey report RUN RUN shows the curves."""
