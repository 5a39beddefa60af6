"""Execute `covey compare` and `covey report`: results of runs and their differences, in the terminal and as a page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from covey.cli.parse import Line
from covey.display import echo, make_console, printable
from covey_report.run_files import REPORT

if TYPE_CHECKING:
    from rich.table import Table  # late in what follows: mistakes are answered without it

    from covey_report.results import Figure
    from covey_report.run_data import RunData


def compare(line: Line) -> None:
    """Execute `covey compare RUN RUN [RUN ...] [--json]`: print the differences and the results of the runs.

    Raises:
        CoveyError: one of them is no run folder.
    """
    from covey_report.results import results_table, settings_table  # late, here and below: they need NumPy
    from covey_report.run_data import read_run

    runs = [read_run(Path(folder)) for folder in line.arguments]
    settings = {row["name"]: row["values"] for row in settings_table(runs) if row["differs"]}
    results = results_table(runs)
    if "--json" in line.options:
        figures = {name: [figure and figure._asdict() for figure in row] for name, row in results.items()}
        states = [run.state for run in runs]
        result = {"runs": line.arguments, "states": states, "settings": settings, "results": figures}
        print(json.dumps(result))
        return
    _print(runs, settings, results)


def report(line: Line) -> None:
    """Execute `covey report RUN [RUN ...] [--out FILE] [--public]`."""
    runs, out, public = [Path(run) for run in line.arguments], line.options.get("--out"), "--public" in line.options
    from covey_report.page import write_report

    file = Path(PUBLIC) if public else runs[0] / REPORT if len(runs) == 1 else Path(REPORT)
    file = Path(out).expanduser() if out else file
    size = write_report(file, runs, public=public)
    echo(f"{file} ({size / 1e6:.1f} MB): open it in a browser; it needs no network")
    if public:
        echo("it holds no prompts, completions, paths and names but those of reward functions and metrics")
    else:
        echo("it holds prompts and completions of the run: to publish it is to publish them")


def _print(
    runs: "Sequence[RunData]", settings: dict[str, list[str | None]], results: "dict[str, list[Figure | None]]"
) -> None:
    table = _table("result", [f"{run.path.name} ({run.state})" for run in runs])
    for name, figures in results.items():
        table.add_row(name, *(_format_figure(figure) for figure in figures))
    console = make_console(highlight=False, markup=False)
    console.print(table)
    console.print(NOTE, soft_wrap=True)
    table = _table("setting that differs", [str(run.path) for run in runs])
    for name, values in settings.items():
        table.add_row(printable(name), *("not set" if value is None else printable(value) for value in values))
    console.print(table if settings else "The settings are the same.")


def _table(first: str, runs: Sequence[str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for run in runs:
        table.add_column(Text(printable(run)), justify="right", overflow="fold")
    return table


def _format_figure(figure: "Figure | None") -> str:
    if figure is None:
        return "-"
    text = f"{figure.value:,}" if isinstance(figure.value, int) else f"{figure.value:.4g}"
    text += "" if figure.error is None else f" ± {figure.error:.2g}"
    return text if figure.step is None else f"{text} at {figure.step}"


PUBLIC = "report-public.html"
"""Name of a public report, in the current folder: a run folder has the whole one."""
NOTE = """
before, after: held-out prompts. final: mean over the last tenth of the steps. best: best step, biased upward by noise.
± is one standard error. covey report RUN RUN shows the curves.
"""
