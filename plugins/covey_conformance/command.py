"""Execute `covey conformance`: does a trainer compute the equations that it claims?"""

import json
import sys
from functools import partial
from pathlib import Path

from covey.cli.commands import JSON, Command, Option
from covey.cli.parse import Line
from covey.display import echo, make_console

COMMAND = Command(
    "conformance",
    "covey_conformance.command:conformance",
    "",
    "does a trainer compute its equations?",
    """\
Puts one tiny model and the same rows to Covey and to other trainers, and compares the gradients with a float64 oracle;
and checks invariances, masks, sampler, advantages, turns, optimizer and files. Others are trl and tunix ('make
conformance' installs them), or your own adapter, one Python file, which is executed (docs/conformance-adapter.md).""",
    "examples\n  covey conformance --against trl,tunix --html page.html\n  covey conformance --only gradient",
    least=0,
    most=0,
    options=(
        Option("--against", "TRAINER", "trl, tunix or an adapter's path; several with commas between them"),
        Option("--only", "CHECK", "one check, or the checks of one group, such as gradient"),
        Option("--python", "PYTHON", "Python that executes adapters that are files; Covey's when not given"),
        Option("--html", "FILE", "write one HTML page that needs no network, with equations and sources"),
        JSON,
    ),
)


def conformance(line: Line) -> None:
    """Execute `covey conformance [--against TRAINER,...] [--only CHECK] [--python PYTHON] [--json] [--html FILE]`.

    Raises:
        CoveyError: there is no such trainer or check, a trainer is not installed, or the page cannot be written.
    """
    from covey_conformance import results  # late, here and below: it needs NumPy
    from covey_report.page import check_replaceable

    page = Path(line.options["--html"]).expanduser() if "--html" in line.options else None
    if page is not None:
        check_replaceable(page)
    names = [name for name in line.options.get("--against", "").split(",") if name]
    show = partial(echo, file=sys.stderr)
    data = results.run(["covey", *names], line.options.get("--only", ""), line.options.get("--python", ""), show)
    if page is not None:
        show(f"{page}: {results.write_page(page, data):,} bytes; open it in a browser, it needs no network")
    if "--json" in line.options:
        echo(json.dumps(data))
        return
    console = make_console(highlight=False, markup=False)
    console.print(results.make_table(data))
    for remark in results.remarks(data):
        echo(remark)
    echo(f"{data['date']}, {data['seconds']:g} s; with --html FILE also equations, sources and settings")
