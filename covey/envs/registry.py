"""The built-in environments and tools by name, those of the user's modules by `module:Class` and `module:function`, and
adapters to other libraries.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from covey.config.schema import EnvsConfig
from covey.config.schema.envs import PythonEngine, metric_name
from covey.envs.arguments import with_arguments
from covey.envs.calculator import calculator
from covey.envs.guess import Guess
from covey.envs.protocol import Factory
from covey.envs.python_tool import ENGINES, python, wasm
from covey.envs.wordle import Wordle
from covey.errors import RecipeError, nearest
from covey.registry import import_user_module


def resolve(name: str, config: EnvsConfig | None = None) -> Factory:
    """Return the factory of the environment `name`: a key of `ENVIRONMENTS`, `package.module:Class`, also from the
    working folder, or what an adapter finds, such as `openenv:URL`.

    Args:
        config: settings that an adapter may need.

    Raises:
        RecipeError: it does not exist, its module cannot be imported, or it does not take `envs.arguments`.
    """
    adapter, colon, rest = name.partition(":")
    if adapter in ADAPTERS and colon:
        adapted: Factory = import_module(ADAPTERS[adapter]).factory(rest, config or EnvsConfig(environment=name))
        return adapted
    factory: Factory = _resolve(name, ENVIRONMENTS, "environment", "Class", "envs.environment")
    return with_arguments(factory, config.arguments if config else {}, name, "row")


def resolve_tool(name: str, engine: PythonEngine = "auto") -> Callable[..., Any]:
    """Return the function of the tool `name`: a key of `TOOLS`, or `package.module:function`, also from the working
    folder.

    Args:
        name: name of the tool.
        engine: engine of the tool `python`.

    Raises:
        RecipeError: it does not exist, or its module cannot be imported, or the engine's packages are missing.
    """
    if name == "python":
        if engine == "wasm":
            wasm.require_packages()
        return ENGINES[engine]
    function: Callable[..., Any] = _resolve(name, TOOLS, "tool", "function", "envs.tools")
    return function


def environment_name(environment: str | Factory) -> str:
    """Return the name of an environment in metrics: that of its class or function, in small letters."""
    if not isinstance(environment, str):
        environment = str(getattr(environment, "__name__", type(environment).__name__))
    return metric_name(environment)


def _resolve(name: str, known: Mapping[str, Any], kind: str, member: str, where: str) -> Any:
    """Return what `known` has under a name, or the member of a module of the user's."""
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        fix = f"{nearest(name, known)}; a {member.lower()} of your own is named package.module:{member}"
        raise RecipeError(f"there is no {kind} {name!r}", fix=fix, where=where)
    module = import_user_module(module_name, f"{kind} {name!r}", f"package.module:{member}", where)
    found = getattr(module, attribute, None)
    if not callable(found):
        have = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        fix = nearest(attribute, have) if have else ""
        raise RecipeError(f"{module_name} has no class or function {attribute!r}", fix=fix, where=where)
    return found


ENVIRONMENTS: dict[str, Factory] = {"guess": Guess, "wordle": Wordle}

ADAPTERS = {"openenv": "covey.envs.openenv", "trl": "covey.envs.trl", "verifiers": "covey.envs.verifiers"}
"""Part of a name before the colon → module whose `factory(rest of the name, settings)` finds the environment. It is
imported when it is first used.
"""

REMOTE_ADAPTERS = ("openenv", "verifiers")
"""Adapters whose episodes are played elsewhere."""

TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}
