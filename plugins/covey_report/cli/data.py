"""Execute `covey data`: look at the data of a recipe before a run."""

import json
import sys
from pathlib import Path

from covey.cli.checks import check_source
from covey.cli.parse import Line
from covey.config import recipe
from covey.display import echo, make_console


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
    from covey_report import data_lines, data_summary  # late: they need JAX

    summary = data_summary.summarize(loaded, rows or data_summary.SHOWN)
    if page is not None:
        from covey_report.data_page import write_data_page

        size = write_data_page(page, summary.to_json())
        echo(f"{page}: {size:,} bytes; it holds {len(summary.shown)} rows of the data", file=sys.stderr)
    if "--json" in line.options:
        echo(json.dumps(summary.to_json()))
    elif page is None:
        console = make_console(highlight=False)
        for text in data_lines.lines_of(summary):
            console.print(text)
    return 2 if summary.refused else 0
