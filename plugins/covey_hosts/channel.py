"""One control channel between the processes of a run: values of the host, beats, and the verdict on a lost process.

Each process has a TCP connection to process 0, which listens at a port that it publishes in the key-value store of
JAX's coordination service, together with a token that must come first on a connection. No device program is involved,
so the channel may be used from any thread, also while a program over several processes runs:

    values = processes.here().all_gather(value, "name of the exchange")  # by process index, on every process

The thread that has opened the channel makes its exchanges in one order. If their names differ between processes, all
processes fail. Exchanges of other threads are matched by their names.

A process that fails says so itself. When a process is killed, its connection closes. When a process is stopped, it
sends nothing more, not even the beat of each second. Process 0 sends the verdict on the first lost process to all, so
that all name the same process. From then on every exchange raises a `PeerLostError`. A process that does not end by
itself within `END_SECONDS`, because it waits in a device program, is ended with the exit code `PEER_LOST`. JAX's own
heartbeat would notice a stopped process late, and abort the others without a name.

Bytes that only some processes need go over direct connections (`exchange`), which are opened at first use.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from covey.config.processes import BIND, PEER_LOST
from covey.display import printable
from covey.errors import CoveyError
from covey.parallel.processes import PeerLostError, Processes
from covey.parallel.values import deserialize, serialize
from covey_hosts.links import BEAT_SECONDS, CONNECT_SECONDS, Links, Peer, own_host
from covey_hosts.wire import (
    ANSWER,
    HELLO,
    LEAVES,
    VALUES,
    VERDICT,
    Message,
    Verdict,
    join_values,
    split_values,
    values_by_process,
    verdict_on,
)

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows
T = TypeVar("T")

PORT = "COVEY_CHANNEL_PORT"
"""Environment variable: port of process 0 for the channel; a free port when not set."""
SILENT = "COVEY_SILENT_SECONDS"
"""Environment variable: seconds without a sign of a process after which the others give it up."""
BEATS = 256
"""Beats that process 0 gets in a second; more processes send theirs at longer intervals."""
SILENT_SECONDS = 18.0
"""Value of `SILENT` when it is not set."""
REPORT_SECONDS = 60.0
"""Seconds that a process waits for the others before it says so."""
OTHERS = "the other processes"
NAMED = 8
"""Largest number of late processes that the log names."""
BLAME_SECONDS = 6.0
"""Seconds that a process waits for a verdict after its device program has failed."""
END_SECONDS = 5.0
"""Seconds that a process has to end by itself after a verdict."""


def end_process(verdict: str) -> None:
    """Print the verdict and end this process at once: its main thread may wait in a device program for ever."""
    print(printable(f"covey: {verdict}; this process ends too"), file=sys.stderr, flush=True)
    os._exit(PEER_LOST)


class Channel(Processes):
    """One process's end of the channel. The `with` statement ends when all processes are at its end. An error in its
    body is sent to the other processes.

    Args:
        index: index of this process.
        count: number of processes.
        silent: seconds without a sign after which a process is taken to be stopped.
        end: ends this process because of a verdict.

    Attributes:
        doing: phase of this process. The others show it when the process is lost.
        beat_seconds: seconds from one beat to the next.
        verdict: verdict on the process that is lost or has failed; None as long as there is none.
        thread: the thread that has opened the channel.
    """

    def __init__(
        self, index: int, count: int, silent: float = SILENT_SECONDS, end: Callable[[str], None] = end_process
    ):
        self.index, self.count, self.silent, self._end = index, count, silent, end
        self.seconds_to_end = silent + END_SECONDS + 2 * BEAT_SECONDS
        self.doing, self.thread = "start", threading.current_thread()
        self.verdict: Verdict | None = None
        self._peers: dict[int, Peer] = {}
        self._values: dict[str, dict[int, bytes]] = defaultdict(dict)
        self._numbers: Counter[str] = Counter()
        self._changed, self._leaves = threading.Condition(), threading.Event()
        self._compared, self._answers = set[str](), dict[str, Mapping[int, bytes]]()
        self.beat_seconds = min(max(BEAT_SECONDS, count / BEATS), silent / 4)
        self._links: Links | None = None
        self._received, self._exchanges = dict[tuple[int, int], bytes](), 0

    def __enter__(self) -> "Channel":
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.all_gather(None, "the end")
            self.close()
        elif not isinstance(error, PeerLostError):
            self._fail(error)

    def accept(self, server: socket.socket, token: bytes) -> None:
        """Wait until all others have connected to `server`, for process 0; then close it.

        Raises:
            CoveyError: some do not connect in time.
        """
        until = time.monotonic() + CONNECT_SECONDS
        with server:
            server.settimeout(0.05)
            while missing := set(range(1, self.count)) - self._peers.keys():
                if time.monotonic() > until:
                    raise not_connected(f"process {min(missing)} has not connected to process 0")
                with suppress(TimeoutError):
                    Peer(server.accept()[0]).start(self, token)

    def connect(self, host: str, port: int, token: bytes) -> None:
        """Connect to process 0.

        Raises:
            CoveyError: it does not answer.
        """
        try:
            connection = socket.create_connection((host, port), CONNECT_SECONDS)
            connection.sendall(token)
        except OSError as error:
            raise not_connected(f"process 0 cannot be reached at {host}:{port}: {error}") from error
        peer = Peer(connection)
        peer.start(self)
        self._greet(peer)
        with self._changed:
            if not self._changed.wait_for(lambda: self._peers, CONNECT_SECONDS):
                raise not_connected(f"process 0 does not answer at {host}:{port}")

    def _greet(self, peer: Peer) -> None:
        place = f"process {os.getpid()} on {socket.gethostname()}"
        peer.send(Message(HELLO, str(self.index), [place.encode()]))

    def all_gather(self, value: T, name: str) -> list[T]:
        """Return the `value` of every process, by process index. All must call it, with the same `name`.

        Raises:
            PeerLostError: a process is stopped, gone or has failed, or is at another place.
        """
        everyone = self._exchange(self._next_key(name), name, value)
        if len(everyone) < self.count:  # process 0 compares
            raise _apart(name, 0, "a comparison")
        return [everyone[number] for number in range(self.count)]

    def compare(self, value: T, name: str) -> dict[int, T]:
        """Return the values of process 0 and of the first process with another value, by process index; nothing if all
        are equal. All must call it, with the same `name`.

        Process 0 compares, so each process gets two values at most, and not the values of all.

        Raises:
            PeerLostError: a process is stopped, gone or has failed, or is at another place.
        """
        key = self._next_key(name)
        self._compared.add(key)
        answer = self._exchange(key, name, value)
        self._compared.discard(key)
        return answer

    def _next_key(self, name: str) -> str:
        """Return the key of the next exchange of this thread."""
        thread = "" if threading.current_thread() is self.thread else name
        with self._changed:
            self._numbers[thread] += 1
            return f"{thread}/{self._numbers[thread]}"

    def exchange(
        self, outgoing: Mapping[int, bytes | memoryview], sizes: Mapping[int, int], name: str
    ) -> dict[int, bytes]:
        """Send bytes to some processes, and return the bytes that others send, by process index. All must call it, from
        the thread that has opened the channel.

        Args:
            outgoing: bytes for each process.
            sizes: number of bytes that each process sends to this one.
            name: name of the exchange, for the log.

        Raises:
            PeerLostError: a process is stopped, gone or has failed, or sends another number of bytes.
        """
        if self._links is None:
            self._links = self._open_links()
        outgoing = {process: data for process, data in outgoing.items() if len(data)}
        sizes = {process: size for process, size in sizes.items() if size}
        self._exchanges += 1
        try:
            self._links.send(self._exchanges, outgoing)
        except OSError as error:
            verdict = self.find_lost_peer() or Verdict(f"a process cannot be reached directly: {error}")
            raise verdict.error() from error
        keys = {process: (self._exchanges, process) for process in sizes}
        self._wait(lambda: self._received.keys() >= set(keys.values()), name)
        with self._changed:
            received = {process: self._received.pop(key) for process, key in keys.items()}
        for process, data in received.items():
            if len(data) != sizes[process]:
                raise PeerLostError(f"process {process} sends {len(data)} bytes of {name!r} and not {sizes[process]}")
        return received

    def _open_links(self) -> Links:
        with self._changed:
            connections = [peer.connection for peer in self._peers.values()]
        links = Links(self.index, listen(f"{own_host(connections)}:0"), self._store)
        links.places = self.all_gather(links.place, "addresses")
        return links

    def _store(self, number: int, sender: int, data: bytes) -> None:
        with self._changed:
            self._received[number, sender] = data
            self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool], name: str, late: Callable[[], str] = lambda: OTHERS) -> None:
        """Wait for `is_over`; if that takes long, log that this process waits for `late`.

        Raises:
            PeerLostError: a process is stopped, gone or has failed.
        """

        def is_over_or_lost() -> bool:
            return self.verdict is not None or is_over()

        with self._changed:
            if not self._changed.wait_for(is_over_or_lost, REPORT_SECONDS):
                log.warning(f"waiting for {late()} at {name!r} since {REPORT_SECONDS:.0f} s")
                self._changed.wait_for(is_over_or_lost)
            if not is_over() and self.verdict is not None:
                raise self.verdict.error()

    def find_lost_peer(self, seconds: float = BLAME_SECONDS) -> Verdict | None:
        """Return the verdict, after waiting for it; None if there is none after `seconds`.

        The error of a failed device program says that some process is gone, and the verdict says which.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.verdict, seconds)
        return self.verdict

    def wait_for_peers(self) -> None:
        """Wait until all other processes have closed their connections, or at most `END_SECONDS`. The caller then ends
        this process.
        """
        self._leaves.set()
        with self._changed:
            self._changed.wait_for(lambda: not any(peer.is_open for peer in self._peers.values()), END_SECONDS)

    def leave(self, code: int) -> None:
        """End this process at once with `code` if another process is lost, which JAX's shutdown would wait for. Process
        0 ends last, because JAX aborts the others without it.
        """
        if self.verdict is None or not self.verdict.lost:
            return
        if self.index == 0:
            self.wait_for_peers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:
        """Tell the others that this process ends without an error; close the connections."""
        self._leaves.set()
        for peer in self._peers.values():
            peer.send(Message(LEAVES))
        for peer in self._peers.values():
            peer.close()
        if self._links is not None:
            self._links.close()

    def receive(self, peer: Peer, message: Message) -> None:
        """Take a message of another process."""
        if message.kind == VALUES:
            values = split_values(*message.parts) if self.index else {peer.number: message.parts[0]}
            self._add(message.key, values)
        elif message.kind == ANSWER:
            with self._changed:
                self._answers[message.key] = values_by_process(message.parts)
                self._changed.notify_all()
        elif message.kind == VERDICT:
            self._decide(Verdict(*json.loads(message.parts[0])))
        elif message.kind == HELLO:
            peer.number, peer.place = int(message.key), message.parts[0].decode()
            with self._changed:
                self._peers[peer.number] = peer
                self._changed.notify_all()
            if self.index == 0:
                self._greet(peer)
            if self.index == 0 and self.verdict is not None:  # it was decided before this one had connected
                peer.send(self.verdict.message())
        elif message.kind == LEAVES:
            peer.is_open = False

    def lose(self, peer: Peer, what: str) -> None:
        """Give up a process that has not said that it ends; close the connection of a stranger."""
        if not peer.place:
            peer.connection.close()
        elif peer.is_open:
            last = f"(last: {peer.doing}; {peer.place})"
            self._decide(Verdict(f"process {peer.number} of {self.count} {what} {last}", lost=True))
        with self._changed:
            peer.is_open = False
            self._changed.notify_all()

    def _exchange(self, key: str, name: str, value: T) -> dict[int, T]:
        """Return the values of all processes for the exchange `key`. Of a comparison these are the values in the answer
        of process 0, which has none if all are equal.
        """
        data = serialize([name, value])

        def late() -> str:
            missing = sorted(set(range(self.count)) - self._values[key].keys())
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            return OTHERS if self.index else f"processes {missing[:NAMED]}{more}"

        self._add(key, {self.index: data})
        if self.index:
            self._peers[0].send(Message(VALUES, key, [data]))
        self._wait(lambda: key in self._answers or len(self._values[key]) == self.count, name, late)
        with self._changed:
            values, answer = self._values.pop(key), self._answers.pop(key, None)
        everyone = {number: deserialize(each) for number, each in (values if answer is None else answer).items()}
        for number, (place, _) in everyone.items():
            if place != name:
                raise _apart(name, number, place)
        return {number: theirs for number, (_, theirs) in everyone.items()}

    def _add(self, key: str, values: Mapping[int, bytes]) -> None:
        """Add values of an exchange. Process 0 answers all others when it has the values of all."""
        with self._changed:
            known = self._values[key]
            known |= {number: data for number, data in values.items() if number not in known}
            if self.index == 0 and len(known) == self.count:
                answer = self._answer(key, known)
                for peer in self._peers.values():
                    peer.send(answer)
                if answer.kind == ANSWER:
                    self._answers[key] = values_by_process(answer.parts)
            self._changed.notify_all()

    def _answer(self, key: str, values: Mapping[int, bytes]) -> Message:
        """Return the answer of process 0 to all others: all values; of a comparison its own value, and the first value
        that differs with the number of its process.
        """
        if key not in self._compared:
            return Message(VALUES, key, join_values([values[number] for number in range(self.count)]))
        other = next((number for number in range(self.count) if values[number] != values[0]), None)
        return Message(ANSWER, key, [] if other is None else [str(other).encode(), values[0], values[other]])

    def _fail(self, error: BaseException) -> None:
        """Tell the others that this process has failed. If it is the first to fail, it ends with its own exit code, and
        takes part in JAX's shutdown.
        """
        verdict = verdict_on(error, self.index)
        if self.index == 0:
            self._decide(verdict)
        elif 0 in self._peers:
            self._peers[0].send(verdict.message())
        if self.find_lost_peer(2 * BEAT_SECONDS) in (None, verdict):  # process 0 sends it back
            self._leaves.set()

    def _decide(self, verdict: Verdict) -> None:
        """Make `verdict` the verdict of all processes, if there is none yet."""
        with self._changed:
            if self.verdict is None:
                self.verdict = verdict
                for peer in self._peers.values() if self.index == 0 else ():
                    peer.send(verdict.message())
            self._changed.notify_all()

    def _watch(self) -> None:
        """Give up processes that send nothing. End this process if it has not ended after a verdict."""
        # Seconds are counted in steps of the loop: a process that was halted itself must not blame the others for it.
        before = time.monotonic()
        while self.verdict is None and not self._leaves.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            for peer in list(self._peers.values()):
                peer.silent += min(now - before, BEAT_SECONDS)
                if peer.silent > self.silent:
                    self.lose(peer, f"has given no sign for {peer.silent:.0f} s")
            before = now
        if self.verdict is not None and not self.verdict.signal and not self._leaves.wait(self._seconds_to_end()):
            self._end(self.verdict.text)

    def _seconds_to_end(self) -> float:
        """Return the seconds that this process has to end by itself: more for process 0, because JAX aborts the others
        without it; none if process 0 is gone.
        """
        if self.index == 0:
            return END_SECONDS + 2 * BEAT_SECONDS
        return END_SECONDS if self._peers[0].is_open else 0.0


def _apart(name: str, number: int, place: str) -> PeerLostError:
    return PeerLostError(
        f"the processes have come apart: this one is at {name!r}, process {number} at {place!r}",
        want="the same program, settings and data in all of them",
    )


def not_connected(what: str) -> CoveyError:
    """Return the error of a process without a connection to process 0."""
    return CoveyError(
        what,
        want="one connection of each process to process 0",
        fix=f"let the machines reach each other; where single ports are open, {PORT} names one for process 0",
        where="channel",
    )


def listen(place: str) -> socket.socket:
    """Return a socket that listens at `place`, host:port: on every interface without a host, at a free port for 0.

    Raises:
        CoveyError: the address cannot be bound.
    """
    host, _, port = place.rpartition(":")
    host = host.strip("[]") or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(
            address[:2], family=family, dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6()
        )
    except OSError as error:
        raise CoveyError(
            f"this process cannot listen at {place}: {error.strerror or error}",
            want="an address of this machine and a free port",
            fix=f"where the others reach process 0 under another address, {BIND}=[::]:port listens on every interface",
            where="environment",
        ) from error
