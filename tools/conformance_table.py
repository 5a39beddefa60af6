"""Write the table of benchmarks/CONFORMANCE.md from docs/conformance.json, what `covey conformance --json` has printed.

covey conformance --against trl,tunix,examples/conformance/plain_loop.py --json > docs/conformance.json
python -m tools.conformance_table           # write it
python -m tools.conformance_table --print   # print it
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey_conformance.results import PASS, Cell, expectation, heading
from covey_formats.markdown import escape_markdown
from tools.written_part import with_part, write

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "benchmarks" / "CONFORMANCE.md", ROOT / "docs" / "conformance.json"
MANY = 8
"""Largest number of checks that a remark names."""
BY = "tools/conformance_table.py"


def table(data: Mapping[str, Any]) -> str:
    """Return the table, and below it a line for each cell that is no pass and each setting."""
    names = [trainer["name"] for trainer in data["trainers"]]
    titles = ["check", "expected", *(escape_markdown(heading(trainer)) for trainer in data["trainers"])]
    lines = [
        f"Covey {data['covey']}, {data['date']}; {data['seconds']:.0f} s on 2 cores, shared with others.",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for check in data["checks"]:
        first = f"`{check['name']}`: {escape_markdown(check['equation'])}"
        cells = [escape_markdown(Cell(**check["results"][name]).text) for name in names]
        lines.append(f"| {' | '.join([first, expectation(check), *cells])} |")
    return "\n".join([*lines, "", *remarks(data)])


def remarks(data: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason, with the checks that it belongs to, and for each trainer's settings."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for check in data["checks"]:
        for name, cell in check["results"].items():
            if cell["verdict"] != PASS:
                reasons.setdefault((name, cell["verdict"], cell["reason"]), []).append(f"`{check['name']}`")
            if cell["settings"]:
                reasons.setdefault((name, "settings", cell["settings"]), []).append(f"`{check['name']}`")
    return [
        f"- {escape_markdown(name)}, {kind}: {escape_markdown(reason)} "
        f"({', '.join(checks) if len(checks) <= MANY else f'{len(checks)} checks'})"
        for (name, kind, reason), checks in sorted(reasons.items(), key=lambda entry: entry[0][:2])
    ]


def measured() -> str:
    """Return the table of the results in docs."""
    return table(json.loads(RESULTS.read_text(encoding="utf-8")))


def text() -> str:
    """Return the content of the page with that table."""
    return with_part(PAGE, measured(), BY)


if __name__ == "__main__":
    write(PAGE, measured(), BY)
