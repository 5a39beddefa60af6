"""Docstrings open with full clauses."""

import ast
import re
from collections.abc import Iterator
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


@pytest.mark.parametrize("text", ["Of each completion.", "What a call came to.", "As `load`, of either kind."])
def test_half_sentences_are_recognised(text: str) -> None:
    assert ELIDED.match(text)
    assert not ELIDED.match("Text of each completion.")


def test_docstrings_are_found() -> None:
    tree = ast.parse('"""Story."""\nA = 1\n"""One."""\ndef f(x):\n    "Do."\n    self.y = z = 2\n    "no docstring"')
    assert [text for _, text in docstrings(tree)] == ["Story.", "One.", "Do."]


def test_docstrings_open_with_full_clauses() -> None:
    bad = [
        f"{file.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for file in FILES
        for line, text in docstrings(ast.parse(file.read_text()))
        if ELIDED.match(text)
    ]
    assert bad == []
