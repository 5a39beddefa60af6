"""`covey push`: what is published, after which question, and what is refused."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from covey.cli import main as cli
from covey.cli.commands import COMMANDS
from covey.cli.help import page
from covey.monitor.run_files import run_files
from covey_formats import export as exporting
from tests.cli.test_runs import write_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class FakeHub(BaseHTTPRequestHandler):
    """A hub that has one user, and keeps in `files` what is committed."""

    files: ClassVar[dict[str, bytes]] = {}
    created: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Bearer hf_right"
        self.answer({"name": "me", "type": "user"} if known else {"error": "Invalid token"}, 200 if known else 401)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"http://{self.headers['Host']}/me/run", "name": "me/run"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.answer({"files": [{"path": one["path"], **how} for one in json.loads(body)["files"]]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/me/run/commit/1"
            self.answer({"commitUrl": url, "commitOid": "1", "success": True})
        else:
            self.answer({"error": "not found"}, 404)

    def answer(self, value: Any, code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    """The fake hub, in the place of the real one; exports write one small file instead of a model."""
    constants = pytest.importorskip("huggingface_hub.constants")

    def export(source: str, out: Path, *_: Any) -> None:
        out.mkdir()
        (out / "README.md").write_text("card")

    FakeHub.files, FakeHub.created = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr(exporting, "export", export)
    yield FakeHub
    server.shutdown()
    server.server_close()


def test_a_run_is_published_with_its_records(hub: type[FakeHub], capsys: Any) -> None:
    run = write_run("runs/mine")
    assert cli.main(["push", "runs/mine", "hf:me/run", "--yes", "--private"]) == 0
    shown = capsys.readouterr().out
    assert "text of your data and of the model becomes public, in report.html" in shown
    asked = hub.created[0]
    assert asked.get("visibility") == "private" or asked["private"] is True  # by the version of the client
    assert hub.files.keys() == {"README.md", "recipe.yaml", "metrics.jsonl", "summary.json", "report.html"}
    assert hub.files["metrics.jsonl"] == (run / "metrics.jsonl").read_bytes()
    assert b"secret question" in hub.files["report.html"]
    assert shown.splitlines()[-1].endswith("/me/run")


def test_data_can_be_left_out_or_put_in(hub: type[FakeHub], capsys: Any) -> None:
    write_run("mine")
    assert cli.main(["push", "mine", "hf:me/run", "--yes", "--no-report"]) == 0
    assert "becomes public" not in capsys.readouterr().out
    assert "report.html" not in hub.files
    assert cli.main(["push", "mine", "hf:me/run", "--yes", "--samples"]) == 0
    assert {"report.html", "samples.jsonl"} <= hub.files.keys()
    assert "becomes public, in samples.jsonl and report.html" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "summary.json", "samples.jsonl", "report.html"])
def test_nothing_that_a_link_leads_to_is_published(hub: type[FakeHub], name: str, capsys: Any) -> None:
    run, mine = write_run("theirs"), Path("id_rsa")
    mine.write_bytes((run / name).read_bytes() if (run / name).exists() else b"secret")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine.absolute())
    assert cli.main(["push", "theirs", "hf:me/run", "--yes", "--samples"]) == 2
    assert f"theirs/{name}: a link is in the way" in capsys.readouterr().err
    assert (hub.files, hub.created) == ({}, [])


def test_what_is_published_stands_in_the_table_and_in_the_help() -> None:
    published = {file.name for file in run_files() if file.publish != "never"}
    assert published == {"recipe.yaml", "metrics.jsonl", "summary.json", "samples.jsonl", "report.html"}
    assert all(name in page(COMMANDS["push"]) for name in published)


def test_nothing_is_published_without_consent(hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_run("mine")
    assert cli.main(["push", "mine", "hf:me/run"]) == 2
    assert "fix: --yes, if that is meant" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code in (("n", 2), ("", 2), ("yes", 0)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert cli.main(["push", "mine", "hf:me/run", "--no-report"]) == code
        assert bool(hub.files) is (code == 0)


def test_without_a_login_nothing_is_exported(hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_run("mine")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert cli.main(["push", "mine", "hf:me/run", "--yes"]) == 2
    assert "fix: hf auth login" in capsys.readouterr().err
    assert hub.files == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["push", "mine"], "an argument is missing"),
        (["push", "nowhere", "hf:me/run"], "this is no run folder"),
        (["push", "begun", "hf:me/run"], "this run has no checkpoint yet"),
        (["push", "mine", "hf:me/run", "--format", "guff"], "did you mean 'gguf'?"),
    ],
)
def test_what_cannot_be_published_is_refused(words: list[str], told: str, capsys: Any) -> None:
    write_run("mine")
    (write_run("begun") / "checkpoints" / "00000020").rmdir()
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err
