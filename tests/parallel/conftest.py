"""Threads that stand for the processes of a run; the channel between them is a real one."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from covey.parallel import channel, distributed
from covey.parallel.channel import Channel

TOKEN = b"0123456789abcdef"


class Threads:
    """Calls a function in several threads, each of which believes to be a process.

    Attributes:
        own: `index` and `channel` of the process that a thread stands for.
        ended: verdicts by which processes were ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.own, self.count, self.ended = threading.local(), 1, list[str]()
        monkeypatch.setattr(distributed, "index", lambda: getattr(self.own, "index", 0))
        monkeypatch.setattr(distributed, "count", lambda: self.count)
        monkeypatch.setattr(channel, "current", lambda: getattr(self.own, "channel", None))

    def __call__(self, count: int, function: Callable[[int], Any]) -> list[Any]:
        """What each returned or raised."""
        self.count, results = count, list[Any]([None] * count)
        server, over = socket.create_server(("127.0.0.1", 0)), threading.Barrier(count, timeout=20)
        port = server.getsockname()[1]

        def run(index: int) -> None:
            self.own.index = index
            end = Channel(index, count, end=self.ended.append)
            try:
                with end as self.own.channel:
                    end.connect("127.0.0.1", port, TOKEN) if index else end.accept(server, TOKEN)
                    results[index] = function(index)
            except BaseException as error:
                results[index] = error
            over.wait()
            end.close()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)
