"""The built-in environments by name, those of the user's modules by `module:Class`, and adapters to other libraries."""

from importlib import import_module

from covey.config.schema import EnvsConfig
from covey.config.schema.envs import metric_name
from covey.envs.guess import Guess
from covey.envs.protocol import Factory
from covey.errors import RecipeError, nearest
from covey.rewards.registry import import_user_module


def resolve(name: str, config: EnvsConfig | None = None) -> Factory:
    """Return the factory of the environment `name`: a key of `ENVIRONMENTS`, `package.module:Class`, also from the
    working folder, or what an adapter finds, such as `openenv:URL`.

    Args:
        config: settings that an adapter may need.

    Raises:
        RecipeError: it does not exist, or its module cannot be imported.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    module_name, colon, attribute = name.partition(":")
    if module_name in ADAPTERS and colon:
        adapted: Factory = import_module(ADAPTERS[module_name]).factory(
            attribute, config or EnvsConfig(environment=name)
        )
        return adapted
    if not colon:
        fix = f"{nearest(name, ENVIRONMENTS)}; an environment of your own is named package.module:Class"
        raise RecipeError(f"there is no environment {name!r}", fix=fix, where=WHERE)
    module = import_user_module(module_name, f"environment {name!r}", "package.module:Class", WHERE)
    factory: Factory | None = getattr(module, attribute, None)
    if not callable(factory):
        have = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        fix = nearest(attribute, have) if have else ""
        raise RecipeError(f"{module_name} has no class or function {attribute!r}", fix=fix, where=WHERE)
    return factory


def environment_name(environment: str | Factory) -> str:
    """Return the name of an environment in metrics: that of its class or function, in small letters."""
    if not isinstance(environment, str):
        environment = str(getattr(environment, "__name__", type(environment).__name__))
    return metric_name(environment)


WHERE = "envs.environment"

ENVIRONMENTS: dict[str, Factory] = {"guess": Guess}

ADAPTERS = {"openenv": "covey.envs.openenv", "verifiers": "covey.envs.verifiers"}
"""Part of a name before the colon → module whose `factory(rest of the name, settings)` finds the environment. It is
imported when it is first used.
"""
