"""Work that runs ahead of what uses it: a thread, and the bounded queue between it and its reader.

Within a step a thread samples the next prompts while the last ones are trained on (`run_ahead`); over steps see
`rollouts`.

`queue.Queue` blocks and wakes; `DataQueue` adds the end. The end marker takes no room, so it never blocks; an error of
the producer is attached to it and raised in the reader. A reader that is done, or has failed, closes the queue; then
nothing blocks on it any more.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Queue
from types import TracebackType
from typing import Any, Generic, TypeVar

from covey.errors import CoveyError

T = TypeVar("T")
S = TypeVar("S")

END: Any = object()
"""Marker behind the last item; readers leave it in the queue for the next reader."""


class Ended(Exception):  # noqa: N818
    """Raised by `get` when the queue has ended."""


class Closed(Exception):  # noqa: N818
    """Raised by `put` when the reader has closed the queue: the producer should stop without an error."""


class DataQueue(Queue[T]):
    """First-in first-out queue, safe to use from any number of threads.

    `put` waits while the queue is full, and raises `Closed` once the queue is closed. `get` waits while it is empty,
    and raises `Ended` at the end marker, or the producer's error with its traceback; every further call raises it
    again.

    Args:
        maxsize: most items held. For micro-batches: gradient accumulation steps + 2.

    Raises:
        CoveyError: `maxsize` is below 1.
    """

    def __init__(self, maxsize: int):
        if maxsize < 1:
            raise CoveyError(f"a DataQueue of maxsize {maxsize}", want="room for at least 1 item")
        super().__init__(maxsize)
        self._ended = self._closed = self._raised = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def __len__(self) -> int:
        """Return the number of items held."""
        return len(self.queue) - self._ended

    def __iter__(self) -> Iterator[T]:
        """Yield items up to the end marker; raise the producer's error as `get` does."""
        while True:
            try:
                yield self.get()
            except Ended:
                return

    def end(self, error: BaseException | None = None) -> None:
        """Put the end marker after the last item; never block. The reader raises `error` when it reaches the marker."""
        with self.mutex:
            if error is not None and self._error is None:
                self._error, self._traceback = error, error.__traceback__
            if not self._ended:
                self.queue.append(END)
            self._ended = True
            self.not_empty.notify_all()

    def close(self) -> None:
        """Drop all items and wake all waiting threads: readers see the end, producers get `Closed`."""
        with self.mutex:
            self._ended = self._closed = True
            self.maxsize = sys.maxsize  # room for those that wait in `put`, which then raises
            self.queue.clear()
            self.queue.append(END)
            self.not_empty.notify_all()
            self.not_full.notify_all()

    @property
    def unseen(self) -> BaseException | None:
        """Error of the producer that no reader has raised yet, or None."""
        return None if self._raised else self._error

    # What `put` and `get` of the base class call with the lock held, once there is room or an item.

    def _put(self, item: T) -> None:
        if self._closed:
            raise Closed
        assert not self._ended, "nothing comes behind the end marker"
        self.queue.append(item)

    def _get(self) -> T:
        if self.queue[0] is not END:
            item: T = self.queue.popleft()
            return item
        if self._error is None or self._closed:
            raise Ended
        self._raised = True
        raise self._error.with_traceback(self._traceback)


@contextmanager
def run_ahead(rollout: Callable[[S], T], parts: Iterable[S], depth: int) -> Iterator[Iterable[T]]:
    """Provide the rollouts of `parts`, in order.

    Args:
        rollout: samples and scores a part of a step; in a thread it must launch no program over several processes.
        parts: arguments of the calls.
        depth: 0 makes each rollout when it is asked for. Otherwise a thread makes them during the `with` block, and at
            most so many wait.

    >>> with run_ahead(str.upper, ["a", "b"], depth=2) as rollouts:
    ...     print(*rollouts)
    A B
    """
    rollouts = map(rollout, parts)
    if not depth:
        yield rollouts
        return
    with produce(rollouts, DataQueue(depth)) as queue:
        yield queue


class Replay(Generic[T]):
    """Items that can be iterated several times, although they may still have to be made: each pass goes through those
    that exist and then makes the others.

    Attributes:
        made: the items that exist so far.

    >>> replay = Replay(iter("ab"))
    >>> [*replay], [*replay]
    (['a', 'b'], ['a', 'b'])
    """

    def __init__(self, items: Iterable[T]):
        self.made: list[T] = []
        self._rest = iter(items)

    def __iter__(self) -> Iterator[T]:
        yield from self.made
        for item in self._rest:
            self.made.append(item)
            yield item

    def make_all(self) -> None:
        """Make all items now."""
        self.made.extend(self._rest)


@contextmanager
def produce(items: Iterable[T], queue: DataQueue[T], name: str = "producer") -> Iterator[DataQueue[T]]:
    """Fill `queue` from `items` in a thread, as long as the context lasts.

    The thread always puts the end marker, also when it fails. Leaving the context, with or without an exception,
    closes the queue and waits for the thread, which stops at its next item. An error of the thread that no reader saw
    is raised then, or added as a note to the exception in flight.

    Hazard: thread-local settings, such as JAX's `with jax.default_device(...)`, do not apply inside `items`.

    Args:
        items: iterated in the thread; a generator is closed there when the queue is closed.
        queue: the queue to fill.
        name: name of the thread.

    >>> with produce(range(3), DataQueue(maxsize=2)) as queue:
    ...     print(*queue)
    0 1 2
    """
    # A daemon, so that a second Ctrl-C, which breaks the join, also ends the process.
    thread = threading.Thread(target=_fill, args=(items, queue), name=f"covey-{name}", daemon=True)
    thread.start()
    try:
        yield queue
    except BaseException as failure:
        _stop(queue, thread)
        if queue.unseen is not None:
            failure.add_note(f"the producer had failed too: {queue.unseen!r}")
        raise
    _stop(queue, thread)
    if queue.unseen is not None:
        raise queue.unseen


def _stop(queue: DataQueue[T], thread: threading.Thread) -> None:
    queue.close()
    thread.join()


def _fill(items: Iterable[T], queue: DataQueue[T]) -> None:
    error = None
    try:
        _put_all(items, queue)
    except BaseException as caught:
        error = caught
    queue.end(error)


def _put_all(items: Iterable[T], queue: DataQueue[T]) -> None:
    iterator = iter(items)
    try:
        for item in iterator:
            try:
                queue.put(item)
            except Closed:  # caught here alone: another queue's, raised inside `items`, is an error
                return
            del item  # what it holds, such as weights, is the reader's while the next one is made
    finally:
        if inspect.isgenerator(iterator):
            iterator.close()
