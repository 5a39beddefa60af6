"""What processes tell each other over the channel, and whom they name when one fails, ends or falls silent; threads
stand for processes, and at the end real ones run this file.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from covey.config.processes import PEER_LOST
from covey.errors import CoveyError, RewardError, Stopped
from covey.parallel import make_mesh, processes
from covey.parallel.processes import PeerLostError
from covey.parallel.values import serialize
from covey_hosts import channel, links
from covey_hosts.channel import Channel
from covey_hosts.several import opened
from covey_hosts.start import initialize
from covey_hosts.wire import join_values, split_values

Threads = Callable[[int, Callable[[int], Any]], list[Any]]
TOKEN = b"0123456789abcdef"


def test_everyone_gets_what_everyone_gave(threads: Threads) -> None:
    values = [{"text": "ä" * 1000}, None, [1.5, float("inf")]]
    assert threads(3, lambda i: processes.here().all_gather(values[i], "x")) == [values] * 3
    assert threads(3, lambda i: processes.here().gather_items("ab" * i, "x")) == [list("ababab")] * 3
    assert threads(3, lambda i: processes.here().broadcast(i, "x")) == [0, 0, 0]
    for large in threads(2, lambda i: processes.here().all_gather(np.full(16 << 20, i, np.int8), "large")):
        assert [(each.size, int(each.sum())) for each in large] == [(16 << 20, 0), (16 << 20, 16 << 20)]


def test_bytes_go_to_the_processes_that_need_them(threads: Threads) -> None:
    """Directly, any number of them; nothing is sent for none; and process 0 gets parts of all in the order of their
    numbers. A stranger, who has no token, disturbs nothing.
    """

    def work(index: int) -> Any:
        first = processes.here().exchange(
            {(index + 1) % 3: bytes([index]) * 100_000, index: b""}, {(index + 2) % 3: 100_000}, "x"
        )
        own = processes.here()
        assert own is not None
        assert own._links is not None
        host, port, _ = own._links.place
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"?" * 100)
        second = processes.here().exchange({0: b"last"} if index == 1 else {}, {1: 4} if index == 0 else {}, "y")
        return first, second, processes.here().gather_parts([b"a%d" % index, b"b%d" % index], [index, 9 - index], "z")

    found = threads(3, work)
    for index, (first, second, parts) in enumerate(found):
        assert first == {(index + 2) % 3: bytes([(index + 2) % 3]) * 100_000}
        assert second == ({1: b"last"} if index == 0 else {})
        assert b"".join(parts) == (b"" if index else b"a0a1a2b2b1b0")


def test_a_process_that_expects_other_bytes_says_so(threads: Threads) -> None:
    found = threads(2, lambda index: processes.here().exchange({1 - index: b"four"}, {1 - index: 5}, "sizes"))
    assert all("4 bytes of 'sizes' and not 5" in str(error) for error in found)


def test_exchanges_of_another_thread_come_beside_those_of_the_first(threads: Any) -> None:
    """In each process they come in another order."""

    def work(index: int) -> list[Any]:
        own, results = threads.own.channel, dict[str, Any]()

        def produce() -> None:
            results["thread"] = [own.all_gather((index, n), "groups") for n in range(50)]

        thread = threading.Thread(target=produce)
        thread.start()
        if index == 1:
            thread.join(0.05)
        results["first"] = [own.all_gather((n, index), "step") for n in range(50)]
        thread.join()
        return [results["first"], results["thread"]]

    wanted = [[[(n, 0), (n, 1)] for n in range(50)], [[(0, n), (1, n)] for n in range(50)]]
    assert threads(2, work) == [wanted, wanted]


@pytest.mark.parametrize(
    ("error", "told", "stopped"),
    [
        (RewardError("the reward broke", where="my.py"), "my.py: the reward broke", None),
        (ZeroDivisionError("1 / 0"), "ZeroDivisionError: 1 / 0", None),
        (Stopped("SIGTERM"), "it was stopped by SIGTERM", "SIGTERM"),
        (Stopped("SIGINT", step=3), "it was stopped by SIGINT", "SIGINT"),
        (KeyboardInterrupt(), "it was stopped by Ctrl-C", "SIGINT"),
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_was_stopped_says_by_what(
    threads: Threads, error: BaseException, told: str, stopped: str | None, victim: int
) -> None:
    """So does one that has failed. The others, which wait in an exchange or at the end, leave with the code of the
    signal, not with that of a mistake.
    """

    def work(index: int) -> None:
        processes.here().all_gather(index, "before")
        if index == victim:
            raise error
        if index == 2:
            processes.here().all_gather(index, "after")

    results = threads(3, work)
    assert results.pop(victim) is error
    for other in results:
        assert isinstance(other, PeerLostError)
        assert f"process {victim} has failed: {told}" in str(other)
        assert (other.stopped and (other.stopped.signal, other.stopped.step)) == (stopped and (stopped, None))


def test_processes_that_are_not_at_the_same_place_stop(threads: Threads) -> None:
    """The trap: one evaluates while the other trains, and each takes the other's numbers for what it waits for."""
    for index, error in enumerate(threads(2, lambda index: processes.here().all_gather(index, f"place {index}"))):
        assert isinstance(error, PeerLostError)
        assert f"come apart: this one is at 'place {index}', process {1 - index} at 'place {1 - index}'" in str(error)


def test_a_failure_in_one_process_is_one_in_all(threads: Threads) -> None:
    def work(index: int) -> None:
        with processes.here().together("here"):
            if index == 1:
                raise OSError("disk full")

    first, second = threads(2, work)
    assert isinstance(second, OSError)
    assert isinstance(first, CoveyError)
    assert "process 1 has failed at this: OSError: disk full" in str(first)


def gone(threads: Any, index: int) -> None:
    """Let a process be gone: nobody has closed its connection in an orderly way, and it blames no other process."""
    with threads.own.channel._changed:  # decides nothing before all are closed
        for peer in threads.own.channel._peers.values():
            peer.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_is_gone_is_named_at_once(threads: Any, victim: int) -> None:
    """Also to one whose device program has failed, which knows of a closed connection and not whose."""

    def work(index: int) -> None:
        threads.own.channel.doing = f"step {index}"
        for place in ("before", "and again"):
            processes.here().all_gather(index, place)
        if index == victim:
            return gone(threads, index)
        if index == 1:
            with processes.here().phase("update", 1):
                pass
        threads.own.channel.doing = "the device program"
        try:
            raise ValueError("Connection closed by peer")
        except ValueError as error:
            verdict = threads.own.channel.find_lost_peer()
            raise verdict.error() from error

    before = time.monotonic()
    results = threads(3, work)
    assert time.monotonic() - before < 10
    for index in {0, 1, 2} - {victim}:
        assert isinstance(results[index], PeerLostError)
        told = str(results[index])
        assert f"process {victim} of 3 is gone (last: step {victim}; process {os.getpid()} on " in told


def test_a_failed_device_program_names_the_process_that_is_gone(threads: Any) -> None:
    def work(index: int) -> None:
        with processes.here().phase("update", 1):
            if index == 1:
                return gone(threads, index)
            raise ValueError("Connection closed by peer")

    assert "process 1 of 2 is gone (last: 'update' of step 1;" in str(threads(2, work)[0])


@pytest.mark.slow
def test_a_process_that_has_not_ended_behind_a_verdict_is_ended(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits in a device program; none that is about to leave, or that another one's signal will stop."""
    monkeypatch.setattr(channel, "END_SECONDS", 0.1)
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.1)

    def work(index: int, error: BaseException, leaves: bool) -> None:
        if index == 1:
            raise error
        if leaves:
            threads.own.channel.wait_for_peers()
        time.sleep(0.6)

    broken, verdict = ValueError("it broke"), "process 1 has failed: ValueError: it broke"
    for error, leaves, told in ((broken, False, [verdict] * 2), (broken, True, []), (Stopped("SIGTERM"), False, [])):
        threads.ended.clear()
        threads(3, partial(work, error=error, leaves=leaves))
        assert threads.ended == told


def test_a_verdict_reaches_who_connects_behind_it() -> None:
    """One that fails at once, while another is still on its way."""
    server, ends = socket.create_server(("127.0.0.1", 0)), [Channel(n, 3, end=lambda verdict: None) for n in range(3)]
    port, accept = server.getsockname()[1], threading.Thread(target=ends[0].accept, args=(server, TOKEN))
    accept.start()
    ends[1].connect("127.0.0.1", port, TOKEN)
    ends[1].__exit__(ValueError, ValueError("it broke"), None)
    ends[2].connect("127.0.0.1", port, TOKEN)
    verdict = ends[2].find_lost_peer(10)
    assert verdict is not None
    assert verdict.text == "process 1 has failed: ValueError: it broke"
    accept.join()
    closing = [threading.Thread(target=end.close) for end in ends]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def test_process_0_leaves_last(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX aborts the others without it. A process that is lost is not waited for, and who has only failed leaves as
    usual.
    """
    left: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "_exit", lambda code: left.append((threads.own.index, code)))

    def work(index: int) -> None:
        own = threads.own.channel
        if index == 1:
            return gone(threads, index)
        assert own.find_lost_peer().lost
        if index == 2:
            time.sleep(0.3)
            left.append((2, 0))
            return gone(threads, index)
        processes.here().leave(69)

    threads(3, work)
    assert left == [(2, 0), (0, 69)]


def link(token: bytes, *frames: bytes) -> tuple[Channel, socket.socket]:
    """Process 0 of two, and the connection of another one that begins with these bytes."""
    server, hub = socket.create_server(("127.0.0.1", 0)), Channel(0, 2, silent=0.6, end=lambda verdict: None)
    other = socket.create_connection(server.getsockname())
    for data in (token, *frames):
        other.sendall(data)
    hub.__enter__()
    try:
        hub.accept(server, TOKEN)
    except CoveyError:
        with other, suppress(ConnectionResetError):
            assert other.recv(1000) == b""  # it is closed, and a stranger is told nothing
        raise
    return hub, other


def frame(kind: str, key: str, sizes: list[int]) -> bytes:
    head = json.dumps([kind, key, "there", sizes]).encode()
    return len(head).to_bytes(4, "big") + head


@pytest.mark.slow
def test_pieces_of_a_value_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large value on a slow line delays the beats behind it."""
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.1)
    hub, other = link(TOKEN, frame("hello", "1", [5]), b"there")
    value = serialize(["x", "a" * 1000])
    with other:
        other.sendall(frame("values", "/1", [len(value)]))
        for start in range(0, len(value), 100):
            time.sleep(0.15)
            other.sendall(value[start : start + 100])
        assert hub.all_gather(0, "x") == [0, "a" * 1000]
        assert hub.verdict is None
        verdict = hub.find_lost_peer(5)  # and now nothing comes
        assert verdict is not None
        assert "process 1 of 2 has given no sign for 1 s (last: there; there)" in verdict.text
        hub.close()


@pytest.mark.slow
def test_a_stranger_is_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (channel, links):
        monkeypatch.setattr(room, "CONNECT_SECONDS", 0.5)
    for start in (b"another token!!!", b"", TOKEN[:5]):
        with pytest.raises(CoveyError, match="process 1 has not connected to process 0"):
            link(start, *([frame("hello", "1", [5]), b"there"] if len(start) == len(TOKEN) else ()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(CoveyError, match=f"process 0 cannot be reached at 127.0.0.1:{port}"):
        Channel(1, 2).connect("127.0.0.1", port, TOKEN)


def test_several_processes_need_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    value = object()
    assert processes.here().all_gather(value, "x")[0] is value
    with processes.here().together("x"), processes.here().phase("update", 1), processes.here().phase("update", 0):
        assert processes.here() is processes.ALONE
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(CoveyError, match="have no channel"):
        processes.here().all_gather(value, "x")


def test_values_of_many_processes_travel_compressed() -> None:
    """Process 0 sends the values of N processes N times; alike ones must not cost N times one."""
    values = [serialize([number % 3, np.arange(100)]) for number in range(1000)]
    parts = join_values(values)
    assert list(split_values(*parts).values()) == values
    assert 50 * sum(map(len, parts)) < sum(map(len, values))


HALTED = 2
"""The process that halts itself."""


@pytest.mark.slow
def test_three_processes_keep_one_order_and_name_the_one_that_is_stopped(host: Any) -> None:
    started = host.start([__file__], 3, devices=1)
    texts = host.end(started, [PEER_LOST, PEER_LOST, -signal.SIGKILL], halted=HALTED)
    assert "process 0 wants to launch 'update' of step 7, process 1 'sample' of step 7" in texts[0], texts
    assert "process 1 wants to launch 'sample' of step 7, process 0 'update' of step 7" in texts[1], texts
    assert "process 2 wants to launch 'update' of step 7, process 1 'sample' of step 7" in texts[2], texts
    assert "with other shapes or another program than process 0" in texts[1]
    for number, text in enumerate(texts):
        assert f"process {number}: the thread 'producer' wants to launch 'sync' of step 8" in text
    assert "lost PeerLostError: process 2 of 3 has given no sign for" in texts[0]
    assert f"process {started[2].pid} on" in texts[0]
    assert "covey: process 2 of 3 has given no sign for" in texts[1]


def keep_order() -> None:
    """Launch in another order; at the end one process halts, one waits for it in a phase and one in a program."""
    initialize(os.environ)
    with opened("127.0.0.1", 0, silent=6.0):
        me, count = processes.here().index, processes.here().count
        say_refusal("order", "sample" if me == 1 else "update", 7)
        say_refusal("shapes", "update", 7, (4 + me, 128))
        thread = threading.Thread(target=say_refusal, args=("thread", "sync", 8), name="producer")
        thread.start()
        thread.join()
        place = NamedSharding(make_mesh((count,), ("fsdp",)), PartitionSpec("fsdp"))
        x = jax.make_array_from_callback((count,), place, lambda at: np.arange(count, dtype=np.float32)[at])
        total = jax.jit(jax.numpy.sum)
        assert float(total(x).addressable_shards[0].data) == 3
        processes.here().all_gather(None, "compiled")
        if me == HALTED:
            os.kill(os.getpid(), signal.SIGSTOP)
        if me == 1:
            total(x).block_until_ready()
        say_refusal("lost", "update", 100)
        time.sleep(60)


def say_refusal(about: str, name: str, step: int, program: Any = "") -> None:
    try:
        with processes.here().phase(name, step, program):
            print(about, "was not refused", flush=True)
    except CoveyError as error:
        print(about, f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    keep_order()
