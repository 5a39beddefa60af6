"""The queue between two threads: order, bound, end, errors, and that nothing ever blocks for good.

Real threads. A wait has a limit only so that a defect fails instead of hanging; no claim rests on a sleep.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import CoveyError
from covey.rl.run_ahead import Closed, DataQueue, Ended, produce

LIMIT = 10.0


class Failed(Exception):  # noqa: N818
    pass


class Task:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[..., Any], *args: Any):
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, args), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., Any], args: Any) -> None:
        try:
            self.result = call(*args)
        except BaseException as error:
            self.error = error

    def done(self) -> bool:
        self._thread.join(LIMIT)
        return not self._thread.is_alive()


def producers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "covey-producer"]


def until_the_producer_is_done() -> None:
    for thread in producers():
        thread.join(LIMIT)


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    assert producers() == []


def full(maxsize: int = 2) -> DataQueue[int]:
    queue: DataQueue[int] = DataQueue(maxsize)
    for i in range(maxsize):
        queue.put(i)
    return queue


# Order, bound, end


@given(st.lists(st.integers() | st.none(), max_size=30), st.integers(1, 5))
def test_what_goes_in_comes_out_in_order_none_included(items: list[int | None], maxsize: int) -> None:
    with produce(items, DataQueue(maxsize)) as queue:
        assert list(queue) == items


def test_the_queue_never_holds_more_than_its_size() -> None:
    seen: list[int] = []
    queue: DataQueue[int] = DataQueue(3)

    def rows() -> Iterator[int]:
        for i in range(50):
            seen.append(len(queue))
            yield i

    with produce(rows(), queue):
        assert list(queue) == list(range(50))
    assert max(seen) <= 3


def test_the_end_marker_comes_behind_the_items_and_stays() -> None:
    queue = full(2)
    queue.end()  # takes no room: a full queue does not block it
    assert [queue.get(), queue.get()] == [0, 1]
    for _ in range(3):
        with pytest.raises(Ended):
            queue.get()
    assert list(queue) == []


def test_the_end_marker_reaches_a_reader_that_waits() -> None:
    queue: DataQueue[int] = DataQueue(1)
    readers = [Task(list, queue) for _ in range(3)]
    queue.end()
    assert all(reader.done() for reader in readers)
    assert [reader.result for reader in readers] == [[], [], []]


@pytest.mark.parametrize("maxsize", [0, -1])
def test_a_queue_without_room_is_refused(maxsize: int) -> None:
    with pytest.raises(CoveyError, match="at least 1"):
        DataQueue(maxsize)


# Errors


def failing(error: BaseException, after: int = 2) -> Iterator[int]:
    yield from range(after)
    raise error


@pytest.mark.parametrize("kind", [Failed, KeyboardInterrupt, SystemExit, MemoryError])
def test_a_producers_error_is_raised_at_the_reader_behind_its_items(kind: type[BaseException]) -> None:
    read: list[int] = []
    with pytest.raises(kind) as caught, produce(failing(kind("why")), DataQueue(5)) as queue:
        read.extend(queue)
    assert read == [0, 1]
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_error_is_raised_again_at_every_reader_and_its_traceback_does_not_grow() -> None:
    queue: DataQueue[int] = DataQueue(1)
    queue.end(Failed("why"))
    depths = []
    for _ in range(3):
        with pytest.raises(Failed) as caught:
            queue.get()
        depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(depths)) == 1


def test_what_is_no_iterable_is_told_to_the_reader_too() -> None:
    with pytest.raises(TypeError, match="not iterable"), produce(3, DataQueue(1)) as queue:  # type: ignore[arg-type]
        list(queue)


def test_a_reader_that_leaves_early_still_hears_of_the_error() -> None:
    """Nothing is swallowed: the error came after the last item that was read."""
    with pytest.raises(Failed, match="why"), produce(failing(Failed("why"), after=1), DataQueue(1)):
        until_the_producer_is_done()


def test_an_error_that_the_reader_dealt_with_is_not_raised_again() -> None:
    with produce(failing(Failed("why"), after=0), DataQueue(1)) as queue, pytest.raises(Failed):
        queue.get()


def test_when_both_fail_the_readers_error_goes_on_with_a_note() -> None:
    def reads_nothing_and_fails() -> None:
        with produce(failing(Failed("why"), 0), DataQueue(1)):
            until_the_producer_is_done()
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError) as caught:
        reads_nothing_and_fails()
    assert caught.value.__notes__ == ["the producer had failed too: Failed('why')"]


# Closing


def test_a_queue_may_be_closed_twice_and_stays_closed() -> None:
    queue = full()
    readers = [Task(list, queue) for _ in range(2)]
    queue.close()
    queue.close()
    assert all(reader.done() for reader in readers)
    assert (len(queue), list(queue)) == (0, [])
    with pytest.raises(Closed):
        queue.put(3)


def endless(stopped: "Queue[str]") -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        stopped.put(threading.current_thread().name)


@pytest.mark.parametrize("leave", ["break", "fail", "interrupt"])
def test_leaving_midway_stops_the_thread_and_closes_its_generator_there(leave: str) -> None:
    stopped: Queue[str] = Queue()
    raised = {"break": (), "fail": (Failed,), "interrupt": (KeyboardInterrupt,)}[leave]
    try:
        with produce(endless(stopped), DataQueue(2)) as queue:
            for _ in queue:
                if raised:
                    raise raised[0]
                break
    except raised:
        pass
    assert producers() == []
    assert stopped.get(timeout=LIMIT) == "covey-producer"
    with pytest.raises(Closed):
        queue.put(1)


def test_an_error_while_the_generator_is_closed_is_not_lost() -> None:
    def rows() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise Failed("while closing")

    with pytest.raises(Failed, match="while closing"), produce(rows(), DataQueue(1)) as queue:
        queue.get()


def test_anothers_closed_queue_inside_the_items_is_an_error_and_no_end() -> None:
    other = full()
    other.close()

    def rows() -> Iterator[int]:
        other.put(1)
        yield 1

    with pytest.raises(Closed), produce(rows(), DataQueue(1)) as queue:
        list(queue)


def test_an_iterator_that_is_no_generator_can_be_read_on_afterwards() -> None:
    rest = iter(range(10))
    with produce(rest, DataQueue(1)) as queue:
        first = queue.get()
    assert first == 0
    assert list(rest)[-1] == 9
