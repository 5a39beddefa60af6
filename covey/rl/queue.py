"""Bounded queue with an end marker, between the thread that samples and the one that trains.

The end marker takes no room, so it never blocks; an error of the producer is attached to it and raised in the reader. A
reader that is done, or has failed, closes the queue; then nothing blocks on it any more.
"""

import inspect
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, TypeVar

from covey.errors import CoveyError

T = TypeVar("T")


class Ended(Exception):  # noqa: N818
    """Raised by `get` when the queue has ended."""


class Closed(Exception):  # noqa: N818
    """Raised by `put` when the reader has closed the queue: the producer should stop without an error."""


class DataQueue(Generic[T]):
    """First-in first-out queue, safe to use from any number of threads.

    Args:
        maxsize: most items held; `put` to a full queue blocks. For micro-batches: gradient accumulation steps + 2.

    Raises:
        CoveyError: `maxsize` is below 1.
    """

    def __init__(self, maxsize: int):
        if maxsize < 1:
            raise CoveyError(f"a DataQueue of maxsize {maxsize}", want="room for at least 1 item")
        self.maxsize = maxsize
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = self._closed = self._told = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def __len__(self) -> int:
        """Return the number of items held."""
        return len(self._items)

    def put(self, item: T) -> None:
        """Add `item`; wait while the queue is full.

        Raises:
            Closed: the queue was closed, before or while waiting.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self.maxsize)
            if self._closed:
                raise Closed
            assert not self._ended, "nothing comes behind the end marker"
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        """Return the next item; wait while there is none.

        Raises:
            Ended: the queue has ended or was closed; every further call raises it again.
            BaseException: the producer's error, with its traceback, once all items before it are read.
        """
        held = self._take()
        if held is None:
            raise Ended
        return held[0]

    def __iter__(self) -> Iterator[T]:
        """Yield items up to the end marker; raise the producer's error as `get` does."""
        while (held := self._take()) is not None:
            yield held[0]

    def end(self, error: BaseException | None = None) -> None:
        """Put the end marker after the last item; never block. The reader raises `error` when it reaches the marker."""
        with self._changed:
            self._ended = True
            if error is not None and self._error is None:
                self._error, self._traceback = error, error.__traceback__
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all items and wake all waiting threads: readers see the end, producers get `Closed`."""
        with self._changed:
            self._closed = self._ended = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def unseen(self) -> BaseException | None:
        """Error of the producer that no reader has raised yet, or None."""
        return None if self._told else self._error

    def _take(self) -> tuple[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return (item,)
            if self._error is not None and not self._closed:
                self._told = True
                raise self._error.with_traceback(self._traceback)
            return None


@contextmanager
def produce(items: Iterable[T], queue: DataQueue[T]) -> Iterator[DataQueue[T]]:
    """Fill `queue` from `items` in a thread, as long as the context lasts.

    The thread always puts the end marker, also when it fails. Leaving the context, with or without an exception,
    closes the queue and waits for the thread, which stops at its next item. An error of the thread that no reader saw
    is raised then, or added as a note to the exception in flight.

    Hazard: thread-local settings, such as JAX's `with jax.default_device(...)`, do not apply inside `items`.

    Args:
        items: iterated in the thread; a generator is closed there when the queue is closed.

    >>> with produce(range(3), DataQueue(maxsize=2)) as queue:
    ...     print(*queue)
    0 1 2
    """
    # A daemon, so that a second Ctrl-C, which breaks the join, also ends the process.
    thread = threading.Thread(target=_fill, args=(items, queue), name="covey-producer", daemon=True)
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
    finally:
        if inspect.isgenerator(iterator):
            iterator.close()
