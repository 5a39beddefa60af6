"""A board of made-up runs, whose files and browser are those of the tests of reports."""

import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest


class Client:
    """Requests to a board at `port`."""

    def __init__(self, port: int):
        self.port, self.url = port, f"http://127.0.0.1:{port}/"

    def ask(self, path: str, method: str = "GET", host: str = "127.0.0.1") -> SimpleNamespace:
        """Return status, headers and text of the answer; the path is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={"Host": f"{host}:{self.port}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return SimpleNamespace(status=answer.status, headers=answer.headers, text=text)


@pytest.fixture
def serving() -> None:
    """Skip the test where the extra `serve` is not installed."""
    pytest.importorskip("uvicorn")


@pytest.fixture
def serve(serving: None) -> Iterator[Callable[[Path], Client]]:
    """A function that serves the runs of a folder, and returns a client of the server."""
    from covey_report.board import app  # late: it needs the extra `serve`
    from covey_report.board.folder import RunsFolder

    running = []

    def start(folder: Path) -> Client:
        listener = app.listen(0)
        server = app.make_server(RunsFolder(folder))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread, listener))
        return Client(listener.getsockname()[1])

    yield start
    for server, thread, listener in running:
        server.should_exit = True
        thread.join()
        listener.close()
