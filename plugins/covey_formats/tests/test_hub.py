"""`hf:` sources through the real huggingface_hub, against a hub on this machine's loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": bytes(100_000),
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
    "README.md": b"not wanted",
}
WANTED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download needs: revision, tree, files."""

    refuse: frozenset[str] = frozenset()
    """Files whose download breaks off."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urlsplit(self.path).path
        if path in (
            "/api/models/org/tiny/revision/main",
            f"/api/models/org/tiny/revision/{COMMIT}",
            "/api/models/org/tiny",
        ):
            files = [{"rfilename": name} for name in FILES]
            return self.answer({"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": files})
        if path.startswith("/api/models/org/tiny/tree/"):
            oid = lambda data: hashlib.sha1(data).hexdigest()  # noqa: E731
            return self.answer([{"type": "file", "path": n, "size": len(d), "oid": oid(d)} for n, d in FILES.items()])
        prefix = f"/org/tiny/resolve/{COMMIT}/"
        if path.startswith(prefix) and path[len(prefix) :] in FILES:
            return self.file(path[len(prefix) :])
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, value: object):
        self.reply(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def file(self, name: str):
        data = FILES[name]
        self.reply(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, name in self.refuse)

    def reply(self, data: bytes, headers: dict[str, str], cut: bool = False):
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def log_message(self, *_: object):
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Hub.refuse = frozenset()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


RESOLVE = """
import sys
from covey.errors import WeightsError
from covey.models.loading import sources

for source in sys.argv[1:]:
    try:
        print(*sources.resolve_source(source))
    except WeightsError as error:
        print("error:", *str(error).split())
"""


def resolve(server: ThreadingHTTPServer, home: Path, *sources: str, **settings: str) -> list[str]:
    """Path and origin of each source, or its error, in a process of its own: the package reads settings but once."""
    address = f"http://127.0.0.1:{server.server_address[1]}"
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home), "COVEY_CACHE": str(home), "NO_PROXY": "127.0.0.1"}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"} | settings
    command = [sys.executable, "-c", RESOLVE, *sources]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_repository_is_fetched_pinned_and_found_again_offline(server: ThreadingHTTPServer, tmp_path: Path):
    first, unknown = resolve(server, tmp_path, "hf:org/tiny", "hf:org/nothing")
    path, origin = first.split()
    assert origin == f"hf:org/tiny@{COMMIT}"
    assert sorted(str(p.relative_to(path)) for p in Path(path).rglob("*") if p.is_file()) == WANTED
    assert (Path(path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "the hub has no 'org/nothing'" in unknown
    for settings in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        assert resolve(server, tmp_path, "hf:org/tiny", origin, **settings) == [first, first]


def test_a_snapshot_cut_short_is_never_used(server: ThreadingHTTPServer, tmp_path: Path):
    Hub.refuse = frozenset({"model.safetensors"})
    assert "download of hf:org/tiny" in resolve(server, tmp_path, "hf:org/tiny", HF_HUB_DOWNLOAD_TIMEOUT="2")[0]
    assert "not on this disk in full" in resolve(server, tmp_path, "hf:org/tiny", HF_HUB_OFFLINE="1")[0]
    Hub.refuse = frozenset()
    assert resolve(server, tmp_path, "hf:org/tiny")[0].endswith(f" hf:org/tiny@{COMMIT}")
