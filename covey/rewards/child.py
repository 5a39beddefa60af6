"""Calls of reward functions, in the worker process that `workers` starts."""

import asyncio
import inspect
from functools import cache
from typing import Any

from covey.errors import CoveyError
from covey.rewards.call import await_outcome, call, outcome_to_json
from covey.rewards.registry import resolve

find_function = cache(resolve)
"""Return the function with a name; its module is imported once."""


def handle_job(job: dict[str, Any]) -> dict[str, Any]:
    """Import the function that `job` names and make the call that it describes, if any; return the outcome as JSON."""
    try:
        function = find_function(job["function"])
        return run_job(function, job) if "arguments" in job else {}
    except CoveyError as error:
        return {"refused": {"what": error.what, "want": error.want, "fix": error.fix, "where": error.where}}


def run_job(function: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Make the call that `job` describes and return its outcome as JSON."""
    outcome = call(function, job["arguments"], job["count"])
    if inspect.isawaitable(outcome):
        outcome = asyncio.run(await_outcome(outcome, job["count"]))
    return outcome_to_json(outcome)
