"""Direct connections between the processes of a run, for arrays that not all of them need: these do not pass process 0.

Each process listens at a free port of the address at which it reaches process 0. Addresses go over the control channel,
each with a token that must come first on a connection. A connection is made with the first message, and has messages in
one direction: the number of the exchange and the number of bytes, 8 bytes each, then the bytes. The thread that
exchanges sends; another one receives from all processes, so that two that send to each other do not wait.
"""

import hmac
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress

Place = tuple[str, int, str]
"""Host and port of a process, and the token that begins a connection to it."""
Incoming = Generator[int, bytearray, None]
"""The messages of a connection: yields the number of bytes that come next, and takes them."""
HEAD = struct.Struct("<QQ")
CONNECT_SECONDS = 60.0
CHECK_SECONDS = 1.0
"""Seconds after which the thread that receives looks whether it is to end."""


class Links:
    """The direct connections of one process.

    Args:
        index: index of this process.
        server: socket that the others connect to.
        store: called with the number of an exchange, the sender and its bytes, in another thread.

    Attributes:
        token: what must come first on a connection to this process.
        places: where each process listens; set before anything is sent.
    """

    def __init__(self, index: int, server: socket.socket, store: Callable[[int, int, bytearray], None]):
        self.token, self.places = secrets.token_hex(16), list[Place]()
        self._index, self._server, self._store = index, server, store
        self._connections: dict[int, socket.socket] = {}
        self._closed = False
        threading.Thread(target=self._receive_all, name="links", daemon=True).start()

    @property
    def place(self) -> Place:
        """Where this process listens."""
        host, port = self._server.getsockname()[:2]
        return host, port, self.token

    def send(self, number: int, outgoing: Mapping[int, bytes | memoryview]) -> None:
        """Send each process its bytes, those with the next index first, so that not all send to one at a time.

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
        self._closed = True
        for connection in self._connections.values():
            connection.close()

    def _connect(self, process: int) -> socket.socket:
        host, port, token = self.places[process]
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token.encode() + self._index.to_bytes(4, "little"))
        self._connections[process] = connection
        return connection

    def _receive_all(self) -> None:
        with self._server, selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select(CHECK_SECONDS):
                    if key.data is None:
                        connection = self._server.accept()[0]
                        selector.register(connection, selectors.EVENT_READ, _Reader(connection, self._messages()))
                    elif not key.data.read():
                        selector.unregister(key.fileobj)
                        key.data.connection.close()
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    key.data.connection.close()

    def _messages(self) -> Incoming:
        if not hmac.compare_digest((yield len(self.token)), self.token.encode()):
            return
        sender = int.from_bytes((yield 4), "little")
        while True:
            number, size = HEAD.unpack((yield HEAD.size))
            self._store(number, sender, (yield size))


class _Reader:
    """Reads a connection in pieces, as they come."""

    def __init__(self, connection: socket.socket, messages: Incoming):
        self.connection, self._messages = connection, messages
        self._data, self._filled = bytearray(next(messages)), 0

    def read(self) -> bool:
        """Read what has come; return whether more may come. A connection that has closed is left to the channel, which
        tells whether its process is gone.
        """
        with suppress(OSError, StopIteration):
            size = self.connection.recv_into(memoryview(self._data)[self._filled :])
            self._filled += size
            if self._filled == len(self._data):
                self._data, self._filled = bytearray(self._messages.send(self._data)), 0
            return size > 0
        return False


def own_host(connections: Sequence[socket.socket]) -> str:
    """Return the address of this machine on connections to other processes: the first that others may reach."""
    hosts: list[str] = [connection.getsockname()[0].removeprefix("::ffff:") for connection in connections]
    return next((host for host in hosts if not host.startswith("127.") and host != "::1"), hosts[0])
