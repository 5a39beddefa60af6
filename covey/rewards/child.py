"""Calls of reward functions, in the worker process that `workers` starts."""

import asyncio
import inspect
from functools import cache
from typing import Any

from covey.errors import CoveyError
from covey.rewards.call import RewardFn, await_outcome, call, outcome_to_json
from covey.rewards.registry import resolve

find_function = cache(resolve)
"""Find the function of a name; its module is imported once."""


def handle_job(job: dict[str, Any]) -> dict[str, Any]:
    """Import the function of a job and, if the job has arguments, call it; return the outcome as JSON."""
    try:
        function = find_function(job["function"])
        return call_function(function, job["arguments"], job["count"]) if "arguments" in job else {}
    except CoveyError as error:
        return {"refused": {"what": error.what, "want": error.want, "fix": error.fix, "where": error.where}}


def call_function(function: RewardFn, arguments: dict[str, list[Any]], count: int) -> dict[str, Any]:
    """Call a function, which may be async, and return its outcome as JSON."""
    outcome = call(function, arguments, count)
    if inspect.isawaitable(outcome):
        outcome = asyncio.run(await_outcome(outcome, count))
    return outcome_to_json(outcome)
