"""Connections between the processes of a run: `Peer` is a connection of the control channel. `Links` are the direct
connections, for arrays that not all processes need.

Each process listens at a free port of the address at which it reaches process 0. Addresses go over the control channel,
each with a token that must come first on a connection. A connection is made with the first message, and has messages in
one direction: the number of the exchange and the number of bytes, 8 bytes each, then the bytes. The thread that
exchanges sends. Each connection has a thread that receives, so that two processes may send to each other at once.
"""

import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from covey_hosts.wire import BEAT, LEAVES, Message

if TYPE_CHECKING:
    from covey_hosts.channel import Channel  # to which connections hand over what arrives

Place = tuple[str, int, str]
"""Host and port of a process, and the token that begins a connection to it."""
HEAD = struct.Struct("<QQ")
CONNECT_SECONDS = 60.0
"""Seconds that the processes have to connect, once all have joined JAX's coordination service."""
BEAT_SECONDS = 1.0


class Peer:
    """Connection to another process. One thread receives. Another thread sends messages, and a beat when there is none.
    Each piece of a message counts as a sign of life, so a large message looks like no lost process.

    Attributes:
        number: index of the process.
        place: its process id and host.
        doing: its last phase.
        silent: seconds without a sign of it, as far as this process was running.
        is_open: whether it may still send something.
    """

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number, self.place, self.doing = 0, "", "start"
        self.silent, self.is_open = 0.0, True
        self.connection, self._outgoing = connection, SimpleQueue[Message]()
        self._threads: Sequence[threading.Thread] = ()

    def start(self, channel: "Channel", token: bytes = b"") -> None:
        """Start to hand over messages to `channel`, after `token` has come. A stranger without the token is sent
        nothing, and is disconnected after `CONNECT_SECONDS`.
        """
        work = partial(self._receive_all, channel, token), partial(self._send_all, channel)
        self._threads = [threading.Thread(target=each, name="channel", daemon=True) for each in work]
        self.connection.settimeout(CONNECT_SECONDS)
        self._threads[0].start()

    def send(self, message: Message) -> None:
        """Send `message`, without waiting for it."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Wait a moment until both sides have said that they end; close the connection."""
        for thread in self._threads:
            thread.join(2 * BEAT_SECONDS)
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def write(self, message: Message) -> None:
        """Write `message` to the connection: 4 bytes, the length of a JSON list, that list, and the parts."""
        sizes = [len(part) for part in message.parts]
        head = json.dumps([message.kind, message.key, message.doing, sizes]).encode()
        for data in (len(head).to_bytes(4, "big") + head, *message.parts):
            self.connection.sendall(data)

    def read(self) -> Message:
        """Read the next message.

        Raises:
            EOFError: the connection has closed.
        """
        kind, key, self.doing, sizes = json.loads(self.read_bytes(int.from_bytes(self.read_bytes(4), "big")))
        return Message(kind, key, [self.read_bytes(size) for size in sizes])

    def read_bytes(self, size: int) -> bytes:
        """Read `size` bytes. Each piece that arrives is a sign of life."""
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            if not (received := self.connection.recv_into(rest)):
                raise EOFError
            self.silent, rest = 0.0, rest[received:]
        return bytes(data)

    def _receive_all(self, channel: "Channel", token: bytes) -> None:
        try:
            if not hmac.compare_digest(self.read_bytes(len(token)), token):
                raise EOFError
            self.connection.settimeout(None)
            self._threads[1].start()
            while self.is_open:
                channel.receive(self, self.read())
        except (OSError, EOFError):
            channel.lose(self, "is gone")

    def _send_all(self, channel: "Channel") -> None:
        message = Message(BEAT)
        with suppress(OSError):  # the thread that receives tells it
            while message.kind != LEAVES:
                try:
                    message = self._outgoing.get(timeout=channel.beat_seconds)
                except Empty:
                    message = Message(BEAT)
                self.write(message._replace(doing=channel.doing))


class Links:
    """The direct connections of one process.

    Args:
        index: index of this process.
        server: socket that the others connect to.
        store: called with the number of an exchange, the sender and its bytes, in other threads.

    Attributes:
        token: the bytes, as text, that must come first on a connection to this process.
        places: host, port and token of each process; set before anything is sent.
    """

    def __init__(self, index: int, server: socket.socket, store: Callable[[int, int, bytes], None]):
        self.token, self.places = secrets.token_hex(16), list[Place]()
        self._index, self._server, self._store = index, server, store
        self._connections: dict[int, socket.socket] = {}
        threading.Thread(target=self._accept_all, name="links", daemon=True).start()

    @property
    def place(self) -> Place:
        """Host and port of this process, and its token."""
        host, port = self._server.getsockname()[:2]
        return host, port, self.token

    def send(self, number: int, outgoing: Mapping[int, bytes | memoryview]) -> None:
        """Send each process its bytes, from the next index on, so that not all processes send to one at a time.

        Raises:
            OSError: a process cannot be reached.
        """
        count = len(self.places)
        for process in sorted(outgoing, key=lambda other: (other - self._index) % count):
            connection = self._connections.get(process) or self._connect(process)
            connection.sendall(HEAD.pack(number, len(outgoing[process])))
            connection.sendall(outgoing[process])

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._server, *self._connections.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
            connection.close()

    def _connect(self, process: int) -> socket.socket:
        host, port, token = self.places[process]
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token.encode() + self._index.to_bytes(4, "little"))
        self._connections[process] = connection
        return connection

    def _accept_all(self) -> None:
        with suppress(OSError):  # the server is closed
            while True:
                connection = self._server.accept()[0]
                threading.Thread(target=self._receive_all, args=(connection,), name="links", daemon=True).start()

    def _receive_all(self, connection: socket.socket) -> None:
        """Store the messages that come after the token. Only the channel judges whether a process is gone."""
        connection.settimeout(CONNECT_SECONDS)
        with connection, suppress(OSError), connection.makefile("rb") as stream:
            if not hmac.compare_digest(stream.read(len(self.token)), self.token.encode()):
                return
            connection.settimeout(None)
            sender = int.from_bytes(stream.read(4), "little")
            while len(head := stream.read(HEAD.size)) == HEAD.size:
                number, size = HEAD.unpack(head)
                if len(data := stream.read(size)) == size:
                    self._store(number, sender, data)


def own_host(connections: Sequence[socket.socket]) -> str:
    """Return the address of this machine on connections to other processes: the first that others may reach."""
    hosts: list[str] = [connection.getsockname()[0].removeprefix("::ffff:") for connection in connections]
    return next((host for host in hosts if not host.startswith("127.") and host != "::1"), hosts[0])
