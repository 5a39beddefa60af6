"""Call a reward function: check what it needs, build its arguments and check its result.

A reward function is `fn(prompts, completions, **columns) -> list[float | None]`. One call scores many completions and
returns one number for each, or None for "not scored by this function". It receives only what its signature takes: the
data columns, repeated for each completion, and the entries of `ARGUMENTS`. It may be async. The result is checked,
because a wrong length, a NaN or a truncated integer would silently train the model on nonsense. Failures become an
`Outcome`, in the run's own process and in others alike; `runner` decides whether they end the run.
"""

import inspect
import itertools
import logging
import math
import numbers
import re
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from covey.config.schema import EvalConfig
from covey.display import printable, safe_format
from covey.errors import RecipeError, RewardError, nearest
from covey.rewards.registry import resolve
from covey.types import Completion, Group

if TYPE_CHECKING:  # imported where an array is made: to name a reward function needs no NumPy
    import numpy as np

log = logging.getLogger(__name__)

RewardFn = Callable[..., Any]
"""`fn(prompts, completions, **columns) -> list[float | None]`, or a coroutine function with this signature."""
RewardFns = Sequence[RewardFn | str] | RewardFn | str
"""Reward functions, or names of built-in ones, or a single one."""

Samples = Sequence[tuple[Group, Completion]]

ChatCompletion = Sequence[Mapping[str, str]]
"""A completion as chat messages, as TRL passes it: `[{"role": "assistant", "content": "..."}]`."""
Completions = Sequence[str | ChatCompletion]

RAISED, LOST, MALFORMED = "raised", "lost", "malformed"
"""Kinds of failure: the function raised, its process died or was killed, its result has the wrong shape or length."""

CHAT_ERRORS = ("string indices must be integers", "'str' object has no attribute 'get'")
"""Starts of the errors raised when text is read as a chat message, as TRL's conversational rewards do."""
CHAT_HINT = "completions are texts; for chat messages, as in c[0]['content'], take completion_messages in their place"

MAX_MESSAGE = 500
"""Maximum characters kept of an exception's message, which may quote model output."""


@dataclass(frozen=True)
class Failure:
    """Reason why a call returned no numbers.

    Attributes:
        what: the rest of a sentence that begins with the function's name.
        kind: RAISED, LOST or MALFORMED.
        where, want, fix: as in `CoveyError`.
        sample: index of the completion that caused it, where the result shows it.
        error: the exception, when it was raised in this process.
    """

    what: str
    kind: str
    where: str = ""
    want: str = ""
    fix: str = ""
    sample: int | None = None
    error: BaseException | None = field(default=None, compare=False)

    def is_like(self, other: "Failure") -> bool:
        """Tell whether both are the same mistake: the same kind, source line and exception."""
        exceptions = [failure.what.partition(":")[0] for failure in (self, other)]
        return (self.kind, self.where) == (other.kind, other.where) and exceptions[0] == exceptions[1]


@dataclass(frozen=True)
class Outcome:
    """Result of a reward call.

    Attributes:
        values: float64 [n], NaN for None and for invalid values; None when the call failed.
        invalid: completion index → its value as text, for each value that is not a finite number.
        failure: why there are no values.
        seconds: duration of the call.
    """

    values: "np.ndarray | None"
    invalid: Mapping[int, str] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0


def select_arguments(name: str, function: RewardFn, samples: Samples) -> dict[str, list[Any]]:
    """Return the arguments that the signature takes: those it names and, for `**columns`, all but `NAMED_ONLY`.

    Raises:
        RecipeError: the function has no signature.
        RewardError: it requires a parameter that no data column provides.
    """
    columns = dict.fromkeys(column for group, _ in samples for column in group.columns)
    return {key: _argument_values(key, samples) for key in argument_names(name, function, columns)}


def argument_names(name: str, function: RewardFn, columns: Iterable[str]) -> list[str]:
    """Return the names of the arguments that the signature takes from `ARGUMENTS` and the data's `columns`.

    Raises:
        RecipeError, RewardError: as for `select_arguments`.
    """
    columns = list(columns)
    parameters = check_parameters(name, function, columns)
    available = [*ARGUMENTS, *(column for column in columns if column not in ARGUMENTS)]
    names = [p.name for p in parameters if p.name in available]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names += [key for key in available if key not in NAMED_ONLY and key not in names]
    return names


def check_parameters(name: str, function: RewardFn, columns: Iterable[str]) -> list[inspect.Parameter]:
    """Return the parameters of a function, after checking that `ARGUMENTS` and the data's `columns` provide them.

    Raises:
        RecipeError: the function has no signature.
        RewardError: it requires a parameter that neither provides.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        raise RecipeError(
            f"{excerpt(function)} is no reward function", want="fn(prompts, completions, **columns)", where="rewards"
        ) from None
    available = {*ARGUMENTS, *columns}
    for p in parameters:
        by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if p.default is p.empty and (p.kind is p.POSITIONAL_ONLY or (by_name and p.name not in available)):
            raise RewardError(
                f"the reward function {name!r} asks for {p.name!r}, which no data column gives",
                want=f"columns of the data: {', '.join(sorted(columns)) or 'none'}; or {', '.join(ARGUMENTS)}",
                fix=nearest(p.name, available),
            )
    return parameters


def check_columns(reward_fns: RewardFns, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that each function gets the columns that it requires, before any completion is sampled.

    Raises:
        RewardError: it names the function, the missing column and the available columns.
    """
    columns = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    for column in filter(ARGUMENTS.__contains__, columns):
        _tell_hidden(column)
    functions = resolve_reward_fns(reward_fns)
    for name, function in zip(function_names(functions), functions, strict=True):
        check_parameters(name, function, columns)


@cache
def _tell_hidden(column: str) -> None:
    """Warn, once, of a column that no function can ask for."""
    log.warning(f"no reward function gets the data's column {column}: the argument of this name is another; rename it")


def check_evaluation_columns(config: EvalConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that the functions of the evaluation get the columns that they require; arguments as for `check_columns`.

    Raises:
        RewardError: it names the setting, the function, the missing column and the available columns.
    """
    for setting, name in config.judges.items():
        try:
            check_columns([name], rows)
        except RewardError as error:
            raise of_evaluation(error, setting) from None


def of_evaluation(error: RewardError, setting: str) -> RewardError:
    """Return the error about a function that `evaluation.<setting>` names, with that place."""
    where = f"evaluation.{setting}"
    fix = f"{error.fix}; or another function in {where}, or none: {where}="
    return RewardError(error.what, want=error.want, fix=fix, where=where)


def resolve_reward_fns(reward_fns: RewardFns) -> list[RewardFn]:
    """Return the functions of one or several functions and names of built-in ones.

    Raises:
        RewardError: there is no built-in function of a name.
    """
    several = [reward_fns] if callable(reward_fns) or isinstance(reward_fns, str) else reward_fns
    return [resolve(fn) if isinstance(fn, str) else fn for fn in several]


def no_reward_error() -> RecipeError:
    """Return the error for a run without any reward."""
    return RecipeError(
        "no reward function: nothing would be learnt",
        want="reward_fns= or reward_funcs=, an environment, or a reward model",
    )


def only_one(reward_fns: RewardFns | None, reward_funcs: RewardFns | None) -> RewardFns:
    """Return the functions that were given under one of two names.

    Raises:
        RecipeError: both names are used.
    """
    if reward_fns is not None and reward_funcs is not None:
        raise RecipeError("both reward_fns and reward_funcs are given", want="one: they are two names for the same")
    chosen = reward_funcs if reward_fns is None else reward_fns
    return () if chosen is None else chosen


def function_names(functions: Sequence[RewardFn]) -> list[str]:
    """Return a unique name for each function (`f`, `f_2`, ...), as used in metrics and samples."""
    own, names = [*map(_function_name, functions)], list[str]()
    for name in own:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        names.append(name if name not in names else next(n for n in numbered if n not in {*own, *names}))
    return names


def metric_name(name: str) -> str:
    """Return a name with letters, digits and underscores alone, whatever a user has called a function. Names of Covey's
    own beside those of functions have other characters.

    >>> metric_name("math/correct answer")
    'math_correct_answer'
    """
    return re.sub(r"\W", "_", name)


def _function_name(function: RewardFn) -> str:
    if isinstance(function, partial):
        return _function_name(function.func)
    return metric_name(str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "lambda"))


def call(function: RewardFn, arguments: Mapping[str, list[Any]], count: int) -> Outcome | Awaitable[Any]:
    """Call `function` on `count` completions; return its outcome, or the awaitable of an async function."""
    try:
        result = function(**arguments)
        return result if inspect.isawaitable(result) else check_result(result, count)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an exit or a panic in a reward must not end the run silently
        return from_exception(error)


async def await_outcome(result: Awaitable[Any], count: int) -> Outcome:
    """Await the result of an async function and return its outcome."""
    try:
        return check_result(await result, count)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return from_exception(error)


def check_result(result: Any, count: int) -> Outcome:
    """Check `result`, which a function returned for `count` completions; iterating over it may raise."""
    import numpy as np

    want = _wanted(count)
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable) or getattr(result, "ndim", 1) == 0:
        return _malformed(f"returned {excerpt(result)} for the whole batch", want, fix="return a list")
    if isinstance(result, (set, frozenset)):
        return _malformed(f"returned a {type(result).__name__}, which has no order", want, fix="return a list")
    values = list(result)
    if len(values) < count:
        return _malformed(f"returned {len(values)} values, none", want, sample=len(values))
    if len(values) > count:
        return _malformed(f"returned {len(values)} values", want)
    floats = [as_float(value) for value in values]
    invalid = {i: excerpt(value) for i, value in enumerate(values) if floats[i] is None}
    return Outcome(np.array([math.nan if n is None else n for n in floats], np.float64), invalid)


def as_float(value: Any) -> float | None:
    """Return `value` as a float, NaN for None and for a masked entry, or None when it is not a finite number.

    Scalars of NumPy and JAX are accepted.
    """
    try:
        if value is None:
            return math.nan
        if getattr(value, "ndim", 0) == 0 and hasattr(value, "item"):
            from numpy.ma import is_masked

            if is_masked(value):
                return math.nan
            value = value.item()
        number = float(value) if isinstance(value, numbers.Real) else math.inf
    except Exception:  # too large, or of a type whose every method raises
        return None
    return number if math.isfinite(number) else None


def from_exception(error: BaseException) -> Outcome:
    """Return the outcome of a function that raised `error`."""
    return Outcome(
        None,
        failure=Failure(
            describe(error),
            RAISED,
            where=_location(error),
            fix=CHAT_HINT if safe_format(error, str).startswith(CHAT_ERRORS) else "",
            error=error,
        ),
    )


def describe(error: BaseException, place: str = "") -> str:
    """Describe an exception of a user's function, as the rest of a sentence that begins with the function's name."""
    text = printable(safe_format(error, str)[:MAX_MESSAGE], keep="\n")
    return f"raised {type(error).__name__}{place}: {text}"


def format_error(name: str, outcome: Outcome, samples: Samples) -> RewardError:
    """Build the error about a call that failed, or about its first invalid value, which names the completion."""
    failure = outcome.failure
    if failure is None:
        first = min(outcome.invalid)
        failure = Failure(f"gave {outcome.invalid[first]}", MALFORMED, want=_wanted(len(samples)), sample=first)
    what, malformed = failure.what, failure.kind == MALFORMED
    if failure.sample is not None:
        sample = f"for sample {failure.sample + 1}: {excerpt(samples[failure.sample][1].text)}"
        what += f" {sample}" if malformed else f" ({sample})"
    elif not malformed:
        what += f" (for the batch of {len(samples)} that begins with {excerpt(samples[0][1].text)})"
    return RewardError(f"the reward function {name!r} {what}", want=failure.want, fix=failure.fix, where=failure.where)


def excerpt(value: Any) -> str:
    """Format `value` for a message: shortened, with control characters escaped."""
    text = safe_format(value if not isinstance(value, str) else value[:80])
    return text if len(text) <= 100 else text[:97] + "..."


def _wanted(count: int) -> str:
    return f"one finite number or None for each of the {count} completions"


def _malformed(what: str, want: str, fix: str = "", sample: int | None = None) -> Outcome:
    return Outcome(None, failure=Failure(what, MALFORMED, want=want, fix=fix, sample=sample))


def _location(error: BaseException) -> str:
    """Return file and line inside the reward function, or "" when the call itself failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f"{frames[0].filename}:{frames[0].lineno}" if frames else ""


def _argument_values(name: str, samples: Samples) -> list[Any]:
    """Build one entry per completion, a fresh copy for each function and completion, since functions may modify it.

    Entries of a column that a group lacks are None.
    """
    of = ARGUMENTS.get(name)
    return [of(group, completion) if of else deep_copy(group.columns.get(name)) for group, completion in samples]


def deep_copy(value: Any) -> Any:
    """Copy `value` as deeply as possible; objects that cannot be copied, such as locks or open files, are shared."""
    try:
        return deepcopy(value)
    except Exception:  # copy the containers around an object that cannot be copied
        if isinstance(value, Mapping):
            return {key: deep_copy(inner) for key, inner in value.items()}
        return type(value)(map(deep_copy, value)) if type(value) in (list, tuple) else value


ARGUMENTS: dict[str, Callable[[Group, Completion], Any]] = {
    "prompts": lambda group, completion: deep_copy(group.prompt),
    "prompt_ids": lambda group, completion: group.prompt_tokens.tolist(),
    "completions": lambda group, completion: completion.text,
    "completion_ids": lambda group, completion: completion.tokens.tolist(),
    "completion_messages": lambda group, completion: (
        [dict(message) for message in completion.episode.messages]
        if completion.episode
        else [{"role": "assistant", "content": completion.text}]
    ),
    "episode_rewards": lambda group, completion: completion.episode and completion.episode.reward,
}
"""Arguments available besides the data columns; a column of the same name does not replace one."""
NAMED_ONLY = {"prompt_ids", "completion_messages", "episode_rewards"}
"""Arguments that `**columns` leaves out; a function must name them."""


def text_of(completion: str | ChatCompletion) -> str:
    """Convert a completion, in any form in which a trainer passes it, to text: that of its last assistant message.

    >>> text_of([{"role": "assistant", "content": "#### 4"}])
    '#### 4'
    """
    if isinstance(completion, str):
        return completion
    turns = [message["content"] for message in completion if message.get("role", "assistant") == "assistant"]
    return turns[-1] if turns else ""


def texts(completions: Completions) -> list[str]:
    """Convert completions to texts, each by `text_of`."""
    return [text_of(completion) for completion in completions]
