"""Docstrings open with full clauses, and names that nobody outside the project would look for stay gone."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(f for folder in ("covey", "benchmarks", "examples", "tools") for f in (ROOT / folder).rglob("*.py"))

ELIDED = re.compile(
    r"\W*(About|After|And|As|At|Before|Behind|Beside|Between|But|By|Either|Every(one|thing)?|For|From|How|If|In|Into|Like"
    r"|Likewise|Neither|No|Nobody|None|Not|Nothing|Of|On|Only|Or|Same|Since|So|Such|Than|That|Then|There|These|They|This"
    r"|Those|To|Under|Until|What(ever)?|When|Where|Which|Who|Whom|Whose|Why|With(in|out)?)\b"
)
"""First words of half sentences: a docstring starts with a verb, or names the thing."""

RETIRED = re.compile(
    r"Feeder|Part|Shares|Skips|Stopper|TiedGroups|Warp|CALL|FREE|_Run|_parted|as_begun|beginning|_?face"
    r"|few_above|home|judged|lay|learnt|opened|owner|picking|rebased|remembers|row_ways|seal|taken|told"
)
"""Names that a reader from another project of the field would not have recognised."""

RETIRED_MODULES = {"card", "common", "face", "feeder", "folders", "heads", "opening", "picking", "stopping", "use"}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, those of attributes and constants included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            described = (ast.Assign | ast.AnnAssign) if isinstance(node, ast.Module | ast.ClassDef) else ()
            before = [None, *node.body]
            for last, statement in zip(before, node.body, strict=False):
                if last is None or isinstance(last, described):
                    yield from strings(statement)


def strings(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
            yield statement.lineno, text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each function, class, argument and attribute of a module, and of its own variables."""
    for node in [*ast.walk(tree), *(name for top in tree.body for name in targets(top))]:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case str():
                yield tree.body[0].lineno, node


def targets(statement: ast.stmt) -> list[str]:
    """Names that a statement outside all functions assigns to."""
    nodes = ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ()
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def found(what: Callable[[ast.Module], Iterator[tuple[int, str]]], bad: re.Pattern[str], whole: bool) -> list[str]:
    match = bad.fullmatch if whole else bad.match
    return [
        f"{file.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for file in FILES
        for line, text in what(ast.parse(file.read_text()))
        if match(text)
    ]


@pytest.mark.parametrize("text", ["Of each completion.", "What a call came to.", "As `load`, of either kind."])
def test_half_sentences_are_recognised(text: str) -> None:
    assert ELIDED.match(text)
    assert not ELIDED.match("Text of each completion.")


def test_names_and_docstrings_are_found() -> None:
    tree = ast.parse('"""Story."""\nA = 1\n"""One."""\ndef f(x):\n    "Do."\n    self.y = z = 2\n    "no docstring"')
    assert [text for _, text in docstrings(tree)] == ["Story.", "One.", "Do."]
    assert {name for _, name in names(tree)} == {"A", "f", "x", "y"}


def test_docstrings_open_with_full_clauses() -> None:
    assert found(docstrings, ELIDED, whole=False) == []


def test_retired_names_stay_gone() -> None:
    assert found(names, RETIRED, whole=True) == []
    assert {file.stem for file in FILES if file.is_relative_to(ROOT / "covey")} & RETIRED_MODULES == set()
