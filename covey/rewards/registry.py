"""The built-in reward functions by name, and functions of the user's modules by `module:function`."""

import importlib
import os
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from covey.errors import RecipeError, nearest
from covey.extras import install_command
from covey.rewards.arithmetic import arithmetic_answer, number_only
from covey.rewards.call import RewardFn, safe_format
from covey.rewards.episode import environment
from covey.rewards.exits import block_exit
from covey.rewards.first_letter import first_letter, sentence, starts_with_letter
from covey.rewards.format import format_approximate, format_exact
from covey.rewards.gsm8k import answer_close, answer_number, answer_ratio, exact_answer, exact_answer_strict
from covey.rewards.math_answers import math_verify


def resolve(name: str) -> RewardFn:
    """Return the reward function `name`: one of `REWARDS`, or `package.module:function`, also from the working folder.

    Raises:
        RecipeError: it does not exist, or its module or a package that it needs cannot be imported.
    """
    if name in REWARDS:
        _check_package(name)
        return REWARDS[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        fix = f"{nearest(name, REWARDS)}; a function of your own is named package.module:function"
        if Path(f"{name}.py").is_file():
            fix = f"{name}:FUNCTION, with the name of a function in {name}.py"
        raise RecipeError(f"there is no reward function {name!r}", fix=fix, where="rewards")
    module = import_user_module(module_name, f"reward {name!r}", "package.module:function", "rewards")
    function: RewardFn | None = getattr(module, attribute, None)
    if not callable(function):
        have = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = f"{module_name} has no function {attribute!r}"
        raise RecipeError(what, fix=nearest(attribute, have) if have else "", where="rewards")
    return function


def _check_package(name: str) -> None:
    module, extra = PACKAGES.get(name, ("covey", ""))
    if find_spec(module) is None:
        what = f"the reward function {name!r} needs the package {module.replace('_', '-')}"
        raise RecipeError(what, fix=install_command(extra), where="rewards")


def import_user_module(module_name: str, what: str, want: str, where: str) -> ModuleType:
    """Import a module of the user's, also from the working folder.

    Args:
        module_name: dotted name of the module.
        what: what is looked for in it, at the beginning of the error.
        want: form of the name that leads to it.
        where: recipe key in the error, where no place in the module is known.

    Raises:
        RecipeError: it cannot be imported.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with block_exit():
            return importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # including scripts that exit when they are imported
        what = f"{what}: importing {module_name!r} failed: {type(error).__name__}: {safe_format(error, str)}"
        fix = _import_fix(error, module_name, here)
        raise RecipeError(what, want=want, fix=fix, where=_import_location(error) or where) from error
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _import_fix(error: BaseException, module_name: str, here: str) -> str:
    """Return how to make the import of `module_name` succeed after it raised `error`."""
    if isinstance(error, SyntaxError):
        return f"correct line {error.lineno} of {Path(str(error.filename)).name}"
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"correct {module_name}: it raises while it is imported"
    package = error.name.partition(".")[0]
    if package == module_name.partition(".")[0]:
        return f"name a module that Python can import from {here}"
    return f"pip install {package}, or the package of another name that brings this module"


def _import_location(error: BaseException) -> str:
    """Return file and line in the user's module that failed, or "" when it was never reached."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


REWARDS: dict[str, RewardFn] = {
    "environment": environment,
    "first_letter": first_letter,
    "sentence": sentence,
    "starts_with_letter": starts_with_letter,
    "arithmetic_answer": arithmetic_answer,
    "number_only": number_only,
    "format_exact": format_exact,
    "format_approximate": format_approximate,
    "answer_ratio": answer_ratio,
    "answer_number": answer_number,
    "answer_close": answer_close,
    "exact_answer": exact_answer,
    "exact_answer_strict": exact_answer_strict,
    "math_verify": math_verify,
}

PACKAGES = {"math_verify": ("math_verify", "math")}
"""Reward → module that it needs, and the extra that installs it."""
