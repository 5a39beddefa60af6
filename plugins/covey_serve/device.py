"""The thread that owns the device: it steps the engines, and does other work between their steps.

    handlers of requests ─▶ open(stream), run(job) ─▶ queue ─▶ device thread ─▶ events of the stream ─▶ handlers

Adapters of several clients are side by side in one engine, as far as there is room, and each request samples with its
own. An engine for whole weights has one set of them at a time: requests for others wait until its batch has ended; then
the weights of the oldest waiting request come, and all that wait for these weights enter together.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from covey.config.schema import LoRAConfig
from covey.errors import CoveyError
from covey.rl.rollout_worker import RolloutWorker
from covey.sampling.engine import Finished, Request
from covey.sampling.scheduler import power_of_two
from covey.sampling.sequence import SampledTokens
from covey.types import Completion
from covey_serve.adapters import BLOCK, Place, RowRunner, write

T = TypeVar("T")

COLUMNS = 64
"""Sum of the ranks of adapters that are side by side, each rounded up to blocks, unless one alone has a larger rank."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights to sample with.

    Attributes:
        rank: rank of the adapters; 0 for none.
        adapters: state of the adapters; for rank 0 all weights, or None for those of the model as it was loaded.

    Raises:
        CoveyError: a number of the adapters is not finite, which would spoil the rows of other adapters.
    """

    rank: int = 0
    adapters: Any = None

    @property
    def columns(self) -> int:
        """Number of columns of their engine."""
        return max(COLUMNS, power_of_two(self.rank)) if self.rank else 0

    def __post_init__(self) -> None:
        if self.rank and not all(np.isfinite(x).all() for x in jax.tree.leaves(self.adapters)):
            raise CoveyError("the adapters have numbers that are not finite", want="a state from before")


class Event(NamedTuple):
    """News of a stream.

    Attributes:
        prompt: number of the request among those of the stream.
        number: number of the sample.
        drawn: its tokens so far; a live stream gets them after each step.
        completion: the completion, once it has ended.
    """

    prompt: int
    number: int
    drawn: SampledTokens
    completion: Completion | None = None


@dataclass(eq=False)
class Stream:
    """Requests to an engine, and what comes of them.

    Attributes:
        requests: the requests.
        weights: weights that sample.
        live: whether tokens are sent while they are drawn.
        events: news, or the exception that ended the stream. It is read in the event loop that made the stream.
    """

    requests: Sequence[Request]
    weights: Weights
    live: bool = False
    events: "asyncio.Queue[Event | Exception]" = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)

    def send(self, event: Event | Exception) -> None:
        """Send news from the device thread."""
        with suppress(RuntimeError):  # the event loop is closed: nobody reads
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Lane:
    """An engine with the streams that it serves.

    Args:
        worker: the model of the engine, and its weights.

    Attributes:
        waiting: streams whose requests are not in the engine yet.
        places: place in its stream of each request in the engine, by the request's id.
    """

    def __init__(self, worker: RolloutWorker):
        self.worker, self.engine, self._base = worker, worker.engine, worker.params
        self.engine.scheduler.prefills_alone = True
        self.waiting = deque[Stream]()
        self.places: dict[int, tuple[Stream, int]] = {}
        self.weights: Weights | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a stream is not finished."""
        return bool(self.waiting or self.places)

    def step(self) -> None:
        """Let streams enter, run one step of the engine, and send what it drew. An engine that fails loses its
        requests: their streams get the exception.
        """
        try:
            self._enter()
            finished = self.engine.step() if self.engine.unfinished else []
        except Exception as error:
            streams = {stream for stream, _ in self.places.values()}
            self.engine.reset()
            self.places.clear()
            for stream in streams:
                stream.send(error)
            return
        for ended in finished:
            self._finish(ended)
        for number in {ended.request for ended in finished} - self.engine.sequences.keys():
            self.places.pop(number, None)
        self._send_progress()

    def close(self, stream: Stream) -> None:
        """Cancel what is left of a stream."""
        with suppress(ValueError):
            self.waiting.remove(stream)
        for number in [number for number, (owner, _) in self.places.items() if owner is stream]:
            del self.places[number]
            if number in self.engine.sequences:
                self.engine.cancel(number)

    def _enter(self) -> None:
        """Put the requests of streams into the engine; see the docstring of the module."""
        if not self.waiting:
            return
        if not self.engine.unfinished and self.weights is not self.waiting[0].weights:
            self._load(self.waiting[0].weights)
        elif self.engine.unfinished and any(stream.weights is not self.weights for stream in self.waiting):
            return
        entering = [stream for stream in self.waiting if stream.weights is self.weights]
        # Equal prompts one after the other are prefilled once.
        for stream in sorted(entering, key=lambda stream: stream.requests[0].prompt.tobytes()):
            self.waiting.remove(stream)
            self._add(stream)

    def _load(self, weights: Weights) -> None:
        self.weights = None
        self.worker.update_params(self._base if weights.adapters is None else weights.adapters)
        self.engine.update_weights(self.worker.sampling_params(), self.worker.version)
        self.weights = weights

    def _add(self, stream: Stream) -> None:
        """Add the requests of a stream; if one is refused, all are."""
        try:
            for number, request in enumerate(stream.requests):
                self.places[self.engine.add(request)] = stream, number
        except CoveyError as error:
            self.close(stream)
            stream.send(error)

    def _finish(self, ended: Finished) -> None:
        """Send a completion."""
        place, completion = self.places[ended.request], ended.completion
        drawn = SampledTokens(completion.tokens, completion.logps, completion.sampler_logps)
        place[0].send(Event(place[1], ended.number, drawn, completion))

    def _send_progress(self) -> None:
        for request, (stream, prompt) in self.places.items():
            for number, one in self.engine.sequences.get(request, {}).items() if stream.live else ():
                if stream.sent.get((prompt, number), 0) < len(one.tokens):
                    stream.sent[prompt, number] = len(one.tokens)
                    stream.send(Event(prompt, number, one.drawn))


class AdapterLane(Lane):
    """An engine in which the adapters of several streams are side by side.

    Args:
        worker: worker of a model `with_columns`.
        columns: number of columns.

    Attributes:
        starts: first column of the adapters that are there.
    """

    def __init__(self, worker: RolloutWorker, columns: int):
        super().__init__(worker)
        self.columns, self.starts = columns, dict[Weights, int]()
        self.engine.update_weights(worker.sampling_params())
        self.engine.runner = RowRunner(self.engine, lambda request: self._place(self.places[request][0].weights))

    def _place(self, weights: Weights) -> Place:
        start = self.starts[weights]
        return slice(start, start + weights.rank), LoRAConfig().alpha / weights.rank

    def _enter(self) -> None:
        """Put the requests of streams into the engine, in their order, as long as there is room for their adapters."""
        while self.waiting and self._has(self.waiting[0].weights):
            self._add(self.waiting.popleft())

    def _has(self, weights: Weights) -> bool:
        """Return whether adapters are there, or could come into columns that no request uses."""
        if weights in self.starts:
            return True
        in_use, taken = {stream.weights for stream, _ in self.places.values()}, np.zeros(self.columns, bool)
        self.starts = {one: start for one, start in self.starts.items() if one in in_use}
        for one in self.starts:
            taken[self._place(one)[0]] = True
        free = (start for start in range(0, self.columns, BLOCK) if not taken[start:][: weights.rank].any())
        start = next(free, self.columns)
        if start + weights.rank > self.columns:
            return False
        self.engine.update_weights(write(self.engine.runner.params, weights.adapters, start))
        self.starts[weights] = start
        return True


class Device:
    """The thread, and the engines: one for whole weights, and one or more for adapters.

    Args:
        make_worker: function from a number of columns for adapters to the worker of an engine.

    Attributes:
        lanes: engines by their number of columns, 0 for whole weights.
        failure: what ended the thread; None while it runs.
    """

    def __init__(self, make_worker: Callable[[int], RolloutWorker]):
        self._make_worker = make_worker
        self.lanes: dict[int, Lane] = {}
        self.failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T]) -> "Future[T]":
        """Do a job in the thread, after the jobs before it; return its future."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except Exception as error:
                    future.set_exception(error)

        self._jobs.put(work)
        return future

    def open(self, stream: Stream) -> None:
        """Sample for a stream."""

        def enter() -> None:
            try:
                self.lane(stream.weights.columns).waiting.append(stream)
            except Exception as error:
                stream.send(error)

        self._jobs.put(enter)

    def cancel(self, stream: Stream) -> None:
        """End a stream, whatever is left of it. It may have ended already."""

        def leave() -> None:
            if (lane := self.lanes.get(stream.weights.columns)) is not None:
                lane.close(stream)

        self._jobs.put(leave)

    def close(self) -> None:
        """End the thread after the job under way."""
        self._jobs.put(None)
        self._thread.join()

    def lane(self, columns: int) -> Lane:
        """Return the engine with this number of columns. Only the thread calls it."""
        if columns not in self.lanes:
            worker = self._make_worker(columns)
            self.lanes[columns] = AdapterLane(worker, columns) if columns else Lane(worker)
        return self.lanes[columns]

    def counts(self) -> tuple[int, int]:
        """Return the number of samples that run and that wait, as they were a moment ago."""
        schedulers = [lane.engine.scheduler for lane in list(self.lanes.values())]
        waiting = sum(len(stream.requests) for lane in list(self.lanes.values()) for stream in list(lane.waiting))
        return sum(one.num_live for one in schedulers), waiting + sum(one.num_waiting for one in schedulers)

    def _serve(self) -> None:
        try:
            while self._work():
                for lane in list(self.lanes.values()):
                    lane.step()
        except BaseException as error:
            self.failure = error
            raise

    def _work(self) -> bool:
        """Do the jobs that are there, or wait for one if no engine is busy; return False at the end."""
        wait = not any(lane.is_busy for lane in self.lanes.values())
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get(block=wait)
                if job is None:
                    return False
                job()
                wait = False
        return True
