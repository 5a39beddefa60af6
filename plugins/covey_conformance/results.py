"""The table: runs checks on trainers, and writes what came out for the terminal, as JSON, and as one page."""

import html
import math
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from covey import __version__
from covey.display import printable
from covey.errors import CoveyError, nearest
from covey.files import replace_file
from covey_conformance.bench import Bench
from covey_conformance.checks import CHECKS, Check
from covey_conformance.trainers import KNOWN, FailedError, NotApplicableError, Trainer, make_trainer
from covey_report.page import GENERATOR, content_security_policy

if TYPE_CHECKING:
    from rich.table import Table

PASS, DIFFERS, NOT_APPLICABLE, FAILED = "pass", "differs", "not applicable", "failed"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
:root { color-scheme: light dark; }
table { border-collapse: collapse; width: 100%; } th, td { border-bottom: 1px solid #8888; padding: .4rem .6rem; }
th, td { text-align: left; vertical-align: top; overflow-wrap: anywhere; } code, small { font-size: .85em; }
.pass { color: #14804a; } .differs, .failed { color: #c0392b; } .not { opacity: .7; }
th { position: sticky; top: 0; background: Canvas; }
"""


class Cell(NamedTuple):
    """The result of one check on one trainer.

    Attributes:
        verdict: pass, differs, not applicable, or failed.
        number: what the check measured; None without a finite number.
        reason: why it differs, does not apply or failed.
        settings: the trainer's settings for the check, as its adapter states them.
        seconds: duration.
        command: command that repeats it.
    """

    verdict: str
    number: float | None
    reason: str
    settings: str
    seconds: float
    command: str

    @property
    def text(self) -> str:
        """Verdict and number."""
        return self.verdict if self.number is None else f"{self.verdict} {self.number:.2g}"


def judge(check: Check, bench: Bench, trainer: Trainer) -> Cell:
    """Make one check on one trainer."""
    start, number, reason, verdict = time.monotonic(), None, "", FAILED
    try:
        number = check.measure(bench, trainer)
        verdict = PASS if abs(number - check.expected) <= check.tolerance[0] else DIFFERS
        if not math.isfinite(number):
            number, reason = None, "other tokens, or tokens that should not be drawn"
    except NotApplicableError as error:
        verdict, reason = NOT_APPLICABLE, str(error)
    except FailedError as error:
        reason = str(error)
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:  # of a reply in another form
        reason = f"the adapter returned something else than the check needs: {type(error).__name__}: {error}"
    if verdict != PASS:
        reason = "; ".join(filter(None, (reason, trainer.note("REASONS", check.name))))
    target = "" if trainer.name == "covey" else f" --against {shlex.quote(trainer.target)}"
    command = f"covey conformance{target} --only {check.name}"
    return Cell(verdict, number, reason, trainer.note("SETTINGS", check.name), time.monotonic() - start, command)


def run(
    names: Sequence[str],
    only: str = "",
    python: str = "",
    show: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Make the checks on each trainer, and return the table for JSON.

    Args:
        names: trainers, as for `make_trainer`.
        only: name or group of the checks to make; all when empty.
        python: interpreter of adapters that are files.
        show: called with a line for each cell.

    Raises:
        CoveyError: there is no such trainer or check, or a trainer is not installed.
    """
    checks = [check for name, check in CHECKS.items() if only in ("", name, name.partition("/")[0])]
    if not checks:
        groups = {name.partition("/")[0] for name in CHECKS}
        raise CoveyError(f"there is no check {only!r}", fix=nearest(only, [*CHECKS, *groups]))
    scratch = Path(tempfile.mkdtemp(prefix="covey-conformance-"))
    trainers = [make_trainer(name, scratch, python) for name in names]
    bench, cells = Bench(scratch), dict[str, dict[str, Cell]]()
    for trainer in trainers:
        for check in checks:
            cell = cells.setdefault(check.name, {})[trainer.name] = judge(check, bench, trainer)
            show(f"{trainer.name} {check.name}: {cell.text} ({cell.seconds:.1f} s)")
        trainer.close()
    if not any(cell.verdict == FAILED for row in cells.values() for cell in row.values()):
        shutil.rmtree(scratch)
    return table_data(checks, trainers, cells)


def table_data(
    checks: Sequence[Check], trainers: Sequence[Trainer], cells: Mapping[str, Mapping[str, Cell]]
) -> dict[str, Any]:
    """Return the table for JSON."""
    return {
        "covey": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(sum(cell.seconds for row in cells.values() for cell in row.values()), 1),
        "trainers": [
            {"name": t.name, "version": t.version, "written_for": KNOWN[t.name].version if t.name in KNOWN else ""}
            for t in trainers
        ],
        "checks": [
            {
                "name": check.name, "equation": check.equation, "source": check.source, "expected": check.expected,
                "tolerance": check.tolerance[0], "arithmetic": check.tolerance[1],
                "results": {name: cell._asdict() for name, cell in cells[check.name].items()},
            }
            for check in checks
        ],
    }  # fmt: skip


def heading(trainer: Mapping[str, str]) -> str:
    """Return the name and version of a trainer, and the version that its adapter was written for if it is another."""
    other = trainer["written_for"] not in ("", trainer["version"])
    return f"{trainer['name']} {trainer['version']}".strip() + (
        f" (adapter: {trainer['written_for']})" if other else ""
    )


def expectation(check: Mapping[str, Any]) -> str:
    """Return the number that should come out, with its tolerance."""
    return f"{check['expected']:g}" + (f" ± {check['tolerance']:.2g}" if check["tolerance"] else " exactly")


def remarks(data: Mapping[str, Any]) -> list[str]:
    """Return a line for each cell that is no pass: why, and how to repeat it."""
    return [
        f"{name} {check['name']}: {cell['reason'] or cell['verdict']} [{cell['command']}]"
        for check in data["checks"]
        for name, cell in check["results"].items()
        if cell["verdict"] != PASS
    ]


def make_table(data: Mapping[str, Any]) -> "Table":
    """Return the table for the terminal."""
    from rich.table import Table  # late: mistakes are answered without it
    from rich.text import Text

    colours = {PASS: "green", DIFFERS: "red", FAILED: "red", NOT_APPLICABLE: "dim"}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("check", "expected", *map(heading, data["trainers"])):
        table.add_column(Text(printable(title)), overflow="fold")
    for check in data["checks"]:
        cells = (check["results"][trainer["name"]] for trainer in data["trainers"])
        texts = [Text(Cell(**cell).text, style=colours[cell["verdict"]]) for cell in cells]
        table.add_row(check["name"], expectation(check), *texts)
    return table


def write_page(file: Path, data: Mapping[str, Any]) -> int:
    """Write the table as one HTML page that needs no network and has no script; return its size in bytes."""
    titles = ["check", "expected", *map(heading, data["trainers"])]
    head = "".join(f"<th>{_escape(title)}</th>" for title in titles)
    rows = "\n".join(_row(check, data["trainers"]) for check in data["checks"])
    title = f"Conformance of {', '.join(trainer['name'] for trainer in data['trainers'])}"
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{content_security_policy((), (STYLE,))}">
{GENERATOR} {__version__}"><title>{_escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{_escape(title)}</h1>
<p>Covey {__version__}, {data["date"]}, {data["seconds"]:g} s. A number is what the check measured.
“differs” says that it is not the expected one; where that is a choice of design the reason says so.</p>
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""
    replace_file(file, page.encode())
    return len(page.encode())


def _row(check: Mapping[str, Any], trainers: Sequence[Mapping[str, str]]) -> str:
    notes = f"{_escape(check['equation'])}<br><small>{_escape(check['source'])}</small>"
    first = f"<td><code>{_escape(check['name'])}</code><br>{notes}</td>"
    expected = f"<td>{_escape(expectation(check))}<br><small>{_escape(check['arithmetic'])}</small></td>"
    return f"<tr>{first}{expected}{''.join(_cell(check['results'][trainer['name']]) for trainer in trainers)}</tr>"


def _cell(cell: Mapping[str, Any]) -> str:
    lines = [cell["reason"], cell["settings"], cell["command"]]
    notes = "".join(f"<br><small>{_escape(line)}</small>" for line in lines if line)
    return f'<td><span class="{cell["verdict"].split()[0]}">{_escape(Cell(**cell).text)}</span>{notes}</td>'


def _escape(text: str) -> str:
    return html.escape(printable(text))
