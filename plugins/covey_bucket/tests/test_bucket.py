"""Checkpoints in a bucket: a step in it is whole or is not taken for one, and belongs to one run. The server is a small
one of our own on this machine (`tests/fake_gcs.py`).
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from covey.config import recipe
from covey.config.schema import RLTrainingConfig, SFTConfig
from covey.errors import CoveyError, RecipeError, ResumeError
from covey.train.checkpoint import Checkpointer
from covey.train.storage import POINTER, SUMS
from covey_bucket.bucket import IDENTITY, Bucket


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(6.0) * step, "key": jax.random.key(step), "empty": jnp.zeros((0, 2))}


def is_right(found: Any, step: int) -> bool:
    same = np.array_equal(found["w"], state(step)["w"])
    return same and bool(jax.random.key_data(found["key"]).tolist() == jax.random.key_data(state(step)["key"]).tolist())


def below(bucket: Any, folder: str) -> list[str]:
    place = f"{bucket.address[5:]}/{folder}/"
    return [name.removeprefix(place) for name in bucket.names(place)]


@pytest.mark.slow
def test_steps_in_a_bucket_are_kept_found_and_verified_and_leftovers_removed(bucket: Any, tmp_path: Path) -> None:
    folder, address = tmp_path / "checkpoints", f"{bucket.address}/runs/one"
    with Checkpointer(folder, 2, address=address) as saves:
        assert saves.latest() is None
        for step in (1, 2, 3):
            saves.save(step, state(step), {"at": step})
        saves.wait()
        assert saves.steps() == [2, 3]
        assert saves.address == address
    assert {path.name for path in folder.iterdir()} == {"lock", POINTER}
    names = below(bucket, "runs/one")
    assert {name.partition("/")[0] for name in names} == {"00000002", "00000003", IDENTITY}
    assert "00000003/arrays/state/manifest.ocdbt" in names

    place = bucket.address[5:] + "/runs/one"
    bucket.objects.pop(f"{place}/00000003/{SUMS}")  # as if the writer were killed before it
    with Checkpointer(folder, read_only=True) as saves:
        assert saves.latest() == 2
        assert "00000003/meta.json" in below(bucket, "runs/one")
    with Checkpointer(folder) as saves:
        assert not [name for name in below(bucket, "runs/one") if name.startswith("00000003")]
        found, extra = saves.restore(target=state(0))
        assert is_right(found, 2)
        assert extra == {"at": 2}
        before = bucket.objects[f"{place}/00000002/{SUMS}"][1]
        saves.save(2, state(2))  # in its place
        saves.wait()
        assert bucket.objects[f"{place}/00000002/{SUMS}"][1] > before
    data = next(name for name in bucket.names(f"{place}/00000002") if "/d/" in name)
    content, generation = bucket.objects[data]
    bucket.objects[data] = content[:-1] + bytes([content[-1] ^ 1]), generation
    with Checkpointer(folder, read_only=True) as saves, pytest.raises(ResumeError, match="changed since") as damaged:
        saves.restore()
    assert f"{address}/00000002" in str(damaged.value)


def test_an_address_belongs_to_the_run_that_took_it(bucket: Any, tmp_path: Path) -> None:
    address = f"{bucket.address}/runs/two"
    with Checkpointer(tmp_path / "a", address=address):
        with pytest.raises(ResumeError, match="checkpoints of another run are at this address"):
            Checkpointer(tmp_path / "b", address=address)
        assert not (tmp_path / "b" / POINTER).exists()
    bucket.objects[f"{address[5:]}/{IDENTITY}"] = b"another", 1
    with pytest.raises(ResumeError, match="checkpoints of another run"):
        Checkpointer(tmp_path / "a")
    identity = json.loads((tmp_path / "a" / POINTER).read_text())["run"]
    bucket.objects[f"{address[5:]}/{IDENTITY}"] = identity.encode(), 1
    with Checkpointer(tmp_path / "a") as saves:
        saves.release()
    assert below(bucket, "runs/two") == []


def test_of_two_writers_one_creates_an_object(bucket: Any) -> None:
    objects = Bucket(f"{bucket.address}/objects")
    assert objects.create("x/y", b"one")
    assert not objects.create("x/y", b"two")
    objects.write("x.y", b"")
    assert objects.names("x/") == ["x/y"]
    assert objects.names() == ["x.y", "x/y"]
    with pytest.raises(FileNotFoundError, match="there is no such object"):
        objects.read("x")


def test_orbax_finds_its_files_through_our_file_system(bucket: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, address=f"{bucket.address}/files/run"):
        pass
    folder = epath.Path(f"{bucket.address}/files/run/deep")
    assert not folder.exists()
    (folder / "name").write_text("text")
    assert (folder / "name").read_text() == "text"
    assert folder.is_dir()
    assert [path.name for path in folder.parent.iterdir()] == ["deep", IDENTITY]
    (folder / "name").unlink()
    assert not folder.exists()
    with pytest.raises(FileNotFoundError):
        (folder / "name").read_text()


@pytest.mark.parametrize("path", ["s3://bucket/runs", "runs", "gs://", "gs://bucket/a?b"])
def test_other_places_are_refused_before_anything_is_loaded(path: str, bucket: Any, tmp_path: Path) -> None:
    for settings in (RLTrainingConfig, SFTConfig):
        with pytest.raises(RecipeError, match="s3:// is not supported"):
            settings(checkpoint_path=path)
    with pytest.raises(CoveyError, match="no address in a bucket"):
        Checkpointer(tmp_path, address=path)


def test_a_run_names_its_folder_in_the_bucket() -> None:
    from covey.run.folder import _address

    chosen = recipe.load("quickstart", ["training.checkpoint_path=gs://bucket/runs/"])
    assert _address(Path("/here/mine"), chosen) == "gs://bucket/runs/mine"
    assert _address(Path("/here/mine"), recipe.load("quickstart")) == ""
