"""Who may ask the server, and how the command refuses what would let others in."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.testclient import TestClient

from covey.config.schema import RolloutConfig
from covey.errors import CoveyError
from covey_report import http
from covey_report.http import server_config
from covey_serve import body, remote_chat
from covey_serve.app import make_app
from covey_serve.errors import ApiError
from covey_serve.metrics import Metrics
from covey_serve.options import ServeOptions
from covey_serve.server import is_loopback, listen, read_key, serve

KEY = "tml-0123456789abcdef"


@pytest.fixture
def clients() -> Any:
    """`clients(key)`: a client of an application without a model, whose errors are answers."""
    device = SimpleNamespace(failure=None, counts=lambda: (0, 0))
    service: Any = SimpleNamespace(metrics=Metrics(), device=device, limits=SimpleNamespace(body=100))

    def make(key: str | None = None) -> TestClient:
        return TestClient(make_app(service, key=key), base_url="http://127.0.0.1:8000", raise_server_exceptions=False)

    return make


def test_without_a_key_this_machine_alone_may_ask(clients: Any) -> None:
    client = clients()
    for host, status in {
        "127.0.0.1": 200, "localhost:8000": 200, "[::1]:80": 200, "evil.example": 403, "127.0.0.1.evil.example": 403,
        "evil.example:8000": 403, "": 403, "[::1]evil.example": 403,
    }.items():  # fmt: skip
        assert client.get("/metrics", headers={"host": host}).status_code == status, host


def test_a_page_of_another_site_cannot_send_a_form(clients: Any) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = clients().post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert answer.status_code == 415


def test_with_a_key_every_request_must_have_it(clients: Any) -> None:
    client = clients(KEY)
    for headers, status in (
        ({}, 401), ({"authorization": f"Bearer {KEY}"}, 200), ({"x-api-key": KEY}, 200), ({"x-api-key": KEY[:-1]}, 401),
        ({"authorization": "Bearer "}, 401), ({"x-api-key": "é".encode()}, 401), ({"authorization": KEY}, 200),
    ):  # fmt: skip
        assert client.get("/metrics", headers={"host": "any.example", **headers}).status_code == status, headers
    assert client.get("/metrics").json()["error"]["code"] == "invalid_api_key"
    assert client.get("/health").status_code == 200


def test_a_new_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = read_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key.startswith("tml-")
    assert len(key) > 40
    assert read_key(file) == key
    file.chmod(0o640)
    with pytest.raises(CoveyError, match="others may use this key: its mode is 640"):
        read_key(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(CoveyError, match="no key of 16 characters"):
        read_key(file)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        read_key(tmp_path / "link")


def test_an_address_for_others_needs_a_key() -> None:
    with pytest.raises(CoveyError, match="can be reached from other machines"):
        serve("nowhere", ServeOptions(host="0.0.0.0"))
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "::", "example.org")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_port_in_use_is_said_so() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(CoveyError, match="--port 0 takes a free one"):
        listen("127.0.0.1", listener.getsockname()[1])


def test_the_help_of_the_command_needs_no_server() -> None:
    blocked = "import sys; sys.modules |= dict.fromkeys(('starlette', 'uvicorn', 'jax'))"
    code = f"{blocked}\nfrom covey.cli.main import main\nsys.exit(main(['serve', '--help']))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.count("\n  covey serve ") == 3
    assert "--key-file" in shown


@pytest.mark.slow
def test_a_server_that_is_terminated_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "covey", "serve", "scratch:arithmetic-tiny", "--port", "0"]
    sizes = ["--rollout.max-prompt-length", "16", "--rollout.max-new-tokens", "8", "--slots", "2"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, *sizes], stdout=subprocess.PIPE, text=True, env=environment) as server:
        lines: Any = server.stdout
        assert next(line for line in lines if line.startswith("listening on "))
        assert list(tmp_path.glob("covey-serve-*"))
        server.terminate()
    assert server.returncode == 0
    assert not list(tmp_path.glob("covey-serve-*"))


def test_headers_that_do_not_arrive_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a second request; a body and an answer may take longer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.3)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def read(port: int, *parts: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.5)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer

    async def check(listener: Any) -> tuple[bytes, ...]:
        server = uvicorn.Server(server_config(app, 10))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port, whole = listener.getsockname()[1], b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n"
        requests = ([b"POST / HT"], [], [whole, b"x", b"GET / HTTP/1.1\r\nhost"])
        found = await asyncio.gather(*(read(port, *parts) for parts in requests))
        server.should_exit = True
        await serving
        return tuple(found)

    monkeypatch.setattr(http, "HEADER_SECONDS", 0.2)
    with listen("127.0.0.1", 0) as listener:
        slow, silent, second = asyncio.run(check(listener))
    assert slow == silent == b""
    assert second.endswith(b"ok")


def test_more_connections_than_there_may_be_leave_those_that_are_there() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def check(listener: Any) -> list[int]:
        server = uvicorn.Server(server_config(app, 3))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        opened = [await asyncio.open_connection("127.0.0.1", listener.getsockname()[1]) for _ in range(5)]
        answered = []
        for number in (0, 1, 2, 3, 4, 0):
            reader, writer = opened[number]
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                await asyncio.wait_for(reader.readuntil(b"ok"), 30)
                answered.append(number)
        for _, writer in opened:
            writer.close()
        server.should_exit = True
        await serving
        return answered

    with listen("127.0.0.1", 0) as listener:
        assert asyncio.run(check(listener)) == [0, 1, 2, 0]


def test_a_chat_with_a_server_sends_all_that_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "mine"}]})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            text = f"answer \x1b[31m{len(asked)}"
            self.answer({"choices": [{"message": {"content": text}}]}, 400 if len(asked) > 2 else 200)

        def answer(self, value: Any, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_: Any) -> None: ...

    asked = list[Any]()
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        lines = iter(["one", "two", "three"])
        monkeypatch.setattr("builtins.input", lambda _: next(lines))
        with pytest.raises(CoveyError, match=r"refuses \(400\)"):
            remote_chat.chat(f"http://127.0.0.1:{server.server_port}/", "", RolloutConfig(temperature=0.5))
        server.shutdown()
    assert [one["role"] for one in asked[1]["messages"]] == ["user", "assistant", "user"]
    assert (asked[0]["model"], asked[0]["temperature"]) == ("mine", 0.5)
    assert "answer" in (shown := capsys.readouterr().out)
    assert "\x1b" not in shown  # a model's control characters do not reach the terminal


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(body, "SECONDS", 0.01)
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(ApiError, match="did not arrive within") as caught:
        asyncio.run(body.read_bytes(request, 10))
    assert caught.value.status == 408
