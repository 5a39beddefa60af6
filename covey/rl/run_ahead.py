"""Sampling that runs ahead of training: one thread makes the rollouts of a step, and the trainer takes them in order.

A `Future` stands for each rollout. An error of the thread is raised where its rollout is taken, and ends the thread. A
trainer that is done, or has failed, cancels what the thread has not begun, and waits for what it has.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")


@contextmanager
def run_ahead(rollout: Callable[[S], T], parts: Iterable[S], in_thread: bool) -> Iterator[Iterable[T]]:
    """Provide the rollouts of `parts`, in order.

    Leaving the context, with or without an exception, stops the thread behind its present rollout, and waits for it. An
    error of the thread that nobody has taken is raised then, or added as a note to the exception in flight.

    Hazard: thread-local settings, such as JAX's `with jax.default_device(...)`, do not apply inside `rollout`.

    Args:
        rollout: samples and scores a part of a step; in a thread it must launch no program over several processes.
        parts: arguments of the calls.
        in_thread: whether a thread makes the rollouts during the `with` block; otherwise each is made when it is asked
            for.

    >>> with run_ahead(str.upper, ["a", "b"], in_thread=True) as rollouts:
    ...     print(*rollouts)
    A B
    """
    if not in_thread:
        yield map(rollout, parts)
        return
    waiting = deque((Future[T](), part) for part in parts)
    # A daemon, so that a second Ctrl-C, which breaks the join, also ends the process.
    thread = threading.Thread(target=_make_all, args=(rollout, tuple(waiting)), name="covey-producer", daemon=True)
    thread.start()
    try:
        yield _take_all(waiting)
    except BaseException as failure:
        for error in _stop(thread, waiting):
            failure.add_note(f"the producer had failed too: {error!r}")
        raise
    for error in _stop(thread, waiting):
        raise error


Jobs = Iterable[tuple[Future[T], S]]
"""Rollouts of a step and the parts that they are made of."""


def _make_all(rollout: Callable[[S], T], jobs: Jobs[T, S]) -> None:
    for future, part in jobs:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(rollout(part))
        except BaseException as error:
            future.set_exception(error)
            return


def _take_all(waiting: deque[tuple[Future[T], S]]) -> Iterator[T]:
    while waiting:
        yield waiting.popleft()[0].result()


def _stop(thread: threading.Thread, waiting: Jobs[T, S]) -> list[BaseException]:
    """Stop the thread; return its error if nobody has taken it."""
    left = [future for future, _ in waiting if not future.cancel()]
    thread.join()
    return [error for future in left if (error := future.exception()) is not None]


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
