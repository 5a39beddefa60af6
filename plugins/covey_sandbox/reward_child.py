"""The worker's side of a call: import a reward function, call it, and send its outcome as JSON."""

import asyncio
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from covey.errors import CoveyError
from covey.rewards.call import Failure, Outcome, RewardFn, await_outcome, call, check_result
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


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON-serializable values."""
    values = None if outcome.values is None else [None if math.isnan(v) else v for v in outcome.values.tolist()]
    failure = outcome.failure and {k: v for k, v in vars(outcome.failure).items() if k != "error"}
    return {"values": values, "invalid": {str(i): text for i, text in outcome.invalid.items()}, "failure": failure}


def outcome_from_json(message: Mapping[str, Any], count: int) -> Outcome:
    """Return the outcome that a worker sent. Workers are not trusted: it is checked like any function's result."""
    if (failure := message.get("failure")) is not None:
        what, kind, where, want, fix = (str(failure[key]) for key in ("what", "kind", "where", "want", "fix"))
        sample = failure["sample"] if failure["sample"] in range(count) else None
        return Outcome(None, failure=Failure(what, kind, where, want, fix, sample))
    outcome = check_result(message.get("values"), count)
    invalid = {int(i): str(text) for i, text in message.get("invalid", {}).items() if int(i) < count}
    return replace(outcome, invalid={**invalid, **outcome.invalid})
