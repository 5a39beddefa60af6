"""The documentation site: pages are in its navigation, links lead somewhere, figures and names are true."""

import difflib
import importlib
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

import covey
from covey.config.base import leaves
from covey.config.recipe import Recipe, SFTRecipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = ("*.md", "examples/*.md", "benchmarks/*.md", "plugins/*/README.md", "tests/README.md")
DOCUMENTS = sorted([*PAGES, *(file for pattern in OUTSIDE for file in ROOT.glob(pattern))])
FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)


def read(document: Path) -> str:
    """Return the text of a document, with the files that it includes."""
    included = re.compile(r'^--8<-- "([^"]+)"$', re.M)
    return included.sub(lambda match: (ROOT / match[1]).read_text("utf-8"), document.read_text("utf-8"))


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#{1,6} (.*)$", FENCE.sub("", read(document)), re.M)
    words = (re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)) for heading in headings)
    return {re.sub(r"[-\s]+", "-", text.strip().lower()) for text in words}


def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    return loaded


def pages_of(nav: Any) -> list[str]:
    """Return the files of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(pages_of(config()["nav"])) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(document: Path) -> None:
    """From a page also those of a file that it includes, which are seen from there."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", read(document)))
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (document.parent / path) if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        inside = Path(os.path.normpath(target)).is_relative_to(DOCS)  # links to files outside count as inside
        assert inside or DOCS not in document.parents, f"{link} leaves the site"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_is_short_enough_to_be_read_to_the_end(page: Path) -> None:
    """Tables and included files, which one looks things up in, do not count."""
    prose = [line for line in page.read_text("utf-8").splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= 1200, "a page of two questions is two pages"


def test_anchors_are_those_of_headings() -> None:
    assert "a-base-in-8-or-4-bits" in anchors(DOCS / "lora.md")
    assert {"ratios-ratio", "kl-to-the-reference-beta-kl-kl_in"} <= anchors(DOCS / "algorithms.md")


def test_pages_ask_no_other_site_for_anything() -> None:
    """Fonts would come from outside unless they are turned off; so would KaTeX and Mermaid, if they were not ours."""
    settings = config()
    assert settings["theme"]["font"] is False
    scripts = settings["extra_javascript"]
    assert scripts
    assert [name for name in scripts if not (DOCS / name).is_file()] == []
    loaded = re.findall(r'new URL\("([^"]+)"', (DOCS / "assets" / "formulas.js").read_text("utf-8"))
    assert len(loaded) == 1
    assert (DOCS / "assets" / loaded[0]).is_file()
    assert "mermaid" not in (ROOT / "mkdocs.yml").read_text("utf-8")
    outside = re.compile(r"!\[[^\]]*\]\(https?:|<(?:img|script|link|iframe)[^>]+https?:|url\(https?:")
    texts = {page.name: outside.findall(page.read_text("utf-8")) for page in [*PAGES, *DOCS.glob("images/*.svg")]}
    assert {name: found for name, found in texts.items() if found} == {}


def described() -> list[str]:
    """Return the dotted names that the pages of the reference describe."""
    return [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.M)]


def test_every_public_name_has_one_place_in_the_reference() -> None:
    """A page begins with an example, and the overview leads to each."""
    assert sorted(name.rpartition(".")[2] for name in described()) == sorted(covey.__all__)
    pages = [page for page in PAGES if page.parent.name == "api" and page.name != "index.md"]
    assert [page.name for page in pages if not re.search(r"^```(python|yaml)$", page.read_text("utf-8"), re.M)] == []
    overview = (DOCS / "api" / "index.md").read_text("utf-8")
    assert sorted(re.findall(r"\((\w+\.md)\)", overview)) == sorted(page.name for page in pages)


def test_every_name_of_the_reference_is_imported_from_covey() -> None:
    """A learner of `covey` is the described one, with run folders."""
    for home, _, name in (one.rpartition(".") for one in described()):
        there, public = getattr(importlib.import_module(home), name), getattr(covey, name)
        assert public is there or issubclass(public, there), name


# --- figures


def cells(table: str, peer: str) -> list[str]:
    """Return the first word of each cell behind the name of a peer in a table of results."""
    row = re.search(rf"^\| {peer} \|(.*)\|$", table, re.M)
    assert row
    return [cell.split()[0] for cell in row[1].split("|")]


def test_figures_of_the_readme_and_the_home_page_are_those_that_were_measured() -> None:
    files = (ROOT / "benchmarks" / "RESULTS.md", DOCS / "index.md", ROOT / "README.md")
    results, home, readme = (file.read_text("utf-8") for file in files)
    fixed, ragged = results.partition("`smollm2`, LoRA, fixed lengths")[2].split("\n`smollm2`")[:2]
    home, figures = " ".join(home.split()), readme.partition("## Figures")[2]
    for name in ("Covey", "Tunix", "TRL"):
        row = cells(fixed, name.lower())
        ratio = "" if name == "Covey" else f" ({row[6]}×)"
        assert f"{row[1]} s a step{ratio}, {row[9]} GiB" in home.partition(f"**{name}**")[2], name
        assert re.search(rf"^\| {name}[ \d.]* \| {row[1]} \| {row[6]} \| {row[9]} \|$", figures, re.M), name
    tunix, trl = (cells(ragged, peer)[6] for peer in ("tunix", "trl"))
    assert f"ragged lengths (Tunix {tunix}×, TRL {trl}×)" in home
    assert f"take {tunix} and {trl} times as long" in " ".join(figures.split())


@pytest.mark.parametrize(("page", "ports"), [("from-trl", 1), ("from-tunix", 1), ("verifiers", 2)])
def test_the_lines_that_a_port_changes_are_counted(page: str, ports: int) -> None:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    scripts = re.findall(r'^```python title="\w+"\n(.*?)^```', text, re.M | re.S)
    assert len(scripts) == 2 * ports
    for pair in zip(scripts[::2], scripts[1::2], strict=True):
        theirs, ours = ([line.strip() for line in script.splitlines() if line.strip()] for script in pair)
        matched = difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks()
        new = len(ours) - sum(block.size for block in matched)
        counted = f"{new} of the {len(ours)} lines are new or changed, and {len(theirs)} lines become {len(ours)}"
        assert counted in " ".join(text.split())


# --- names


@pytest.mark.parametrize("peer", ["trl", "tunix", "verl"])
def test_a_page_has_the_names_that_errors_answer(peer: str) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "names_tables.py"))
    assert tool["file"](peer).read_text("utf-8") == tool["text"](peer), "make schema writes it again"


@pytest.mark.parametrize("peer", ["trl", "tunix", "verl", "nanochat"])
def test_the_settings_that_a_table_names_exist(peer: str) -> None:
    text = (DOCS / f"from-{peer}.md").read_text("utf-8") + read(DOCS / "names.md")
    right = re.findall(r"^\| .* \| (.*) \|$", text, re.M)
    named = {name for cell in right for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[`:]", cell)}
    paths = {*leaves(Recipe), *leaves(SFTRecipe)}
    known = paths | {path.rpartition(".")[0] for path in paths} | {"weights.load", "samples.jsonl"}
    assert len(named) > 8
    assert {name for name in named if name not in known} == set()
