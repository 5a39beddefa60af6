"""The built-in environments and tools by name, and adapters to other libraries.

Installed packages offer more as entry points of the groups `covey.environments` and `covey.tools`; `module:Class` and
`module:function` name those of the user's modules. All are imported at their first use.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from covey.config.schema import EnvsConfig
from covey.config.schema.envs import PythonEngine, metric_name
from covey.errors import RecipeError, nearest
from covey.registry import Registry
from covey_envs.protocol import Factory

ENVIRONMENTS = {"guess": "covey_envs.games:Guess", "wordle": "covey_envs.games:Wordle"}
TOOLS = {"calculator": "covey_envs.tools:calculator"}
ADAPTERS = {"openenv": "covey_envs.openenv", "trl": "covey_envs.trl", "verifiers": "covey_envs.verifiers"}
"""Part of a name before the colon → module whose `factory(rest of the name, settings)` makes the environment."""

REMOTE_ADAPTERS = ("openenv", "verifiers")
"""Adapters whose episodes are played elsewhere."""

ENVIRONMENT_REGISTRY = Registry("environment", "covey.environments", "Class", "envs.environment", ENVIRONMENTS)
TOOL_REGISTRY = Registry("tool", "covey.tools", "function", "envs.tools", TOOLS)


def resolve(environment: str | Factory, config: EnvsConfig | None = None) -> Factory:
    """Find the factory of an environment, in the registry or by an adapter, such as `openenv:URL`.

    Args:
        environment: name of the environment, or its factory.
        config: settings that an adapter may need, and arguments of the factory.

    Raises:
        RecipeError: it does not exist, its module cannot be imported, or it does not take `envs.arguments`.
    """
    name = environment if isinstance(environment, str) else environment_name(environment)
    adapter, colon, rest = name.partition(":")
    if adapter in ADAPTERS and colon:
        adapted: Factory = import_module(ADAPTERS[adapter]).factory(rest, config or EnvsConfig(environment=name))
        return adapted
    factory = ENVIRONMENT_REGISTRY.resolve(name) if isinstance(environment, str) else environment
    return with_arguments(factory, config.arguments if config else {}, name, "row")


def resolve_tool(name: str, engine: PythonEngine = "auto") -> Callable[..., Any]:
    """Return the function of the tool `name`.

    Args:
        name: name of the tool.
        engine: engine of a tool that has several.

    Raises:
        RecipeError: it does not exist, or its module cannot be imported, or the engine's packages are missing.
    """
    function: Callable[..., Any] = TOOL_REGISTRY.resolve(name)
    with_engine = getattr(function, "with_engine", None)
    return with_engine(engine) if with_engine else function


def environment_name(environment: str | Factory) -> str:
    """Return the name of an environment in metrics: the name of its class or function, in small letters."""
    if not isinstance(environment, str):
        environment = str(getattr(environment, "__name__", type(environment).__name__))
    return metric_name(environment)


def with_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], name: str, *positional: str
) -> Callable[..., Any]:
    """Give a function these arguments in addition to its positional ones.

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
    """Check that a function takes these arguments in addition to its positional ones.

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
        keywords = [*signature.parameters][len(positional) :]
        unknown = [argument for argument in arguments if argument not in keywords]
        raise RecipeError(
            f"{name} cannot be made: {error}",
            want=f"{name}{signature}",
            fix=nearest(unknown[0], keywords) if unknown and keywords else "",
            where="envs.arguments",
        ) from None
