"""Call a reward function: check what it needs, build its arguments and check its result.

A reward function is `fn(prompts, completions, **columns) -> list[float | None]`. One call scores many completions and
returns one number for each, or None for "not scored by this function". It receives only what its signature takes: the
data columns, repeated for each completion, and the entries of `ARGUMENTS`. It may be async. The result is checked,
because a wrong length, a NaN or a truncated integer would silently train the model on nonsense. Failures become an
`Outcome`, in the run's own process and in others alike; `scoring` decides whether they end the run.
"""

import inspect
import itertools
import logging
import math
import numbers
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from covey.config.schema import EvalConfig
from covey.display import printable, safe_format
from covey.errors import RecipeError, RewardError, nearest
from covey.exits import block_exit
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

RAISED, LOST, MALFORMED = "raised", "lost", "malformed"
"""Kinds of failure: the function raised, its process died or was killed, its result has the wrong shape or length."""

CHAT_ERRORS = ("string indices must be integers", "'str' object has no attribute 'get'")
"""Starts of the errors raised when text is read as a chat message, as TRL's conversational rewards do."""
CHAT_HINT = "completions are texts; for chat messages, as in c[0]['content'], take completion_messages in their place"

MAX_MESSAGE = 500
"""Maximum characters kept of an exception's message, which may quote model output."""


# --- functions and their names


class Reward:
    """A reward function.

    Attributes:
        name: its name in metrics and samples.
        function: the function.

    Raises:
        RecipeError: the function has no signature.
    """

    def __init__(self, name: str, function: RewardFn):
        self.name, self.function = name, function
        try:
            self._parameters = [*inspect.signature(function).parameters.values()]
        except (TypeError, ValueError):
            raise RecipeError(
                f"{excerpt(function)} is no reward function",
                want="fn(prompts, completions, **columns)",
                where="rewards",
            ) from None

    def argument_names(self, columns: Collection[str]) -> list[str]:
        """Return the arguments that the signature takes from `ARGUMENTS` and the data's `columns`: those it names and,
        for `**columns`, all but `NAMED_ONLY`.

        Raises:
            RewardError: it requires a parameter that neither provides.
        """
        available, names = dict.fromkeys([*ARGUMENTS, *columns]), dict[str, None]()
        for p in self._parameters:
            if p.name in available and p.kind is not p.POSITIONAL_ONLY:
                names[p.name] = None
            elif p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise RewardError(
                    f"the reward function {self.name!r} asks for {p.name!r}, which no data column gives",
                    want=f"columns of the data: {', '.join(sorted(columns)) or 'none'}; or {', '.join(ARGUMENTS)}",
                    fix=nearest(p.name, available),
                )
            if p.kind is p.VAR_KEYWORD:
                names |= dict.fromkeys(name for name in available if name not in NAMED_ONLY)
        return [*names]


def make_rewards(reward_fns: RewardFns) -> list[Reward]:
    """Return the functions with unique names.

    Raises:
        RecipeError: there is no function of a name, or it has no signature.
    """
    functions = resolve_reward_fns(reward_fns)
    return [*map(Reward, function_names(functions), functions)]


def resolve_reward_fns(reward_fns: RewardFns | None, reward_funcs: RewardFns | None = None) -> list[RewardFn]:
    """Return the functions of one or several functions and names of built-in ones, given under one of two names.

    Raises:
        RecipeError: both names are used, or there is no function of a name.
    """
    if reward_fns is not None and reward_funcs is not None:
        raise RecipeError("both reward_fns and reward_funcs are given", want="one: they are two names for the same")
    chosen = reward_funcs if reward_fns is None else reward_fns
    several = [chosen] if callable(chosen) or isinstance(chosen, str) else chosen
    return [resolve(fn) if isinstance(fn, str) else fn for fn in several or ()]


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


def environment_reward(name: str) -> RewardFn:
    """Return the reward function `environment` under the name of an environment, for metrics and samples."""

    def reward(episode_rewards: Sequence[float | None]) -> list[float | None]:
        return list(episode_rewards)

    reward.__name__ = name
    reward.in_process = True  # type: ignore[attr-defined]  # it only passes on what is here
    reward.is_needed = True  # type: ignore[attr-defined]  # without it an episode would count as if it had earned 0
    return reward


def check_columns(reward_fns: RewardFns, rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that each function gets the columns that it requires, before any completion is sampled.

    Raises:
        RewardError: it names the function, the missing column and the available columns.
    """
    columns = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    for column in filter(ARGUMENTS.__contains__, columns):
        _tell_hidden(column)
    for reward in make_rewards(reward_fns):
        reward.argument_names(columns)


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


# --- arguments


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


@dataclass(frozen=True)
class Job:
    """A function, the completions that it scores, and the names of its arguments."""

    reward: Reward
    samples: Samples
    names: Sequence[str]

    def arguments(self, part: Iterable[int]) -> dict[str, list[Any]]:
        """Return the arguments of a call for some of the completions: fresh copies, since functions may modify them.

        Entries of a column that a group lacks are None.
        """
        arguments: dict[str, list[Any]] = {name: [] for name in self.names}
        for group, completion in map(self.samples.__getitem__, part):
            for name, values in arguments.items():
                of = ARGUMENTS.get(name)
                values.append(of(group, completion) if of else deep_copy(group.columns.get(name)))
        return arguments


# --- a call in this process, and its result


class Failure(RewardError):  # noqa: N818
    """Reason why a call gave no values, or not all of them; its cause is the exception that the function raised.

    Args:
        what: the rest of a sentence that begins with the function's name.
        kind: RAISED, LOST or MALFORMED.
        sample: index of the completion that caused it, where the result shows it.
        more: `want`, `fix` and `where`, as in `CoveyError`.
    """

    def __init__(self, what: str, kind: str, sample: int | None = None, **more: str):
        super().__init__(what, **more)
        self.kind, self.sample = kind, sample

    def is_like(self, other: "Failure") -> bool:
        """Tell whether both are the same mistake: the same kind, source line and exception."""
        return (self.kind, self.where, self.what.partition(":")[0]) == (
            other.kind,
            other.where,
            other.what.partition(":")[0],
        )


@dataclass(frozen=True)
class Outcome:
    """Result of a reward call.

    Attributes:
        values: float64 [n], NaN for None and for invalid values; None when the call failed.
        failure: why there are no values, or why the first invalid value is none.
        invalid: indices of the completions whose value is not a finite number.
        seconds: duration of the call.
    """

    values: "np.ndarray | None"
    failure: Failure | None = None
    invalid: Sequence[int] = ()
    seconds: float = 0.0


Attempt = Callable[[Sequence[int]], Outcome]
"""Callable that calls a function on some of its completions, given by index."""
ApplyPolicy = Callable[[Job, Outcome, Attempt | None], "np.ndarray"]
"""Callable that makes the values of an outcome; it may call the function again for some completions."""


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


def await_together(waiting: Sequence[tuple[Awaitable[Any], int]]) -> list[Outcome]:
    """Await async functions concurrently, in a thread, as a notebook's own already runs a loop; return their outcomes.

    An exit in one of their tasks ends the event loop and becomes the outcome of all unfinished functions.

    Args:
        waiting: results of the functions, each with the number of its completions.
    """
    if not waiting:
        return []

    import asyncio  # imported late: it would noticeably delay the command's error about a typo

    outcomes: dict[int, Outcome] = {}

    async def settle(index: int, result: Awaitable[Any], count: int) -> None:
        outcomes[index] = await await_outcome(result, count)

    async def settle_all() -> None:
        await asyncio.gather(*(settle(index, *entry) for index, entry in enumerate(waiting)))

    def run() -> None:
        try:
            with block_exit():
                asyncio.run(settle_all())
        except SystemExit as error:  # the loop has cancelled the pending tasks
            for index in range(len(waiting)):
                failure = outcomes[index].failure if index in outcomes else None
                if index not in outcomes or (failure and isinstance(failure.__cause__, asyncio.CancelledError)):
                    outcomes[index] = from_exception(error)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()
    return [outcomes[index] for index in range(len(waiting))]


def call_here(job: Job, part: Sequence[int]) -> Outcome | Awaitable[Any]:
    """Call a function in this process on some of its completions; as `call`, but it cannot end the process."""
    arguments, start = job.arguments(part), time.perf_counter()
    with block_exit():
        outcome = call(job.reward.function, arguments, len(part))
    return replace(outcome, seconds=time.perf_counter() - start) if isinstance(outcome, Outcome) else outcome


def attempt_here(job: Job, part: Sequence[int]) -> Outcome:
    """Call a function in this process on some of its completions, and wait for it."""
    outcome = call_here(job, part)
    return outcome if isinstance(outcome, Outcome) else await_together([(outcome, len(part))])[0]


def run_here(jobs: Sequence[Job], apply_policy: ApplyPolicy) -> "dict[str, np.ndarray]":
    """Run functions in this process, the async ones together at the end; return the values by function."""
    values: dict[str, np.ndarray] = {}
    waiting = list[tuple[Job, Awaitable[Any]]]()
    with ExitStack() as on_error:
        for job in jobs:
            outcome = call_here(job, range(len(job.samples)))
            if isinstance(outcome, Outcome):
                values[job.reward.name] = apply_policy(job, outcome, partial(attempt_here, job))
            else:
                waiting.append((job, outcome))
                on_error.callback(getattr(outcome, "close", lambda: None))
        on_error.pop_all()
    outcomes = await_together([(result, len(job.samples)) for job, result in waiting])
    for (job, _), outcome in zip(waiting, outcomes, strict=True):
        values[job.reward.name] = apply_policy(job, outcome, None)
    return values


def check_result(result: Any, count: int) -> Outcome:
    """Check `result`, which a function returned for `count` completions; iterating over it may raise."""
    import numpy as np

    want = f"one finite number or None for each of the {count} completions"
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable) or getattr(result, "ndim", 1) == 0:
        return _malformed(f"returned {excerpt(result)} for the whole batch", want, fix="return a list")
    if isinstance(result, (set, frozenset)):
        return _malformed(f"returned a {type(result).__name__}, which has no order", want, fix="return a list")
    values = list(result)
    if len(values) < count:
        return _malformed(f"returned {len(values)} values, none", want, sample=len(values))
    if len(values) > count:
        return _malformed(f"returned {len(values)} values", want)
    floats = [*map(as_float, values)]
    invalid = [i for i, number in enumerate(floats) if number is None]
    failure = Failure(f"gave {excerpt(values[invalid[0]])}", MALFORMED, invalid[0], want=want) if invalid else None
    return Outcome(np.array(floats, np.float64), failure, invalid)  # NaN for None


def as_float(value: Any) -> float | None:
    """Return `value` as a float, NaN for None and for a masked entry, or None when it is not a finite number.

    Scalars of NumPy and JAX are accepted.
    """
    try:
        if getattr(value, "ndim", 0) == 0 and hasattr(value, "item"):
            from numpy.ma import is_masked

            value = None if is_masked(value) else value.item()
        if value is None:
            return math.nan
        number = float(value) if isinstance(value, numbers.Real) else math.inf
    except Exception:  # too large, or of a type whose every method raises
        return None
    return number if math.isfinite(number) else None


def from_exception(error: BaseException) -> Outcome:
    """Return the outcome of a function that raised `error`."""
    fix = CHAT_HINT if safe_format(error, str).startswith(CHAT_ERRORS) else ""
    failure = Failure(describe(error), RAISED, where=_location(error), fix=fix)
    failure.__cause__ = error
    return Outcome(None, failure)


def describe(error: BaseException, place: str = "") -> str:
    """Describe an exception of a user's function, as the rest of a sentence that begins with the function's name."""
    text = printable(safe_format(error, str)[:MAX_MESSAGE], keep="\n")
    return f"raised {type(error).__name__}{place}: {text}"


def format_error(name: str, failure: Failure, samples: Samples) -> RewardError:
    """Build the error about a failure, which names the function and the completion."""
    what = f"the reward function {name!r} {failure.what}"
    if failure.sample is not None:
        sample = f"for sample {failure.sample + 1}: {excerpt(samples[failure.sample][1].text)}"
        what += f" {sample}" if failure.kind == MALFORMED else f" ({sample})"
    elif failure.kind != MALFORMED:
        what += f" (for the batch of {len(samples)} that begins with {excerpt(samples[0][1].text)})"
    return RewardError(what, want=failure.want, fix=failure.fix, where=failure.where)


def excerpt(value: Any) -> str:
    """Format `value` for a message: shortened, with control characters escaped."""
    text = safe_format(value if not isinstance(value, str) else value[:80])
    return text if len(text) <= 100 else text[:97] + "..."


def _malformed(what: str, want: str, fix: str = "", sample: int | None = None) -> Outcome:
    return Outcome(None, Failure(what, MALFORMED, sample, want=want, fix=fix))


def _location(error: BaseException) -> str:
    """Return file and line inside the reward function, or "" when the call itself failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f"{frames[0].filename}:{frames[0].lineno}" if frames else ""
