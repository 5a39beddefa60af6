"""Arguments of a recipe for an environment, checked against the signature of what takes them."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from covey.errors import RecipeError, nearest

WHERE = "envs.arguments"


def with_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], name: str, *positional: str
) -> Callable[..., Any]:
    """Return a function that gets these arguments beside its positional ones.

    Args:
        function: class or function that makes an environment.
        arguments: values by name.
        name: name of the function in errors.
        positional: names of the arguments that a caller gives it, as a row.

    Raises:
        RecipeError: it does not take them, or needs others.
    """
    check_arguments(function, arguments, name, *positional)
    return partial(function, **arguments) if arguments else function


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], name: str, *positional: str) -> None:
    """Check that a function takes these arguments beside its positional ones.

    Raises:
        RecipeError: it does not, or needs others.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it is written in C
        return
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        takes = _keywords(signature, len(positional))
        unknown = [one for one in arguments if one not in takes]
        fix = nearest(unknown[0], takes) if unknown and takes else ""
        want = f"{name}({', '.join([*positional, *map(str, takes.values())])})"
        raise RecipeError(f"{name} cannot be made: {error}", want=want, fix=fix, where=WHERE) from None


def _keywords(signature: inspect.Signature, positional: int) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name, behind the positional ones."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    behind = [one for one in signature.parameters.values() if one.kind in kinds]
    by_position = sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in behind)
    return {one.name: one for one in behind[min(positional, by_position) :]}
