"""Digests of local models: they follow the content, wherever it lies, and unchanged files are read once."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from covey.models.loading import cache as disk
from covey.models.loading import weights

TINY = Path(__file__).parents[2] / "parity" / "golden" / "tiny-llama"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    """A file that was written an hour ago."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return aged(path)


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 3600,) * 2)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content was hashed."""
    found: list[str] = []
    hashed = hashlib.file_digest

    def counted(stream, name):
        found.append(Path(stream.name).name)
        return hashed(stream, name)

    monkeypatch.setattr(disk.hashlib, "file_digest", counted)
    return found


def test_an_unchanged_file_is_read_once(file: Path, reads: list[str]) -> None:
    expected = hashlib.sha256(b"weights").hexdigest()
    assert [disk.files_digest([file]) for _ in range(3)] == [expected] * 3
    assert reads == ["model.gguf"]


def test_other_bytes_of_the_same_size_are_seen(file: Path, reads: list[str]) -> None:
    """Also under a time of the last write that was set back."""
    first, stat = disk.files_digest([file]), file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert disk.files_digest([file]) == hashlib.sha256(b"WEIGHTS").hexdigest() != first


def test_a_file_written_just_now_is_not_noted(file: Path, reads: list[str]) -> None:
    """A second write within the clock's resolution would leave the same time."""
    file.write_bytes(b"weights")
    assert disk.files_digest([file]) == disk.files_digest([file])
    assert len(reads) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": [1, 2]}', b"\xff", None])
def test_a_damaged_cache_is_ignored_and_mended(
    file: Path, cache: Path, reads: list[str], content: bytes | None
) -> None:
    """`None`: its entry for the file holds something that is no digest."""
    expected, kept = disk.files_digest([file]), cache / disk.DIGESTS_FILE
    entries = json.loads(kept.read_text())
    broken = json.dumps({path: [*entry[:-1], "no digest"] for path, entry in entries.items()}).encode()
    kept.write_bytes(broken if content is None else content)
    assert disk.files_digest([file]) == expected
    assert json.loads(kept.read_text()) == entries
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_time_alone(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "taken"))
    assert disk.files_digest([file]) == hashlib.sha256(b"weights").hexdigest()


def test_the_cache_does_not_grow_without_end(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_CACHED_FILES", 2)
    others = [aged(shutil.copy(file, file.with_name(f"{n}.gguf"))) for n in range(4)]
    for one in (file, *others):
        disk.files_digest([one])
    kept = json.loads((cache / disk.DIGESTS_FILE).read_text())
    assert [Path(path).name for path in kept] == ["2.gguf", "3.gguf"]


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def of(path: Path) -> str:
    return disk.files_digest(weights.checkpoint_files(path))


def test_a_folder_is_known_by_every_file_that_is_read(folder: Path) -> None:
    found = {of(folder)}
    read = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    for count, name in enumerate([*read, *shards], start=2):
        held = (folder / name).read_bytes()
        (folder / name).write_bytes(held[:-2] + b"\n\n" if name in read else held[:-1] + bytes([held[-1] ^ 1]))
        found.add(of(folder))
        assert len(found) == count, name


@pytest.mark.parametrize("name", ["README.md", "other.safetensors", "trainer_state.json"])
def test_what_is_not_read_does_not_count(folder: Path, name: str) -> None:
    before = of(folder)
    (folder / name).write_text("beside")
    assert of(folder) == before


def test_the_place_does_not_count(folder: Path) -> None:
    assert of(folder) == of(folder.rename(folder.with_name("moved"))) == of(TINY)
