"""Score groups: call the reward functions, weight their values and assign them to the groups.

`call` defines what a function receives and may return; `sandbox.runner` handles its failures.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from covey.errors import RecipeError, nearest
from covey.extras import install
from covey.rewards import exits
from covey.rewards.arithmetic import arithmetic_answer, number_only
from covey.rewards.call import RewardFn, asked, in_words
from covey.rewards.first_letter import first_letter, sentence, starts_with_letter
from covey.rewards.format import format_approximate, format_exact
from covey.rewards.gsm8k import answer_close, answer_number, answer_ratio, exact_answer, exact_answer_strict
from covey.rewards.math_answers import math_verify
from covey.rewards.sandbox.runner import RewardRunner
from covey.types import Group


def score(
    groups: Sequence[Group],
    reward_fns: Iterable[RewardFn | str] | RewardFn | str,
    weights: Sequence[float] | None = None,
    runner: RewardRunner | None = None,
    failed: MutableMapping[str, int] | None = None,
) -> list[Group]:
    """Return the groups with `rewards` and `rewards_by_function` filled in.

    Args:
        groups: completions of any number of prompts; the functions see all of them in one call.
        reward_fns: one or more functions, or names that `resolve` accepts.
        weights: factor of each function in the total; all 1 by default. A function of weight 0 is called and
            listed, but affects neither the sum nor whether a completion counts as scored.
        runner: decides where functions run and how failures are handled; by default in this process, raising an error.
        failed: receives the number of failures that the runner tolerated, by function.

    Raises:
        RecipeError: no function, an unknown name, or weights that do not fit the functions.
        RewardError: a function requires a missing column, raises, or returns anything but one finite number or None
            for each completion, and the runner has no other policy for it.
    """
    several = [reward_fns] if isinstance(reward_fns, str) or callable(reward_fns) else reward_fns
    functions = [resolve(fn) if isinstance(fn, str) else fn for fn in several]
    factors = _checked_weights(weights, len(functions))
    if not groups:
        return []
    samples = [(group, completion) for group in groups for completion in group.completions]
    names = function_names(functions)
    called = runner or RewardRunner()
    table = called.run(dict(zip(names, functions, strict=True)), samples, failed)
    scored = ~np.isnan(table) & (factors != 0)[:, None]
    totals = np.where(scored, table * factors[:, None], 0.0).sum(axis=0)
    totals[~scored.any(axis=0)] = np.nan
    return _split(groups, names, table, totals)


def check_columns(reward_fns: Iterable[RewardFn | str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse functions that require a column that no row has, before any completion is sampled.

    Raises:
        RewardError: it names the function, the missing column and the available columns.
    """
    columns = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    functions = [resolve(fn) if isinstance(fn, str) else fn for fn in reward_fns]
    for name, function in zip(function_names(functions), functions, strict=True):
        asked(name, function, columns)


def function_names(functions: Sequence[RewardFn]) -> list[str]:
    """Return a unique name for each function (`f`, `f_2`, ...), as used in metrics and samples."""
    names: list[str] = []
    for function in functions:
        name, number = _name(function), 2
        while name in names:
            name, number = f"{_name(function)}_{number}", number + 1
        names.append(name)
    return names


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
        raise RecipeError(f"there is no reward function {name!r}", fix=fix, where="rewards")
    module = _module(module_name, name)
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
        raise RecipeError(what, fix=install(extra), where="rewards")


def _module(module_name: str, name: str) -> ModuleType:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with exits.refused():
            return importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # including scripts that exit when they are imported
        what = f"reward {name!r}: importing {module_name!r} failed: {type(error).__name__}: {in_words(error, str)}"
        fix = f"name a module that Python can import from {here}"
        raise RecipeError(what, want="package.module:function", fix=fix, where=_import_place(error)) from error
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _import_place(error: BaseException) -> str:
    """Return file and line in the user's module that failed, or "rewards" when it was never reached."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "rewards"


def _name(function: RewardFn) -> str:
    if isinstance(function, partial):
        return _name(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name


def _checked_weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    if not count:
        raise RecipeError("no reward function", want="at least one", fix="name one in rewards", where="rewards")
    factors = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
    if factors.shape != (count,) or not np.isfinite(factors).all():
        what = f"the weights {factors.tolist()} for {count} reward functions"
        raise RecipeError(
            what, want=f"{count} finite numbers", fix="one for each function", where="grpo.reward_weights"
        )
    if not factors.any():
        what = "the reward weights are all 0: no answer would be scored"
        raise RecipeError(what, want="one that is not 0", where="grpo.reward_weights")
    return factors


def _split(groups: Sequence[Group], names: Sequence[str], table: np.ndarray, totals: np.ndarray) -> list[Group]:
    cuts = np.cumsum([len(group.completions) for group in groups])[:-1]
    parts = zip(groups, np.split(totals, cuts), np.split(table, cuts, axis=1), strict=True)
    return [
        replace(group, rewards=total, rewards_by_function=dict(zip(names, part, strict=True)))
        for group, total, part in parts
    ]


REWARDS: dict[str, RewardFn] = {
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
