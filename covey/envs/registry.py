"""The built-in environments and tools by name, and adapters to other libraries.

Installed packages offer more as entry points of the groups `covey.environments` and `covey.tools`; `module:Class` and
`module:function` name those of the user's modules. All are imported at their first use.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from covey.config.schema import EnvsConfig
from covey.config.schema.envs import PythonEngine, metric_name
from covey.envs.arguments import with_arguments
from covey.envs.protocol import Factory
from covey.registry import Registry

ENVIRONMENTS = {"guess": "covey.envs.guess:Guess", "wordle": "covey.envs.wordle:Wordle"}
TOOLS = {"calculator": "covey.envs.calculator:calculator", "python": "covey.envs.python_tool.tool:python"}
ADAPTERS = {"openenv": "covey.envs.openenv", "trl": "covey.envs.trl", "verifiers": "covey.envs.verifiers"}
"""Part of a name before the colon → module whose `factory(rest of the name, settings)` makes the environment."""

REMOTE_ADAPTERS = ("openenv", "verifiers")
"""Adapters whose episodes are played elsewhere."""

ENVIRONMENT_REGISTRY = Registry("environment", "covey.environments", "Class", "envs.environment", ENVIRONMENTS)
TOOL_REGISTRY = Registry("tool", "covey.tools", "function", "envs.tools", TOOLS)


def resolve(name: str, config: EnvsConfig | None = None) -> Factory:
    """Return the factory of the environment `name`: one of the registry, or that of an adapter, such as `openenv:URL`.

    Args:
        config: settings that an adapter may need.

    Raises:
        RecipeError: it does not exist, its module cannot be imported, or it does not take `envs.arguments`.
    """
    adapter, colon, rest = name.partition(":")
    if adapter in ADAPTERS and colon:
        adapted: Factory = import_module(ADAPTERS[adapter]).factory(rest, config or EnvsConfig(environment=name))
        return adapted
    factory: Factory = ENVIRONMENT_REGISTRY.resolve(name)
    return with_arguments(factory, config.arguments if config else {}, name, "row")


def resolve_tool(name: str, engine: PythonEngine = "auto") -> Callable[..., Any]:
    """Return the function of the tool `name`.

    Args:
        name: name of the tool.
        engine: engine of the tool `python`.

    Raises:
        RecipeError: it does not exist, or its module cannot be imported, or the engine's packages are missing.
    """
    function: Callable[..., Any] = TOOL_REGISTRY.resolve(name)
    if name == "python":
        function = import_module("covey.envs.python_tool.tool").with_engine(engine)
    return function


def environment_name(environment: str | Factory) -> str:
    """Return the name of an environment in metrics: that of its class or function, in small letters."""
    if not isinstance(environment, str):
        environment = str(getattr(environment, "__name__", type(environment).__name__))
    return metric_name(environment)
