"""Runs reward functions over groups and checks every number that comes back.

A reward function is `fn(prompts, completions, **columns) -> list[float | None]`: one call for many samples, one number
for each, None for "not scored by this one". It is passed only what its signature takes: the data columns, repeated for
each sample, and what `ARGUMENTS` lists. It may be async; async functions run side by side. What comes back is checked,
because a wrong length, a NaN or a truncated integer would train the model on nonsense without a word.
"""

import importlib
import inspect
import math
import numbers
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from covey.errors import RecipeError, RewardError, nearest
from covey.rewards.arithmetic import arithmetic_answer, number_only
from covey.rewards.first_letter import first_letter, sentence, starts_with_letter
from covey.rewards.format import format_approximate, format_exact
from covey.rewards.gsm8k import answer_close, answer_number, answer_ratio, exact_answer, exact_answer_strict
from covey.types import Completion, Group

RewardFn = Callable[..., Any]
"""`fn(prompts, completions, **columns) -> list[float | None]`, or a coroutine function of that kind."""

Samples = Sequence[tuple[Group, Completion]]

SEARCH_SECONDS = 1.0
"""A function that raised sooner is called again with fewer samples, to tell which of them it was."""


def score(
    groups: Sequence[Group],
    reward_fns: Iterable[RewardFn | str] | RewardFn | str,
    weights: Sequence[float] | None = None,
) -> list[Group]:
    """The groups with `rewards` and `rewards_by_function` filled in.

    Args:
        groups: completions of any number of prompts; the functions see all of them in one call.
        reward_fns: functions, or names that `resolve` knows; one alone will do.
        weights: factor of each function in the total; all 1 when not given.

    Raises:
        RecipeError: no function, an unknown name, or weights that do not fit the functions.
        RewardError: a function that asks for a column that is not there, raises, or returns something else than one
            finite number or None for each completion.
    """
    several = [reward_fns] if isinstance(reward_fns, str) or callable(reward_fns) else reward_fns
    functions = [resolve(fn) if isinstance(fn, str) else fn for fn in several]
    factors = _checked_weights(weights, len(functions))
    if not groups:
        return []
    samples = [(group, completion) for group in groups for completion in group.completions]
    names = function_names(functions)
    results = _call_all(names, functions, samples)
    texts = [completion.text for _, completion in samples]
    table = np.array([_checked(name, r, texts) for name, r in zip(names, results, strict=True)])
    scored = ~np.isnan(table)
    totals = np.where(scored, table * factors[:, None], 0.0).sum(axis=0)
    totals[~scored.any(axis=0)] = np.nan
    return _split(groups, names, table, totals)


def function_names(functions: Sequence[RewardFn]) -> list[str]:
    """A name for each function, made unique: `f`, `f_2`, ...; metrics and samples use them."""
    names: list[str] = []
    for function in functions:
        name, number = _name(function), 2
        while name in names:
            name, number = f"{_name(function)}_{number}", number + 1
        names.append(name)
    return names


def resolve(name: str) -> RewardFn:
    """The reward function `name`: one of `REWARDS`, or `package.module:function`, looked for in the working folder too.

    Raises:
        RecipeError: there is none, or its module cannot be imported.
    """
    if name in REWARDS:
        return REWARDS[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        fix = f"{nearest(name, REWARDS)}; a function of your own is named package.module:function"
        raise RecipeError(f"there is no reward function {name!r}", fix=fix, where="rewards")
    module = _module(module_name, name)
    function = getattr(module, attribute, None)
    if not callable(function):
        have = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = f"{module_name} has no function {attribute!r}"
        raise RecipeError(what, fix=nearest(attribute, have) if have else "", where="rewards")
    return function


def _module(module_name: str, name: str) -> ModuleType:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        what = f"reward {name!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        fix = f"name a module that Python can import from {here}"
        raise RecipeError(what, want="package.module:function", fix=fix, where=_import_place(error)) from error
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _import_place(error: Exception) -> str:
    """The line of the user's module that failed; "rewards" when it was never reached."""
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
    return factors


def _call_all(names: Sequence[str], functions: Sequence[RewardFn], samples: Samples) -> list[Any]:
    """Each function's result. Coroutines get a thread of their own: in a notebook this one already runs a loop."""
    results: list[Any] = []
    try:
        for name, function in zip(names, functions, strict=True):
            results.append(_call(name, function, samples))
    except BaseException:
        for coroutine in filter(inspect.iscoroutine, results):
            coroutine.close()
        raise
    waiting = {i: _awaited(names[i], r, samples) for i, r in enumerate(results) if inspect.isawaitable(r)}
    if waiting:
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(_gathered, waiting.values()).result()
        for i, result in zip(waiting, done, strict=True):
            results[i] = result
    return results


def _gathered(waiting: Iterable[Awaitable[Any]]) -> list[Any]:
    import asyncio  # late: it would take a good part of the time in which the command answers a typo

    async def together() -> list[Any]:
        return await asyncio.gather(*waiting)

    return asyncio.run(together())


async def _awaited(name: str, result: Awaitable[Any], samples: Samples) -> Any:
    try:
        return await result
    except Exception as error:
        raise _raised(name, error, _batch(samples)) from error


def _call(name: str, function: RewardFn, samples: Samples) -> Any:
    arguments, start = _taken(name, function, samples), time.perf_counter()
    try:
        return _result(function, arguments)
    except Exception as error:
        quick = time.perf_counter() - start < SEARCH_SECONDS
        guilty = _first_guilty(name, function, samples, error) if quick else None
        at = _batch(samples) if guilty is None else f"sample {guilty}: {_excerpt(samples[guilty][1].text)}"
        raise _raised(name, error, at) from error


def _result(function: RewardFn, arguments: Mapping[str, list[Any]]) -> Any:
    result = function(**arguments)
    return list(result) if inspect.isgenerator(result) else result


def _first_guilty(name: str, function: RewardFn, samples: Samples, error: Exception) -> int | None:
    """The sample for which `function` raises the same even alone, found by halving; None when there is no such one."""
    low, high = 0, len(samples)
    while high - low > 1:
        middle = (low + high) // 2
        if _raises(name, function, samples, slice(low, middle), error):
            high = middle
        else:
            low = middle
    return low if _raises(name, function, samples, slice(low, high), error) else None


def _raises(name: str, function: RewardFn, samples: Samples, part: slice, error: Exception) -> bool:
    arguments = _taken(name, function, samples)
    try:
        result = _result(function, {key: values[part] for key, values in arguments.items()})
    except Exception as again:
        return type(again) is type(error) and _place(again) == _place(error)
    if inspect.iscoroutine(result):
        result.close()
    return False


def _raised(name: str, error: Exception, at: str) -> RewardError:
    what = f"the reward function {name!r} raised {type(error).__name__}: {error} (for {at})"
    return RewardError(what, where=_place(error))


def _place(error: Exception) -> str:
    """The line of the reward function; "" when the call itself failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f"{frames[0].filename}:{frames[0].lineno}" if frames else ""


def _batch(samples: Samples) -> str:
    return f"the batch of {len(samples)} that begins with {_excerpt(samples[0][1].text)}"


def _taken(name: str, function: RewardFn, samples: Samples) -> dict[str, list[Any]]:
    """The arguments that the signature takes: those it names, and under `**columns` all but `BY_NAME`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        what = f"{_excerpt(function)} is no reward function"
        raise RecipeError(what, want="fn(prompts, completions, **columns)", where="rewards") from None
    given = dict.fromkeys([*ARGUMENTS, *(column for group, _ in samples for column in group.columns)])
    for p in parameters:
        by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if p.default is p.empty and (p.kind is p.POSITIONAL_ONLY or (by_name and p.name not in given)):
            what = f"the reward function {name!r} asks for {p.name!r}, which no data column gives"
            want = "arguments passed by name: " + ", ".join(sorted(given))
            raise RewardError(what, want=want, fix=nearest(p.name, given))
    names = [p.name for p in parameters if p.name in given]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names += [key for key in given if key not in BY_NAME and key not in names]
    return {key: _argument(key, samples) for key in names}


def _argument(name: str, samples: Samples) -> list[Any]:
    """One entry a sample, made anew for each function, which may change its own; a column that a group lacks is None
    there.
    """
    of = ARGUMENTS.get(name, lambda group, completion: group.columns.get(name))
    return [of(group, completion) for group, completion in samples]


def _checked(name: str, result: Any, completions: Sequence[str]) -> np.ndarray:
    """float64 [B] out of whatever a function returned; NaN stands for None."""
    want = f"one finite number or None for each of the {len(completions)} completions"
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable) or getattr(result, "ndim", 1) == 0:
        what = f"the reward function {name!r} returned {_excerpt(result)} for the whole batch"
        raise RewardError(what, want=want, fix="return a list")
    values = list(result)
    if len(values) != len(completions):
        what = f"the reward function {name!r} returned {len(values)} values"
        if len(values) < len(completions):
            what += f", none for sample {len(values)}: {_excerpt(completions[len(values)])}"
        raise RewardError(what, want=want)
    checked = np.empty(len(values), dtype=np.float64)
    for i, value in enumerate(values):
        number = _number(value)
        if number is None:
            what = f"the reward function {name!r} gave {_excerpt(value)} for sample {i}: {_excerpt(completions[i])}"
            raise RewardError(what, want=want)
        checked[i] = number
    return checked


def _number(value: Any) -> float | None:
    """`value` as a float, NaN for None; None when it is no finite number. Scalars of NumPy and JAX count."""
    if value is None:
        return math.nan
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _excerpt(value: Any) -> str:
    text = repr(value if not isinstance(value, str) else value[:80])
    return text if len(text) <= 100 else text[:97] + "..."


def _split(groups: Sequence[Group], names: Sequence[str], table: np.ndarray, totals: np.ndarray) -> list[Group]:
    cuts = np.cumsum([len(group.completions) for group in groups])[:-1]
    parts = zip(groups, np.split(totals, cuts), np.split(table, cuts, axis=1), strict=True)
    return [
        replace(group, rewards=total, rewards_by_function=dict(zip(names, part, strict=True)))
        for group, total, part in parts
    ]


ARGUMENTS: dict[str, Callable[[Group, Completion], Any]] = {
    "prompts": lambda group, completion: group.prompt,
    "prompt_ids": lambda group, completion: group.prompt_tokens.tolist(),
    "completions": lambda group, completion: completion.text,
    "completion_ids": lambda group, completion: completion.tokens.tolist(),
    "completion_messages": lambda group, completion: [{"role": "assistant", "content": completion.text}],
}
"""What a function may ask for beside the data columns, which cannot stand in for these."""
BY_NAME = {"prompt_ids", "completion_messages"}
"""Those that `**columns` does not bring along."""
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
}
