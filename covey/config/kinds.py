"""Types of settings: the values that a field takes, in words."""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import JsonValue


def without_none(kind: Any) -> tuple[Any, bool]:
    """Return the type of a field without its range and None, and whether None is a value of it."""
    if get_origin(kind) is Annotated:
        return without_none(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType) and types.NoneType in get_args(kind):
        (rest,) = [part for part in get_args(kind) if part is not types.NoneType]
        return without_none(rest)[0], True
    return kind, False


def describe(kind: Any) -> str:
    """Describe the values that a field of type `kind` takes."""
    inner, optional = without_none(kind)
    if get_origin(inner) is Literal:
        words = ", ".join(str(a) for a in get_args(inner))
    elif get_origin(inner) is tuple:
        words = f"a list [a, b] of: {describe(get_args(inner)[0])}"
    elif get_origin(inner) is dict:
        words = f"a mapping {{name: value}} of: {describe(get_args(inner)[1])}"
    else:
        words = _WORDS.get(inner, "a mapping (name: value)")
    return words + (" (or null)" if optional else "")


def choices(kind: Any) -> Sequence[Any]:
    """Return the choices of a field of type `kind`, or of each part of its value; empty if it has none."""
    parts = get_args(kind)
    return parts if get_origin(kind) is Literal else [choice for part in parts for choice in choices(part)]


_WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
_WORDS[JsonValue] = "text, numbers, true or false, null, lists and mappings"
