"""Sections of the pages, a row each: heading, script, data of a run, and the pages on which it stands.

A new section is a row here and a function in a file of `assets/`, which fills the section from the data of the page.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple

from covey.config.schema.data import FROM_PYTHON
from covey_report import evaluation
from covey_report.results import as_text
from covey_report.run_data import RunData
from covey_status.watched_run import FINISHED, RUNNING

COMMON = ("elements", "formats", "page", "findings")
"""Names of the scripts that every page has, in the order in which they are joined."""
FACTS = {
    "model": "model",
    "data": "data",
    "data_digest": "data digest",
    "environment": "environment",
    "programs": "programs compiled",
    "best": "best checkpoint",
}
"""Entries of the summary that a report shows, with their labels."""


class Section(NamedTuple):
    """A section of a page.

    Attributes:
        id: anchor in the page.
        title: heading.
        scripts: names of the files in `assets/` that it needs; the last one has its function.
        show: JavaScript function that fills it: it gets the element, and returns whether there is something to show.
        data: function of a run and the first run of the page (None for the first one itself) that returns the entries
            of `DATA.runs[i]` that the section reads, by name; the curves, charts, findings and settings are there.
        in_public: whether a public page has it, and its data.
        on_board: JavaScript function that fills it on the board; empty if it is not there.
    """

    id: str
    title: str
    scripts: tuple[str, ...]
    show: str
    data: Callable[[RunData, RunData | None], Mapping[str, Any]] = lambda run, first: {}
    in_public: bool = True
    on_board: str = ""


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


REPORT = (
    Section("overview", "Overview", ("overview",), "showOverview", evaluation.changes_of, on_board="showOverview"),
    Section("curves", "Curves", ("charts",), "showCurves", on_board="showCurves"),
    Section("diagnosis", "Diagnosis", ("findings",), "showDiagnosis", on_board="showDiagnosis"),
    Section("evaluation", "Before and after", ("evaluation",), "showEvaluation"),
    Section(
        "completions",
        "Completions",
        ("tokens", "completions"),
        "showCompletions",
        in_public=False,
        on_board="showBeside",
    ),
    Section("recipe", "Recipe", ("recipe",), "showRecipe", on_board="showRecipe"),
    Section(
        "commands",
        "Commands",
        ("recipe",),
        "showCommands",
        lambda run, first: {"commands": commands(run)},
        in_public=False,
    ),
    Section("record", "Record", ("recipe",), "showRecord", lambda run, first: {"facts": facts(run)}),
)
"""Sections of a report, in the order of the page."""
BOARD = tuple(section._replace(show=section.on_board) for section in REPORT if section.on_board)
"""Sections of the runs that are chosen on the board."""
DATA = (
    Section("overview", "Overview", ("data",), "showSummary"),
    Section("diagnosis", "Findings", ("findings",), "showDiagnosis"),
    Section("rows", "Rows as the model gets them", ("data",), "showRows"),
    Section("lengths", "Lengths", ("data",), "showLengths"),
    Section("duplicates", "Duplicates", ("data",), "showDuplicates"),
    Section("columns", "Columns", ("data",), "showColumns"),
)
"""Sections of the page of a recipe's data."""


def shown(sections: Iterable[Section], public: bool = False) -> list[Section]:
    """Return the sections that a page shows, or a public page."""
    return [section for section in sections if section.in_public or not public]


def elements_of(sections: Iterable[Section]) -> str:
    """Return the elements of sections, which are empty and hidden until their functions have filled them."""
    return "\n".join(
        f'  <section id="{section.id}" hidden><h2>{section.title}</h2><div class="body"></div></section>'
        for section in sections
    )


def join_scripts(sections: Sequence[Section], last: str, public: bool = False) -> str:
    """Return the common scripts, the scripts of the sections and the text of a `last` one, as one script.

    In it `SECTIONS` has the functions of the sections that are shown by id, in their order. The scripts of the others
    are there too: some functions are used by several sections.
    """
    names = dict.fromkeys((*COMMON, *(name for section in sections for name in section.scripts)))
    functions = ", ".join(f"{section.id}: {section.show}" for section in shown(sections, public))
    code = "".join([f"const SECTIONS = {{ {functions} }};\n", *(asset(f"{name}.js") for name in names), last])
    return f"(() => {{\n'use strict';\n{code}}})();\n"


def asset(name: str) -> str:
    """Return the text of a file of the pages: a script, a style or a page without its content."""
    return (files("covey_report") / "assets" / name).read_text(encoding="utf-8")
