"""Names of the reward functions of a run, and the columns that they need. This module imports no NumPy."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from covey.config.schema import EvalConfig
from covey.errors import RewardError
from covey.rewards.call import RewardFn, check_parameters
from covey.rewards.registry import resolve


def check_columns(reward_fns: Iterable[RewardFn | str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse functions that require a column that no row has, before any completion is sampled.

    Raises:
        RewardError: it names the function, the missing column and the available columns.
    """
    columns = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    functions = [resolve(fn) if isinstance(fn, str) else fn for fn in reward_fns]
    for name, function in zip(function_names(functions), functions, strict=True):
        check_parameters(name, function, columns)


def check_evaluation_columns(config: EvalConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse functions of the evaluation that require a column that no row has; arguments as for `check_columns`.

    Raises:
        RewardError: it names the setting, the function, the missing column and the available columns.
    """
    for setting in ("accuracy", "partial", "format"):
        if name := getattr(config, setting):
            try:
                check_columns([name], rows)
            except RewardError as error:
                where = f"evaluation.{setting}"
                fix = f"{error.fix}; or another function in {where}, or none: {where}="
                raise RewardError(error.what, want=error.want, fix=fix, where=where) from None


def function_names(functions: Sequence[RewardFn]) -> list[str]:
    """Return a unique name for each function (`f`, `f_2`, ...), as used in metrics and samples."""
    names: list[str] = []
    for function in functions:
        name, number = _function_name(function), 2
        while name in names:
            name, number = f"{_function_name(function)}_{number}", number + 1
        names.append(name)
    return names


def _function_name(function: RewardFn) -> str:
    if isinstance(function, partial):
        return _function_name(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name
