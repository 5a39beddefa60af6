"""Threads that stand for the processes of a run, with a real channel between them; and processes."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.config.processes import ADDRESS, COUNT, NUMBER
from covey.parallel import processes
from covey_hosts.several import Several

TOKEN = b"0123456789abcdef"


class Threads:
    """Calls a function in several threads, each of which believes to be a process.

    Attributes:
        own: `index` and `channel` of the process that a thread stands for.
        ended: verdicts by which processes were ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.own, self.ended = threading.local(), list[str]()
        monkeypatch.setattr(processes, "here", lambda: getattr(self.own, "channel", processes.ALONE))

    def __call__(self, count: int, function: Callable[[int], Any]) -> list[Any]:
        """What each returned or raised."""
        results = list[Any]([None] * count)
        server, over = socket.create_server(("127.0.0.1", 0)), threading.Barrier(count, timeout=20)
        port = server.getsockname()[1]

        def run(index: int) -> None:
            self.own.index = index
            end = Several(index, count, end=self.ended.append)
            try:
                with end as self.own.channel:
                    end.connect("127.0.0.1", port, TOKEN) if index else end.accept(server, TOKEN)
                    results[index] = function(index)
            except BaseException as error:
                results[index] = error
            over.wait()
            end.close()

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


class Processes:
    """Starts processes that find each other, and waits until they have ended."""

    def start(
        self,
        words: Sequence[str],
        count: int,
        folder: Path | None = None,
        environments: Sequence[Mapping[str, str]] = (),
        devices: int = 2,
    ) -> list[subprocess.Popen[str]]:
        """`python words`, in this folder and with these variables each."""
        common = os.environ | {
            "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={devices}"),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        common |= {ADDRESS: f"127.0.0.1:{free_port()}", COUNT: str(count)} if count > 1 else {}
        own = [{NUMBER: str(number)} if count > 1 else {} for number in range(count)]
        return [
            subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=common | own[number] | (environments[number] if environments else {}),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for number in range(count)
        ]

    def end(
        self, started: Sequence[subprocess.Popen[str]], codes: Sequence[int], halted: int | None = None
    ) -> list[str]:
        """What each said on its way to these exit codes. One that is `halted`, or lives longer, is killed."""
        until, texts = time.monotonic() + 500, {}
        try:
            for number, process in enumerate(started):
                if number != halted:
                    texts[number] = process.communicate(timeout=max(until - time.monotonic(), 1))[0]
        finally:
            for process in started:
                process.kill()
        if halted is not None:
            texts[halted] = started[halted].communicate()[0]
        shown = "\n\n".join(text[-3000:] for text in texts.values())
        assert [process.returncode for process in started] == list(codes), shown
        return [texts[number] for number in range(len(started))]


@pytest.fixture(scope="session")
def host() -> Processes:
    return Processes()


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
