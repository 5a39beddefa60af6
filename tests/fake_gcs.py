"""Cloud Storage server for tests: the part of the JSON API that tensorstore's driver uses, with objects in memory."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

MISSING: tuple[bytes, int] = (b"", 0)


class FakeGcs(ThreadingHTTPServer):
    """Server on a free port of this machine.

    Attributes:
        objects: content and generation of each object, by bucket/name.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.lock = threading.Lock()
        self.generation = 0

    @property
    def address(self) -> str:
        """Address of a bucket that no other server has: the driver keeps the connection to each."""
        return f"gs://covey-{self.server_address[1]}"

    def environment(self) -> dict[str, str]:
        """Return the variables that lead tensorstore to this server."""
        url = f"http://127.0.0.1:{self.server_address[1]}"
        return {"TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none"}

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in list(self.objects) if name.startswith(prefix))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for headers and body: the kernel delays the second
    server: FakeGcs

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts, query = self._request()
        if parts[0] == "storage" and parts[4:] == ["o"]:
            return self._list(parts[3], query)
        name = f"{parts[3]}/{parts[5]}"
        content, generation = self.server.objects.get(name, MISSING)
        if not generation:
            return self._answer(404)
        if query.get("alt") != "media":
            return self._answer(200, json.dumps(self._described(name)).encode())
        headers = {"x-goog-generation": str(generation)}
        if found := self.headers.get("Range"):
            first, last = (int(end) if end else None for end in found.removeprefix("bytes=").split("-"))
            part = content[first : None if last is None else last + 1] if first is not None else content[-(last or 0) :]
            start = first if first is not None else len(content) - len(part)
            headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
            return self._answer(206, part, headers)
        return self._answer(200, content, headers)

    def do_POST(self) -> None:
        parts, query = self._request()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = f"{parts[4]}/{query['name']}"
        with self.server.lock:
            there = self.server.objects.get(name, MISSING)[1]
            if int(query.get("ifGenerationMatch", there)) != there:
                return self._answer(412)
            self.server.generation += 1
            self.server.objects[name] = (body, self.server.generation)
        self._answer(200, json.dumps(self._described(name)).encode())

    def do_DELETE(self) -> None:
        parts, _ = self._request()
        with self.server.lock:
            there = self.server.objects.pop(f"{parts[3]}/{parts[5]}", MISSING)[1]
        self._answer(204 if there else 404)

    def _request(self) -> tuple[list[str], dict[str, str]]:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        return [unquote(part) for part in url.path.strip("/").split("/")], query

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, start, end = query.get("prefix", ""), query.get("startOffset", ""), query.get("endOffset")
        after = query.get("pageToken", "")
        names = [name.removeprefix(f"{bucket}/") for name in self.server.names(f"{bucket}/{prefix}")]
        names = [name for name in names if name >= start and (end is None or name < end) and name > after]
        page = names[: int(query.get("maxResults", 1000))]
        found: dict[str, object] = {"items": [self._described(f"{bucket}/{name}") for name in page]}
        if len(page) < len(names):
            found["nextPageToken"] = page[-1]
        self._answer(200, json.dumps(found).encode())

    def _described(self, name: str) -> dict[str, str]:
        content, generation = self.server.objects[name]
        bucket, _, key = name.partition("/")
        return {"name": key, "bucket": bucket, "size": str(len(content)), "generation": str(generation)}

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
