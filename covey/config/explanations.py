"""Explanations of settings: the strings under the fields of the config classes, for the help and the JSON Schema."""

import ast
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

from covey.config.base import Config


def explanations(cls: type[Config]) -> dict[str, str]:
    """Return the string under each field of a class of settings, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Config):
            inherited = {name: f"{text} {base.unset}" for name, text in found.items()} if base.unset else found
            found = inherited | _in_body(_classes(base.__module__)[base.__qualname__])
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax tree of each class in the source of `module`."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}


def _in_body(cls: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(str(after.value.value).split())
        for field, after in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
