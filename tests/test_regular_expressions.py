"""Every regular expression of the package takes time linear in its text: none can be made to backtrack.

An expression becomes an automaton: its positions, each with the characters that it takes, and for each position those
that may follow. A backtracking engine takes super-linear time where one text leads back to a position in two ways
(exponential), or where it stays at one position, leads from that to another, and stays there (a power of the length).
Both are read from the automaton, so nothing is timed. Where an expression is searched for, a first position that takes
anything stands for the places at which a search begins.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from operator import or_
from pathlib import Path
from typing import Any

import pytest

from covey.config import metrics, strict_yaml
from covey_hosts import jobs, start

ROOT = Path(__file__).parents[1]
MODES = {
    "fullmatch": "fullmatch",
    "match": "match",
    **dict.fromkeys(("search", "findall", "finditer", "split", "sub", "subn"), "search"),
}
"""Functions of `re` that execute an expression, and how."""
OWN_DOCSTRING = "it reads the docstring of the user's own tool, by the expressions of transformers"
BOUNDARY = "a word boundary lets a word begin at one place"
REVIEWED = {
    "plugins/covey_envs/tool_calls.py": {'"(?:[^': "no escaped quote begins a text, so each is read at most twice"},
    "plugins/covey_envs/schemas.py": dict.fromkeys(
        ("^(.*?)", r"\n\s*Args", r"\n\s*Returns", r"\(choices"), OWN_DOCSTRING
    ),
    "plugins/covey_plan/hlo.py": dict.fromkeys((r"\b\w+\[", r"\b(\w+)\["), BOUNDARY),
    "covey/rewards/numbers.py": {"\n    (?:(?<!": "all behind a number is optional, and its digits are not given back"},
}
"""Expressions that the check refuses, by file and beginning, each with the reason why it may stay."""
DYNAMIC = {
    "OWN_NUMBER": "a part of the same table",
    "form": "a table, which is read here too",
    "row.name.replace(FUNCTION, '([^/]+)').replace(NUMBER, '[1-9][0-9]*').replace(NAME, OWN_NUMBER)": "a table",
    "text.replace('<function>', '([^/]+)').replace('<k>', '([1-9][0-9]*)')": "the names of the same table",
    "f'(?:{_pattern})\\\\Z'": "a table, which is read here too",
    "'.*' if entry == ALL_LINEAR else f'.*\\\\.{entry}' if entry.isidentifier() else entry": "a setting",
    "f\"\\\\b(?:{'|'.join(names)})=(\\\\{{[^{{}}]*\\\\}}|%?[\\\\w.\\\\-]+)\"": "names from the source",
    "f'{mark}({self._control_pattern}){mark}'": "fixed texts, each of them escaped",
    "pattern": "names of metrics from the source, with one `.*` between fixed texts",
    "f'(\\\\d{{8,}})/{SUMS}'": "a fixed text behind one loop",
    "r[0]": "a table of Tunix, read by its own process",
    "rule": "a table of Tunix, read by its own process",
}
"""Expressions that are no text in the source, each with the reason why it may stay."""

PARSER: Any = re._parser  # type: ignore[attr-defined]
ALPHABET = frozenset(map(chr, range(256))) | set("’–—é中٣ſ\u2028")
CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
SIZE = 300
"""Largest number of repetitions that is no loop."""


@dataclass
class Part:
    """A part of an expression: the positions at which it may begin and end, and whether it may be empty.

    `sure` are the positions at which it ends whatever follows: no anchor and no look ahead can refuse it there.
    """

    first: Counter[int] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)
    empty: bool = True
    sure: frozenset[int] = frozenset()
    surely_empty: bool = True


class Automaton:
    """The positions of an expression and what may follow each, with the number of ways in which it may."""

    def __init__(self, pattern: str, mode: str, flags: int = 0):
        tree = PARSER.parse(pattern, flags)
        self.flags: int = tree.state.flags
        self.takes: list[frozenset[str]] = []
        self.follow: dict[int, Counter[int]] = {}
        self.kept: dict[int, frozenset[str]] = {}
        begin = self._before(str(tree[0][1]) if len(tree) else "") if mode == "search" else Part()
        whole = self._join(begin, self._sequence(tree))
        # What takes long is a search that fails, and that meets no position at which the expression surely ends.
        self.accepting = frozenset() if mode == "fullmatch" else whole.sure

    def _before(self, anchor: str) -> Part:
        """Return the text before a place at which a search begins."""
        if anchor == "AT_BEGINNING_STRING" or (anchor == "AT_BEGINNING" and not self.flags & re.MULTILINE):
            return Part()
        text = self._loop(self._position(ALPHABET))
        if anchor != "AT_BEGINNING":
            return text
        lines = self._join(text, self._position("\n"))
        return Part(lines.first, lines.last, True)

    def _position(self, characters: Iterable[str]) -> Part:
        self.takes.append(frozenset(characters))
        self.follow[len(self.takes) - 1] = Counter()
        at = Counter([len(self.takes) - 1])
        return Part(at, Counter(at), False, frozenset(at), False)

    def _link(self, last: Counter[int], first: Counter[int]) -> None:
        for one, other in product(last, first):
            self.follow[one][other] += last[one] * first[other]

    def _join(self, one: Part, other: Part) -> Part:
        self._link(one.last, other.first)
        first = one.first + other.first if one.empty else one.first
        last = other.last + one.last if other.empty else other.last
        sure = other.sure | one.sure if other.surely_empty else other.sure
        return Part(first, last, one.empty and other.empty, sure, one.surely_empty and other.surely_empty)

    def _either(self, one: Part, other: Part) -> Part:
        sure, surely_empty = one.sure | other.sure, one.surely_empty or other.surely_empty
        return Part(one.first + other.first, one.last + other.last, one.empty or other.empty, sure, surely_empty)

    def _loop(self, part: Part) -> Part:
        self._link(part.last, part.first)
        return Part(part.first, part.last, True, part.sure, True)

    def _sequence(self, items: Iterable[tuple[Any, Any]]) -> Part:
        whole = Part()
        for kind, value in items:
            whole = self._join(whole, self._item(str(kind), value))
        return whole

    def _item(self, kind: str, value: Any) -> Part:
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            whole = self._repeat(*value)
            if kind == "POSSESSIVE_REPEAT" and len(whole.first) == 1 == len(whole.last):
                # Of one character: it is left only where it cannot go on.
                self.kept |= {one: self.takes[one] for one in whole.last}
            return whole
        if kind == "SUBPATTERN":
            return self._sequence(value[-1])
        if kind == "ATOMIC_GROUP":
            return self._sequence(value)
        if kind == "BRANCH":
            return functools.reduce(self._either, (self._sequence(one) for one in value[1]))
        if kind in ("AT", "ASSERT", "ASSERT_NOT", "FAILURE"):  # the last is `(?!)` since Python 3.13
            assert kind in ("AT", "FAILURE") or _is_short(value[1]), "what is looked at has a loop of its own"
            return Part(surely_empty=False)
        return self._position(self._characters(kind, value))

    def _repeat(self, low: int, high: Any, body: Any) -> Part:
        """Return a repeated part. At most two copies stand for a number of repetitions that is limited."""
        unbounded = high == PARSER.MAXREPEAT or high > SIZE
        copies = max(1, min(low, 2)) if unbounded else min(high, 2)
        whole = Part()
        for number in range(copies):
            one = self._sequence(body)
            needed = number < low
            if unbounded and number == copies - 1:
                self._link(one.last, one.first)
            whole = self._join(whole, one if needed else Part(one.first, one.last, True, one.sure, True))
        return whole

    def _characters(self, kind: str, value: Any) -> frozenset[str]:
        if kind == "LITERAL":
            same = {chr(value)}
            return frozenset(same | {chr(value).lower(), chr(value).upper()} if self.flags & re.IGNORECASE else same)
        if kind == "NOT_LITERAL":
            return ALPHABET - {chr(value)}
        if kind == "ANY":
            return ALPHABET if self.flags & re.DOTALL else ALPHABET - {"\n"}
        if kind == "RANGE":
            return frozenset(c for c in ALPHABET if value[0] <= ord(c) <= value[1])
        if kind == "CATEGORY":
            _, *negated, name = str(value).split("_")
            members = {c for c in ALPHABET if re.match(CATEGORIES[name], c)}
            return frozenset(ALPHABET - members if negated else members)
        assert kind == "IN", f"{kind} is not known to this check"
        negate = str(value[0][0]) == "NEGATE"
        inside = frozenset().union(*(self._characters(str(k), v) for k, v in value[negate:]))
        return ALPHABET - inside if negate else inside

    def _next(self, state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the positions that several copies of the automaton may reach together, by one character."""
        for after in product(*(self.follow[one] for one in state)):
            taken = (self._step(one, other) for one, other in zip(state, after, strict=True))
            if not self.accepting.intersection(after) and frozenset.intersection(*taken):
                yield after

    def _step(self, one: int, other: int) -> frozenset[str]:
        """Return the characters by which one position leads to another."""
        return self.takes[other] if one == other else self.takes[other] - self.kept.get(one, frozenset())

    def _reaches(
        self, start: tuple[int, ...], end: tuple[int, ...], through: Callable[..., bool] | None = None
    ) -> bool:
        """Return whether several copies get from one state to another by one text, perhaps through a third state."""
        seen, stack = set(), [(start, through is None)]
        while stack:
            state, passed = stack.pop()
            for after in self._next(state):
                after_passed = passed or (through is not None and through(state, after))
                if after == end and after_passed:
                    return True
                if (after, after_passed) not in seen:
                    seen.add((after, after_passed))
                    stack.append((after, after_passed))
        return False

    def is_linear(self) -> bool:
        """Return whether no text makes a search take longer than linear time."""
        loops = [p for p in self.follow if self._reaches((p,), (p,))]
        for p in loops:
            if self._reaches((p, p), (p, p), lambda _, after: after[0] != after[1]):
                return False
            if self._reaches((p,), (p,), lambda before, after: self.follow[before[0]][after[0]] > 1):
                return False
        return not any(self._reaches((p, p, q), (p, q, q)) for p, q in product(loops, loops) if p != q)


@functools.cache
def is_linear(pattern: str, mode: str, flags: int = 0) -> bool:
    """Return whether no text makes an expression take longer than linear time."""
    return Automaton(pattern, mode, flags).is_linear()


def _is_short(items: Any) -> bool:
    """Return whether what is looked at ahead or behind has a limited length."""
    return bool(items.getwidth()[1] <= SIZE)


@dataclass(frozen=True)
class Use:
    """A regular expression in the source: where it stands, its text (None if that is not there), and how it is used."""

    where: str
    text: str | None
    modes: frozenset[str]
    flags: int = 0
    source: str = ""


def _text(node: ast.expr) -> str | None:
    """Return the text of an expression; a letter stands for each value that is put in."""
    if isinstance(node, ast.Constant):
        return node.value.decode("latin-1") if isinstance(node.value, bytes) else str(node.value)
    if isinstance(node, ast.JoinedStr):
        known = all(isinstance(one, ast.Constant) or "re.escape" in ast.unparse(one) for one in node.values)
        return (
            "".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in node.values) if known else None
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def _flags(call: ast.Call) -> int:
    """Return the flags that stand in a call, such as `re.VERBOSE`."""
    names = re.findall(
        r"re\.([A-Z]+)\b", ", ".join(map(ast.unparse, (*call.args[1:], *(k.value for k in call.keywords))))
    )
    return int(functools.reduce(or_, (getattr(re, name) for name in names), 0))


@pytest.fixture(scope="module")
def uses() -> list[Use]:
    """Every regular expression in the package."""
    return list(find_uses())


def find_uses() -> Iterator[Use]:
    """Yield every regular expression in the package."""
    files = sorted(
        file for file in [*ROOT.glob("covey/**/*.py"), *ROOT.glob("plugins/**/*.py")] if "tests" not in file.parts
    )
    nodes = {path: [*ast.walk(ast.parse(path.read_text("utf-8")))] for path in files}
    calls = [
        (path, node, node.func)
        for path, inside in nodes.items()
        for node in inside
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in (*MODES, "compile")
    ]
    by_name: dict[str, set[str]] = {}
    for _, _, method in calls:
        if method.attr in MODES:
            by_name.setdefault(ast.unparse(method.value).rpartition(".")[2], set()).add(MODES[method.attr])
    assignments = (node for inside in nodes.values() for node in inside if isinstance(node, ast.Assign))
    names = {node.value: ast.unparse(node.targets[0]) for node in assignments if isinstance(node.value, ast.Call)}
    for path, node, method in calls:
        if ast.unparse(method.value) != "re":
            continue
        named = by_name.get(names.get(node, ""), {"search", "fullmatch"})
        modes = frozenset(named if method.attr == "compile" else {MODES[method.attr]})
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        yield Use(where, _text(node.args[0]), modes, _flags(node), ast.unparse(node.args[0]))


def test_every_regular_expression_is_linear_or_was_reviewed(uses: list[Use]) -> None:
    texts = {(use.where, use.text): use for use in uses if use.text is not None}
    refused = [one for one, use in texts.items() if not all(is_linear(one[1], mode, use.flags) for mode in use.modes)]
    reviewed = [(file, beginning) for file, reasons in REVIEWED.items() for beginning in reasons]
    new = [one for one in refused if not any(all(map(str.startswith, one, known)) for known in reviewed)]
    gone = [known for known in reviewed if not any(all(map(str.startswith, one, known)) for one in refused)]
    assert len(texts) > 80
    assert not new, "these backtrack: parse without an expression, or say here why the text cannot be a stranger's"
    assert not gone, "these are gone, or linear now"


def test_every_expression_that_is_made_when_it_is_needed_was_reviewed(uses: list[Use]) -> None:
    quoted = {ast.unparse(ast.parse(source)) for source in DYNAMIC}  # in the quotes of this version of Python
    assert {use.source for use in uses if use.text is None} == quoted


def test_the_expressions_of_tables_are_linear() -> None:
    forms = [form for form, _ in (*jobs.FORMS.values(), *start.FORMS.values())]
    yaml = [rf"(?:{pattern})\Z" for pattern, _ in strict_yaml._PATTERNS.values()]
    names = [pattern.pattern for pattern, _ in metrics._PATTERNS]
    assert len(forms) >= 3
    assert all(is_linear(form, "fullmatch") for form in (*forms, *names))
    assert all(is_linear(form, "match") for form in yaml)


@pytest.mark.parametrize(
    ("pattern", "mode", "linear"),
    [
        (r"\s*```(?:json)?\s*(.*?)\s*```\s*", "fullmatch", False),
        (r"(a+)+b", "match", False),
        (r"(?:a|ab|b)*c", "match", False),
        (r"\s*(\d{1,9})\s*\.?\s*", "fullmatch", False),
        (r"\d+x", "search", False),
        (r"\d+x", "match", True),
        (r"\d+", "search", True),
        (r"\d++\d*x", "match", True),
        (r"\d+$", "search", False),
        (r"^\d+$", "search", True),
        (r"^a*\s*b", "search", True),
        (r"(?:'[a-z]+)*;", "match", True),
        (r"<<[^<>]*>>", "search", True),
        (r"<<[^>]*>>", "search", False),
        (r"x.{0,400}x", "search", False),
    ],
)
def test_the_check_knows_expressions_that_backtrack(pattern: str, mode: str, linear: bool) -> None:
    assert is_linear(pattern, mode, re.DOTALL) is linear
