"""Write runs as one HTML page that needs no other file and no network.

In: run folders. Out: a page with its style, scripts and data inside. Its Content-Security-Policy allows these alone,
by their SHA-256, and no request. The data are JSON in a script element that the browser does not execute; the scripts
show every text as text. All of the content of run folders is untrusted.
"""

import base64
import hashlib
import html
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.resources import files
from itertools import accumulate, count
from pathlib import Path, PurePath
from typing import Any

from covey import __version__
from covey.config.schema.data import FROM_PYTHON
from covey.display import mask_secrets, printable, secret_mask
from covey.errors import CoveyError
from covey.files import is_count, number, open_below, replace_file
from covey_report import completions, evaluation, marks
from covey_report.charts import charts_for
from covey_report.diagnosis import Finding, RunHistory, diagnose
from covey_report.public import public_runs
from covey_report.results import as_text, settings_table
from covey_report.run_data import RunData, Series, points_per_series, read_run, reduce_series
from covey_report.texts import script_json, size_of
from covey_status.watched_run import FINISHED, RUNNING

GENERATOR = '<meta name="generator" content="Covey'
"""Text in the head of every report, by which one is recognised."""
MAX_DIGITS = 10
"""Maximum number of significant digits of a value of a curve."""
UPLOT = "uPlot-1.6.32"
NO_TEXTS = (
    '{"completions":{"prompts":[],"rewards":[],"steps":[],"total":{"steps":0,"groups":0},"kept":{"steps":0,"groups":0}},'
    '"tokens":{"groups":{},"total":0},"questions":{"prompts":[],"rows":[],"judged":true,"changes":[],"total":0}}'
)
"""Texts of a run on a public page."""
FACTS = {
    "model": "model",
    "data": "data",
    "data_digest": "data digest",
    "environment": "environment",
    "programs": "programs compiled",
    "best": "best checkpoint",
}
"""Entries of the summary that the page shows, with their labels."""
SECTIONS = {
    "overview": "Overview",
    "curves": "Curves",
    "diagnosis": "Diagnosis",
    "evaluation": "Before and after",
    "completions": "Completions",
    "recipe": "Recipe",
    "commands": "Commands",
    "record": "Record",
}
"""Sections of a report: heading by id."""
COMMON = ("elements", "formats", "page", "findings")
"""Names of the scripts that every page has, in the order in which they are joined."""
SCRIPTS = ("charts", "overview", "evaluation", "tokens", "completions", "recipe", "main")
"""Names of the further scripts of a report."""


def write_report(
    out: Path,
    folders: Sequence[Path],
    findings: Sequence[Sequence[Finding]] | None = None,
    status: str = "",
    public: bool = False,
) -> int:
    """Write the report of the runs in `folders` to the file `out`, atomically; return its size in bytes.

    Args:
        findings: findings on each run; those of its diagnosis when not given.
        status: state of the runs; as their folders tell it when not given.
        public: whether prompts, completions, paths and names are left out.

    Raises:
        CoveyError: one of `folders` is no run folder; or something else than a report is at `out`.
    """
    runs = [read_run(folder) for folder in folders]
    runs = [replace(run, status=status or run.status) for run in runs]
    runs = public_runs(runs) if public else runs
    page = build_page(runs, [diagnose(RunHistory.of(run)) for run in runs] if findings is None else findings)
    check_replaceable(out)
    replace_file(out, page)
    return len(page)


def check_replaceable(out: Path) -> None:
    """Check that nothing but a report is at `out`.

    Raises:
        CoveyError: it has no folder, or something else is there.
    """
    if not out.parent.is_dir():
        raise CoveyError("there is no such folder", fix="make it first, or name another file", where=str(out.parent))
    if out.is_dir():
        raise CoveyError("this is a folder", want="the name of a file", where=str(out))
    if out.exists():
        with open_below(out.parent, out.name) as file:
            if GENERATOR.encode() not in file.read(4096):
                raise CoveyError("this file is no report of Covey", fix="--out ANOTHER, or move it", where=str(out))


def build_page(runs: Sequence[RunData], findings: Sequence[Sequence[Finding]] = ()) -> bytes:
    """Return the page of `runs` in UTF-8, with the findings on each."""
    unreadable = [dict(run.unreadable) for run in runs]
    findings = findings or [()] * len(runs)
    texts = [
        _texts(run, len(runs), counts, marks.groups(some))
        for run, counts, some in zip(runs, unreadable, findings, strict=True)
    ]
    title = " and ".join(run.name for run in runs[:3]) + (" and others" if len(runs) > 3 else "")
    library, style = asset(f"{UPLOT}.min.js"), asset(f"{UPLOT}.min.css")
    return fill_page(title, SECTIONS, page_data(runs, findings, unreadable), SCRIPTS, texts, library, style)


def fill_page(
    title: str,
    sections: Mapping[str, str],
    data: Mapping[str, Any],
    scripts: Sequence[str],
    texts: Sequence[str] = (),
    library: str = "",
    style: str = "",
) -> bytes:
    """Return a page in UTF-8.

    Args:
        title: title of the page.
        sections: heading by id of the sections, which the scripts fill.
        data: data of the page, JSON-serialisable.
        scripts: names of the page's scripts beside those of `COMMON`.
        texts: further data as JSON, in elements of their own.
        library, style: script and style of a library.
    """
    own = "".join(asset(f"{name}.js") for name in (*COMMON, *scripts))
    code = [script for script in (library, f"(() => {{\n'use strict';\n{own}}})();\n") if script]
    style += asset("page.css")
    elements = [f'<script type="application/json" id="texts-{i}">{json}</script>' for i, json in enumerate(texts)]
    content = {
        "POLICY": content_security_policy(code, (style,)),
        "VERSION": __version__,
        "TITLE": html.escape(printable(title)),
        "STYLE": style,
        "SECTIONS": "\n".join(
            f'  <section id="{name}" hidden><h2>{heading}</h2><div class="body"></div></section>'
            for name, heading in sections.items()
        ),
        "DATA": script_json(data),
        "TEXTS": "\n".join(elements),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in code),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: content[match[1]], asset("page.html")).encode("utf-8")


def content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a policy that allows these inline scripts and styles, and nothing else but an empty icon. It also turns off
    the functions that parse text as markup.

    >>> content_security_policy(("1",), ())
    "default-src 'none'; script-src 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='; style-src ; img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    """  # noqa: E501
    allowed = {
        "script-src": " ".join(map(_digest, scripts)),
        "style-src": " ".join(map(_digest, styles)),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(["default-src 'none'", *(f"{name} {sources}" for name, sources in allowed.items())])


def _texts(run: RunData, runs: int, unreadable: dict[str, int], groups: Collection[tuple[int, int]]) -> str:
    """Return the completions, token values and held-out questions of one of `runs` runs as JSON, with these groups."""
    if run.is_public:
        return NO_TEXTS
    mask = secret_mask()
    values, total = completions.keep_token_values(run.tokens, completions.MAX_TOKEN_BYTES // runs, unreadable, mask)
    room = completions.MAX_BYTES // runs - sum(map(size_of, values.values()))
    samples = completions.collect(run.samples, room, unreadable, mask, first={**dict.fromkeys(groups), **values})
    questions = evaluation.questions(run, evaluation.MAX_BYTES // runs, mask)
    tokens = completions.token_values_json(values, total)
    return f'{{"completions":{samples},"tokens":{tokens},"questions":{questions}}}'


def page_data(
    runs: Sequence[RunData],
    findings: Sequence[Sequence[Finding]] = (),
    unreadable: Sequence[Mapping[str, int]] = (),
) -> dict[str, Any]:
    """Return the data of the page of `runs` without the texts; `findings` has those on each run, and `unreadable` the
    lines left out of it by file name.
    """
    longest = max((len(run.steps) for run in runs), default=0)
    limit = points_per_series(sum(len(run.series) for run in runs), longest)
    names = dict.fromkeys(name for run in runs for name in _series_of(run))
    shown, marked = findings_data(runs, findings or [()] * len(runs))
    data = {
        "covey": __version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "public": any(run.is_public for run in runs),
        "findings": shown,
        "charts": charts_for(names, {run.method for run in runs}),
        "settings": settings_table(runs),
        "runs": [
            _run_data(run, limit, None if run is runs[0] else runs[0])
            | {"name": name, "marks": some, "unreadable": left_out}
            for run, some, name, left_out in zip(
                runs, marked, _names(runs), unreadable or [{}] * len(runs), strict=True
            )
        ],
    }
    return dict(mask_secrets(data))


def findings_data(
    runs: Sequence[RunData], findings: Sequence[Sequence[Finding]]
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Return the findings on all runs, each with the index of its run, and the marks of each run."""
    numbers = count(1)
    numbered = [{next(numbers): finding for finding in some} for some in findings]
    shown = [
        {**asdict(finding), "samples": () if runs[i].is_public else finding.samples, "run": i}
        for i, some in enumerate(numbered)
        for finding in some.values()
    ]
    return shown, [marks.marks(_series_of(run), some) for run, some in zip(runs, numbered, strict=True)]


def _names(runs: Sequence[RunData]) -> list[str]:
    """Return the names of the folders, each with its parent's where two are equal."""
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else f"{run.path.resolve().parent.name}/{run.name}" for run in runs]


def _run_data(run: RunData, limit: int, first: RunData | None) -> dict[str, Any]:
    total, measured = run.settings.get("training.max_steps"), _series_of(run)
    return {
        "recipe": str(run.settings.get("name", "")),
        "method": run.method,
        "algorithm": str(run.settings.get("grpo.algorithm", "")) if run.method == "rl" else "supervised",
        "status": run.status,
        "steps": [len(run.steps), run.steps[-1] if run.steps else 0, total if is_count(total) else None],
        "seconds": number(run.summary.get("seconds")) or (run.seconds[-1] if run.seconds else 0.0),
        "clocks": {name: _points(clock, limit) for name, clock in clocks_of(run).items()},
        "points": limit,
        "series": {name: _points(series, limit) for name, series in measured.items()},
        "figures": evaluation.figures(run, first),
        "trends": evaluation.trends(run),
        "counts": evaluation.counts(run),
        "facts": facts(run),
        "commands": [] if run.is_public else commands(run),
    }


def clocks_of(run: RunData) -> Mapping[str, Series]:
    """Return the seconds of training and, where they were counted, the tokens up to each step, by name of the axis."""
    counted = run.series.get("num_tokens")
    tokens = {"tokens": Series(counted.steps, list(accumulate(counted.values)))} if counted else {}
    return {"time": Series(run.steps, run.seconds), **tokens}


def _points(series: Series, limit: int) -> list[list[Any]]:
    """Return at most about `limit` points of a series as the page has them: steps and values."""
    reduced = reduce_series(series, limit)
    return [list(reduced.steps), _rounded(reduced.values)]


def commands(run: RunData) -> list[list[str]]:
    """Return the commands that go on from `run`, each with its purpose. Only the script of a run that a script made
    can load its model and data.
    """
    folder, verb = shlex.quote(str(run.path)), "sft" if run.method == "sft" else "train"
    longer = f" --max-steps {2 * run.steps[-1]}" if run.status == FINISHED and run.steps else ""
    resume = ["Train it longer" if longer else "Resume it", f"covey {verb} --resume {folder}{longer}"]
    loads = run.settings.get("data.task") != FROM_PYTHON
    rows = [
        (run.status == RUNNING, ["Watch it", f"covey watch {folder}"]),
        (run.status != RUNNING and loads, resume),
        (True, ["Compare it with another run", f"covey compare {folder} OTHER"]),
        (True, ["Compare their curves", f"covey report {folder} OTHER --out comparison.html"]),
        (loads, ["Export its model", f"covey export {folder} --out exported"]),
        (True, ["Show it without prompts, completions and paths", f"covey report {folder} --public"]),
    ]
    return [row for is_possible, row in rows if is_possible]


def facts(run: RunData) -> list[list[str]]:
    """Return the recorded facts about model, data, machine and programs, as names and texts."""
    rows: list[list[str]] = []
    for name, label in FACTS.items():
        if isinstance(value := run.summary.get(name), Mapping):
            rows += [[f"{label}: {key}", as_text(entry)] for key, entry in value.items()]
        elif name in run.summary:
            source = "a run" if run.is_public else PurePath(str(run.settings.get("model.source"))).name
            rows.append([label, as_text(value).replace(" of a run,", f" of {source},", name == "model")])
    return rows


def _series_of(run: RunData) -> Mapping[str, Series]:
    """Return the metrics of `run`, with the evaluations before and after training as the first and the last point."""
    series = dict(run.series)
    before, after = run.evaluation("before"), run.evaluation("after")
    for name in [*(row["name"] for row in evaluation.figures(run)), "error"]:
        measured = run.series.get(f"eval/{name}", Series((), ()))
        if "/" in name or (not measured.steps and run.summary.get("after") is None):
            continue
        points = dict(zip(measured.steps, measured.values, strict=True))
        points |= {0: before[name]} if name in before else {}
        points |= {run.steps[-1]: after[name]} if name in after and run.steps else {}
        if points:
            series[f"eval/{name}"] = Series(sorted(points), [points[step] for step in sorted(points)])
    return series


def _rounded(values: Sequence[float]) -> list[float]:
    """Return `values` with so many digits that a chart does not show the rounding: five, and more where they differ
    little.

    >>> _rounded([1.0, 2 / 3]), _rounded([1.0, 0.99998765])
    ([1.0, 0.66667], [1.0, 0.9999877])
    """
    largest, spread = max(map(abs, values), default=0.0), max(values, default=0.0) - min(values, default=0.0)
    digits = 3 + (math.floor(math.log10(largest / spread)) if 0 < spread < largest else 0)
    return [float(f"{value:.{min(max(digits, 5), MAX_DIGITS)}g}") for value in values]


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def asset(name: str) -> str:
    """Return the text of a file of the page: a script, a style or the page without its content."""
    return (files("covey_report") / "assets" / name).read_text(encoding="utf-8")
