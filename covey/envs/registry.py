"""The built-in environments by name, and environments of the user's modules by `module:Class`."""

from covey.envs.guess import Guess
from covey.envs.protocol import Factory
from covey.errors import RecipeError, nearest
from covey.rewards.registry import import_user_module


def resolve(name: str) -> Factory:
    """Return the factory of the environment `name`: a key of `ENVIRONMENTS`, or `package.module:Class`, also from the
    working folder.

    Raises:
        RecipeError: it does not exist, or its module cannot be imported.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    module_name, colon, attribute = name.partition(":")
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
    """Return the name of an environment in metrics: that of its class or function, in small letters.

    >>> environment_name("guess"), environment_name("games.words:Hangman")
    ('guess', 'hangman')
    """
    if not isinstance(environment, str):
        environment = str(getattr(environment, "__name__", type(environment).__name__))
    return environment.rpartition(":")[2].lower()


WHERE = "envs.environment"

ENVIRONMENTS: dict[str, Factory] = {"guess": Guess}
