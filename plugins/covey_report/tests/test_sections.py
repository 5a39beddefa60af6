"""Each section of a page has the function that fills it, and each such function a section."""

import re
import subprocess
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from covey_report.sections import BOARD, COMMON, DATA, REPORT, asset, elements_of, join_scripts, shown

PAGES = {"main": REPORT, "data_page": DATA, "": BOARD}
"""Sections by the script that puts their page together; that of the board is none of the assets."""
FILLS = r"(?m)^function (show\w+)\(body\)"
"""Pattern of a function that fills a section."""


def board_script() -> str:
    return (files("covey_report.board") / "assets" / "board.js").read_text(encoding="utf-8")


def test_each_section_has_its_function() -> None:
    for section in (*REPORT, *DATA):
        assert section.show in re.findall(FILLS, asset(f"{section.scripts[-1]}.js")), section.id
    for section in BOARD:
        assert section.show in re.findall(FILLS, join_scripts(BOARD, board_script())), section.id


def test_each_function_that_fills_a_section_has_one() -> None:
    scripts = [
        file.read_text(encoding="utf-8") for file in (files("covey_report") / "assets").iterdir() if is_own(file)
    ]
    written = {name for script in (*scripts, board_script()) for name in re.findall(FILLS, script)}
    assert written == {section.show for sections in PAGES.values() for section in sections}


def test_each_script_is_on_a_page() -> None:
    used = {*COMMON, *filter(None, PAGES)} | {name for page in PAGES.values() for one in page for name in one.scripts}
    assert used == {
        file.name.removesuffix(".js") for file in (files("covey_report") / "assets").iterdir() if is_own(file)
    }


CHECK = "process.argv.slice(1).forEach(file => new vm.Script(fs.readFileSync(file, 'utf8'), { filename: file }))"


def parsed(*scripts: Path) -> str:
    """Return what Node, which comes with playwright, says against the syntax of scripts; nothing is executed."""
    if (package := find_spec("playwright")) is None or package.origin is None:
        pytest.skip("the package playwright, which has a Node, is not installed")
    node = Path(package.origin).parent / "driver" / "node"
    return subprocess.run([node, "-e", CHECK, "--", *scripts], capture_output=True, text=True).stderr


def test_the_scripts_of_each_page_are_javascript(tmp_path: Path) -> None:
    for name, sections in PAGES.items():
        last = asset(f"{name}.js") if name else board_script()
        (tmp_path / f"page-{name}.js").write_text(join_scripts(sections, last), encoding="utf-8")
    assert parsed(*tmp_path.glob("*.js")) == ""


def test_a_mistake_of_syntax_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(join_scripts(REPORT, asset("main.js").replace("{", "", 1)), encoding="utf-8")
    assert "SyntaxError" in parsed(tmp_path / "page.js")


def test_the_scripts_of_a_page_know_its_sections() -> None:
    for sections in PAGES.values():
        script = join_scripts(sections, "")
        assert all(f"{section.id}: {section.show}" in script.splitlines()[2] for section in sections)
        assert all(f'<section id="{section.id}" hidden>' in elements_of(sections) for section in sections)
        assert len({section.id for section in sections}) == len(sections)


def test_a_public_report_keeps_the_scripts_that_other_sections_use() -> None:
    script = join_scripts(REPORT, "", public=True)
    assert "commands: showCommands" not in script
    assert all(asset(f"{name}.js") in script for section in REPORT for name in section.scripts)


def test_a_public_report_has_no_section_of_texts_and_paths() -> None:
    assert {one.id for one in REPORT} - {one.id for one in shown(REPORT, public=True)} == {"completions", "commands"}


def is_own(file: object) -> bool:
    """Tell whether a file is a script that is not of a library."""
    name = str(getattr(file, "name", ""))
    return name.endswith(".js") and not name.startswith("uPlot")
