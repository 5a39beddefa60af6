"""Rollouts that a thread makes: order, errors, and that nothing ever blocks for good.

Real threads. A wait has a limit only so that a defect fails instead of hanging; no claim rests on a sleep.
"""

import threading
import traceback
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rl.run_ahead import run_ahead

LIMIT = 10.0


class Failed(Exception):  # noqa: N818
    pass


def producers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "covey-producer"]


def until_the_producer_is_done() -> None:
    for thread in producers():
        thread.join(LIMIT)


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    assert producers() == []


@given(st.lists(st.integers() | st.none(), max_size=30), st.booleans())
def test_what_goes_in_comes_out_in_order_none_included(items: list[int | None], in_thread: bool) -> None:
    with run_ahead(lambda item: item, items, in_thread) as rollouts:
        assert list(rollouts) == items


def test_the_thread_does_not_wait_for_the_reader() -> None:
    with run_ahead(str, range(3), in_thread=True) as rollouts:
        until_the_producer_is_done()
        assert list(rollouts) == ["0", "1", "2"]


# Errors


def fails(error: BaseException, after: int = 2) -> Callable[[int], int]:
    def rollout(part: int) -> int:
        if part >= after:
            raise error
        return part

    return rollout


@pytest.mark.parametrize("kind", [Failed, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_error_is_raised_at_the_reader_behind_the_rollouts_before(kind: type[BaseException]) -> None:
    taken: list[int] = []
    with pytest.raises(kind) as caught, run_ahead(fails(kind("why")), range(5), in_thread=True) as rollouts:
        taken.extend(rollouts)
    assert taken == [0, 1]
    assert "rollout" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_reader_that_leaves_early_still_hears_of_the_error() -> None:
    """Nothing is swallowed: the error came after the last rollout that was taken."""
    with pytest.raises(Failed, match="why"), run_ahead(fails(Failed("why"), after=1), range(3), in_thread=True):
        until_the_producer_is_done()


def test_an_error_that_the_reader_dealt_with_is_not_raised_again() -> None:
    rollout = fails(Failed("why"), after=0)
    with run_ahead(rollout, range(3), in_thread=True) as rollouts, pytest.raises(Failed):
        next(iter(rollouts))


def test_when_both_fail_the_readers_error_goes_on_with_a_note() -> None:
    def takes_nothing_and_fails() -> None:
        with run_ahead(fails(Failed("why"), after=0), range(3), in_thread=True):
            until_the_producer_is_done()
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError) as caught:
        takes_nothing_and_fails()
    assert caught.value.__notes__ == ["the producer had failed too: Failed('why')"]


# Leaving


@pytest.mark.parametrize("leave", ["break", "fail", "interrupt"])
def test_leaving_midway_stops_the_thread_behind_its_present_rollout(
    leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, leaves, join = list[int](), threading.Event(), threading.Thread.join
    raised = {"break": (), "fail": (Failed,), "interrupt": (KeyboardInterrupt,)}[leave]

    def let_go_on(thread: threading.Thread) -> None:
        leaves.set()
        join(thread)

    def rollout(part: int) -> int:
        begun.append(part)
        assert part == 0 or leaves.wait(LIMIT)
        return part

    monkeypatch.setattr(threading.Thread, "join", let_go_on)
    try:
        with run_ahead(rollout, range(50), in_thread=True) as rollouts:
            for _ in rollouts:
                if raised:
                    raise raised[0]
                break
    except raised:
        pass
    assert producers() == []
    assert begun in ([0], [0, 1])
