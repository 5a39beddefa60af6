"""JSON Schema of a function, from its type hints and its Google-style docstring.

Equal functions get the schema that `transformers.utils.get_json_schema` (5.23) gives them, so that a chat template
renders for the model what it would render there. A hint or docstring that has no schema there has none here.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from inspect import Parameter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from covey.errors import RecipeError

Schema = dict[str, Any]
"""A JSON Schema."""

_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(?:Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(?:Returns:|Raises:|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(?:Raises:|\Z)", re.DOTALL)
_ENTRY = re.compile(r"([ \t]*)(\w+):\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)

SCALARS: dict[type, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
"""Types of JSON values that may stand in an enum."""
BARE: dict[Any, Schema] = {
    **{kind: {"type": name} for kind, name in SCALARS.items()},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
"""Schemas of type hints without arguments."""


def json_schema(function: Callable[..., Any]) -> Schema:
    """Make the schema of a tool: `{"type": "function", "function": {name, description, parameters, ...}}`.

    >>> def double(number: int) -> int:
    ...     '''Double a number.
    ...
    ...     Args:
    ...         number: The number.
    ...     '''
    >>> description = json_schema(double).get("function")
    >>> description.get("parameters").get("properties")
    {'number': {'type': 'integer', 'description': 'The number.'}}

    Raises:
        RecipeError: there is no docstring, an argument has no type hint or no description, or a hint has no schema.
    """
    name, text = function_name(function), (inspect.getdoc(function) or "").strip()
    if not text:
        raise _unusable(name, "has no docstring", "a description, and a description of each argument under Args:")
    description, arguments, returns = _parse_docstring(text)
    hints, properties, signature = type_hints(function), {}, parameters(function)
    for argument in signature:
        if argument not in arguments:
            raise _unusable(name, f"has an argument {argument!r} that its docstring does not describe", GOOGLE)
        schema = _of_hint(hints[argument], f"{name}, argument {argument!r}")
        properties[argument] = _add_description(schema, arguments[argument])
    required = [argument for argument, parameter in signature.items() if parameter.default is Parameter.empty]
    whole: Schema = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    entries: Schema = {"name": name, "description": description, "parameters": whole}
    return {"type": "function", "function": entries | _return_schema(hints, returns)}


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, which is the name of its tool."""
    return str(getattr(function, "__name__", type(function).__name__))


def parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Return the parameters of a function by name, all of them with a type hint.

    Raises:
        RecipeError: one has no type hint, or cannot be given by name.
    """
    signature = inspect.signature(function).parameters
    for name, parameter in signature.items():
        if parameter.annotation is Parameter.empty:
            raise _unusable(function_name(function), f"has an argument {name!r} without a type hint", f"{name}: str")
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise _unusable(
                function_name(function),
                f"has the argument {parameter}, which cannot be given by its name",
                "arguments with names",
            )
    return signature


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of a function, or of an object that is called like one."""
    return get_type_hints(function if inspect.isroutine(function) else type(function).__call__)


GOOGLE = "Args:, and below it a line for each argument: its name, a colon, its description"


def _parse_docstring(text: str) -> tuple[str, dict[str, str], str | None]:
    """Return the descriptions of a function, of its arguments and of its result."""
    description, args, returns = _DESCRIPTION.search(text), _ARGS.search(text), _RETURNS.search(text)
    entries: dict[str, list[str]] = {}
    name, indent = "", ""
    for line in filter(str.strip, args[1].split("\n") if args else ()):
        match = _ENTRY.match(line)
        if match and not (name and line.startswith((indent + " ", indent + "\t"))):
            indent, name = match[1], match[2]
            entries[name] = [match[3]]
        elif name:
            entries[name].append(line)
    joined = {name: " ".join(part.strip() for part in parts if part.strip()) for name, parts in entries.items()}
    return description[1].strip() if description else "", joined, returns[1].strip() if returns else None


def _add_description(schema: Schema, description: str) -> Schema:
    """Add a description to a schema; `(choices: [...])` at its end becomes an enum."""
    if choices := _CHOICES.search(description):
        values = [value.strip() if isinstance(value, str) else value for value in json.loads(choices[1])]
        return {**schema, "enum": values, "description": description[: choices.start()].strip()}
    return {**schema, "description": description}


def _return_schema(hints: Mapping[str, Any], description: str | None) -> Schema:
    """Make the entry `return`, which most templates leave out; {} for a hint that has no schema."""
    if "return" not in hints:
        return {}
    try:
        schema = _of_hint(hints["return"], "return")
    except RecipeError:
        return {}
    return {"return": schema if description is None else {**schema, "description": description}}


def _of_hint(hint: Any, where: str) -> Schema:
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _of_values([member.value for member in hint], where)
    if origin is Literal:
        return _of_values(list(args), where)
    if origin in (Union, types.UnionType):
        return _of_union(args, where)
    if origin is list:
        return {"type": "array", "items": _of_hint(args[0], where)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_of_hint(arg, where) for arg in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_hint(args[1], where)}
    if origin is None and hint in BARE:
        return dict(BARE[hint])
    raise _unusable(
        where,
        f"has the type hint {hint!r}, which has no JSON Schema",
        "int, float, str, bool, Enum, Literal, and list, tuple, dict and unions of them",
    )


def _of_values(values: Sequence[Any], where: str) -> Schema:
    if not values or any(type(value) not in SCALARS for value in values):
        raise _unusable(where, f"may be one of {values!r:.80}", "texts, numbers, booleans or None")
    kinds = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _of_union(args: Sequence[Any], where: str) -> Schema:
    parts = [_of_hint(arg, where) for arg in args if arg is not type(None)]
    if len(parts) == 1:
        schema = parts[0]
    elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
        kinds = sorted({part["type"] for part in parts})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if type(None) in args else {})


def _unusable(name: str, what: str, want: str) -> RecipeError:
    return RecipeError(f"the tool {name} {what}", want=want, where="envs.tools")
