"""Worker processes, which isolate the run from what a reward function does.

A worker is started when it is first needed. When it takes too long, dies or returns an invalid message, it is killed
with every process it has started, and the next call starts another. Messages both ways are JSON: a function is named by
its module, never sent, and nothing is unpickled.
"""

import asyncio
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from covey.config.schema import RewardSafetyConfig
from covey.errors import CoveyError, RecipeError, RewardError
from covey.rewards.call import (
    LOST,
    ApplyPolicy,
    Failure,
    Job,
    Outcome,
    RewardFn,
    await_outcome,
    call,
    check_result,
    excerpt,
)
from covey.rewards.registry import resolve
from covey_sandbox.child import Cancelled, Child, ReplyError

HANDLER = "covey_sandbox.reward_workers:handle_job"
"""Function that the worker process calls."""
START_SECONDS = 300.0
"""Maximum time for starting a worker and importing a function's module; `timeout` does not include it."""


def import_path(name: str, function: RewardFn) -> str:
    """Find the `module:function` by which a worker imports `function`.

    Raises:
        RecipeError: it has none, because it was defined inside a function or in a script.
    """
    inner = function.func if isinstance(function, partial) else function
    home = getattr(inner, "__module__", None) or type(inner).__module__
    module = None if home == "__main__" else sys.modules.get(home)
    for attribute, value in list(vars(module).items()) if module else ():
        if value is function:
            return f"{home}:{attribute}"
    raise RecipeError(
        f"the reward function {name!r} cannot be called in a worker process, which would not find it",
        want="a function at the top of a module that can be imported, not a lambda, a local one or one of a script",
        fix=f"put it into a file of its own; or workers 0; or {name}.in_process = True, to call just this one here",
        where="reward_safety.workers",
    )


def to_json_values(name: str, arguments: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Convert arguments to JSON-serializable values: arrays and tuples become lists.

    Raises:
        RewardError: a column holds values of another type; the error names it.
    """
    converted = {}
    for column, values in arguments.items():
        try:
            converted[column] = _json_value(values)
        except (TypeError, RecursionError) as error:
            raise RewardError(
                f"the reward function {name!r} cannot get {column!r} in a worker process: it holds {error}",
                want="text, numbers, true, false, null, and lists and mappings (by text) of those; arrays become lists",
                fix=f"leave {column!r} out of the function's arguments, or reward_safety.workers 0",
            ) from None
    return converted


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return _json_value(value.tolist())
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a mapping with the key {excerpt(odd[0])}")
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    raise TypeError(f"{excerpt(value)} ({type(value).__name__})")


find_function = cache(resolve)
"""Find the function of a name; its module is imported once."""


def handle_job(job: dict[str, Any]) -> dict[str, Any]:
    """Import the function of a job and, if the job has arguments, call it; return the outcome as JSON."""
    try:
        function = find_function(job["function"])
    except CoveyError as error:
        return {"refused": {"what": error.what, "want": error.want, "fix": error.fix, "where": error.where}}
    if "arguments" not in job:
        return {}
    outcome = call(function, job["arguments"], job["count"])
    if inspect.isawaitable(outcome):
        outcome = asyncio.run(await_outcome(outcome, job["count"]))
    return outcome_to_json(outcome)


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON-serializable values."""
    values = None if outcome.values is None else [None if math.isnan(v) else v for v in outcome.values.tolist()]
    return {"values": values, "invalid": list(outcome.invalid), "failure": outcome.failure and vars(outcome.failure)}


def outcome_from_json(message: Mapping[str, Any], count: int) -> Outcome:
    """Return the outcome that a worker sent. Workers are not trusted: it is checked like any function's result."""
    if (failure := message.get("failure")) is not None:
        sample = next((index for index in range(count) if index == failure["sample"]), None)
        texts = {name: str(failure[name]) for name in ("what", "kind", "where", "want", "fix")}
        failure = Failure(**texts, sample=sample)
        if message.get("values") is None:
            return Outcome(None, failure)
    outcome, sent = check_result(message.get("values"), count), {*message.get("invalid", ())}
    invalid = [index for index in range(count) if index in sent or index in outcome.invalid]
    return replace(outcome, failure=failure or outcome.failure, invalid=invalid)


class RewardWorkers:
    """The workers of a run; `RewardRunner` gives them the functions that are not called in its own process.

    It is thread-safe. `check` raises an error about a function that no worker could import.

    Attributes:
        workers: as many as `safety` names; a process starts at the first call.
    """

    def __init__(self, safety: RewardSafetyConfig):
        self.workers = [Worker() for _ in range(safety.workers)]
        self._timeout = safety.timeout
        self._assigned: dict[str, Worker] = {}
        self._lock = threading.Lock()

    check = staticmethod(import_path)

    def run(
        self,
        jobs: Sequence[Job],
        apply_policy: ApplyPolicy,
        run_here: Callable[[], dict[str, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """Run functions in their workers, and `run_here` in this thread meanwhile; return the values by function.

        Args:
            jobs: functions with their arguments.
            apply_policy: makes the values of an outcome; it may call the function again for some completions.
            run_here: returns the values of other functions.
        """
        cancelled = threading.Event()
        with ThreadPoolExecutor(len(jobs)) as threads:
            futures = {
                job.reward.name: threads.submit(self._run, job, self._worker_of(job), apply_policy, cancelled)
                for job in jobs
            }
            try:
                values = run_here()
                for name, future in futures.items():  # in order: of several errors the same one is always raised
                    values[name] = future.result()
            except BaseException:
                cancelled.set()
                raise
        return values

    def close(self) -> None:
        """End the processes. They also end with this object and with the run."""
        for worker in self.workers:
            worker.close()

    def _worker_of(self, job: Job) -> "Worker":
        """Return the function's worker, always the same one, so that state kept between calls is available there."""
        with self._lock:
            return self._assigned.setdefault(job.reward.name, self.workers[len(self._assigned) % len(self.workers)])

    def _run(
        self,
        job: Job,
        worker: "Worker",
        apply_policy: ApplyPolicy,
        cancelled: threading.Event,
    ) -> np.ndarray:
        name, path = job.reward.name, import_path(job.reward.name, job.reward.function)

        def attempt(part: Sequence[int]) -> Outcome:
            return worker.call(path, to_json_values(name, job.arguments(part)), len(part), self._timeout, cancelled)

        return apply_policy(job, attempt(range(len(job.samples))), attempt)


class Worker:
    """A process that calls reward functions, one call at a time; it is restarted after a failure.

    It is thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child = Child(HANDLER, {"JAX_PLATFORMS": "cpu"}, kept=True)  # the run holds the devices
        self._loaded: set[str] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Id of the process group, which is also the session; None while no process runs."""
        return self._child.pid

    def call(
        self,
        path: str,
        arguments: Mapping[str, list[Any]],
        count: int,
        timeout: float,
        cancelled: threading.Event,
    ) -> Outcome:
        """Call the function at `path` on `count` completions and return the outcome.

        Args:
            path: `module:function`.
            arguments: JSON-serializable values.
            timeout: seconds; 0 means no limit.
            cancelled: set when the outcome is no longer needed.

        Raises:
            RecipeError: the worker cannot import the function.
            Cancelled: `cancelled` was set and the worker killed, or the worker was closed.
        """
        with self._lock:
            if self._closed or cancelled.is_set():
                raise Cancelled("the workers are closed" if self._closed else "")
            try:
                self._load(path, cancelled)
                start = time.monotonic()
                job = {"function": path, "arguments": arguments, "count": count}
                outcome = self._outcome(self._request(job, timeout or None, cancelled), count)
                return replace(outcome, seconds=time.monotonic() - start)
            except TimeoutError as error:
                failure = Failure(f"took {error} and was killed", LOST, fix="a longer reward_safety.timeout")
            except ChildProcessError as error:
                failure = Failure(f"ended its worker process ({error})", LOST)
            except ReplyError as error:
                failure = Failure(f"had its worker answer nonsense: {excerpt(error.args[0])}", LOST)
            return Outcome(None, failure)

    def close(self) -> None:
        """Kill the process and every process it has started; a call in another thread is aborted."""
        self._closed = True
        with self._lock:
            self._child.end()

    def _load(self, path: str, cancelled: threading.Event) -> None:
        if self._child.pid is None:
            self._loaded.clear()
        if path not in self._loaded:
            reply = self._request({"function": path}, START_SECONDS, cancelled)
            if "refused" in reply:
                raise RecipeError(**reply["refused"])
            self._loaded.add(path)

    def _request(self, job: Mapping[str, Any], seconds: float | None, cancelled: threading.Event) -> dict[str, Any]:
        return self._child.call(job, seconds, lambda: self._closed or cancelled.is_set())

    def _outcome(self, reply: Mapping[str, Any], count: int) -> Outcome:
        try:
            return outcome_from_json(reply, count)
        except (ValueError, TypeError, AttributeError, KeyError):
            self._child.end()
            raise ReplyError(reply) from None
