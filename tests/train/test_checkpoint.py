"""Checkpoints: every bit comes back, every damage is found, and no moment to be killed at loses a finished step."""

import hashlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from covey.errors import CoveyError, ResumeError
from covey.parallel.arrays import flatten
from covey.parallel.mesh import make_mesh
from covey.train import checkpoint
from covey.train.checkpoint import Checkpointer
from covey.train.storage import CheckpointStore, take_lock

REPOSITORY = Path(checkpoint.__file__).parents[2]


def params(step: int) -> dict[str, Any]:
    key = jax.random.key(step)
    return {
        "layers": [{"kernel": jax.random.normal(key, (16, 8))}, {"kernel": jnp.full((4, 4), step, jnp.bfloat16)}],
        "scale": jnp.arange(8, dtype=jnp.float16) / (step + 1),
    }


def whole_state(step: int) -> dict[str, Any]:
    weights = params(step)
    return {
        "params": weights,
        "opt_state": optax.adam(1e-3).init(weights),
        "key": jax.random.key(step),
        "keys": jax.random.split(jax.random.key(step, impl="rbg"), 3),
        "step": jnp.int32(step),
        "flags": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
    }


def bits(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything about the leaves that has to come back."""

    def one(leaf: jax.Array) -> tuple[str, tuple[int, ...], bytes]:
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()

    return {name: one(leaf) for name, leaf in flatten(tree).items()}


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpointer]:
    """A folder with steps 1 and 2."""
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, params(step), {"seen": step})
        checkpoints.wait()
        yield checkpoints


# --- what goes in comes out


@pytest.mark.slow
def test_every_bit_comes_back(tmp_path: Path) -> None:
    state = whole_state(3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, state, {"cursor": [1, 2], "best": 0.1, "name": "é"})
        restored, extra = checkpoints.restore(target=abstract(state))
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert extra == {"cursor": [1, 2], "best": 0.1, "name": "é"}
    np.testing.assert_array_equal(jax.random.normal(restored["key"], (4,)), jax.random.normal(state["key"], (4,)))


def test_a_checkpoint_of_an_earlier_version_comes_back(tmp_path: Path) -> None:
    """`checkpoint.zip` was saved on 2026-11-25, before folders and buckets had one store."""
    shutil.unpack_archive(Path(__file__).with_name("checkpoint.zip"), tmp_path)
    with Checkpointer(tmp_path) as checkpoints:
        state, extra = checkpoints.restore(2)
        checkpoints.save(3, state)
        again, _ = checkpoints.restore(3, target=state)
    content = b"".join(f"{name} {kind} {shape}".encode() + data for name, (kind, shape, data) in bits(state).items())
    assert hashlib.sha256(content).hexdigest() == "557a6eb294ff35840c68729839810f42d546a87607118489a13c7539a3da82c3"
    assert bits(again) == bits(state)
    assert state["params"]["layers"]["1"]["kernel"].dtype == jnp.bfloat16  # without a target it is nested dicts
    assert extra == {"a": [2]}


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.sampled_from(["float32", "float16", "int32", "uint8"]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    )
)
def test_any_array_comes_back(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> None:
    """NaN payloads, −0.0 and subnormals included."""
    state = {"x": jnp.asarray(array), "y": jnp.ones(2)}
    with Checkpointer(tmp_path_factory.mktemp("any")) as checkpoints:
        checkpoints.save(0, state)
        assert bits(checkpoints.restore(target=state)[0]) == bits(state)


def test_names_and_not_classes_are_stored(tmp_path: Path) -> None:
    """Saved from an nnx state, restored into plain dicts and back into a state."""
    state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))[1]
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": state})
        plain, _ = checkpoints.restore(target={"params": nnx.to_pure_dict(state)})
        again, _ = checkpoints.restore(target={"params": state})
    assert type(plain["params"]) is dict
    assert isinstance(again["params"], nnx.State)
    assert bits(plain) == bits(again) == bits({"params": state})


def test_a_part_of_it(saved: Checkpointer) -> None:
    target = {"scale": params(0)["scale"]}
    restored, extra = saved.restore(target=target, subset=True)
    assert bits(restored) == bits({"scale": params(2)["scale"]})
    assert saved.restore(target={}, subset=True) == ({}, extra)
    with pytest.raises(ResumeError, match=r"layers\.0\.kernel is not in the target"):
        saved.restore(target=target)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_onto_another_number_of_devices(tmp_path: Path, before: int, after: int) -> None:
    def place(count: int, axis: int) -> NamedSharding:
        mesh = make_mesh((count,), ("fsdp",), jax.devices()[:count])
        return NamedSharding(mesh, P(*[None] * axis, "fsdp"))

    state = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), place(before, 0)), "n": jnp.int32(7)}
    replicated = NamedSharding(make_mesh((4,), ("fsdp",)), P())
    wanted = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=place(after, 1)),
        "n": jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored, _ = checkpoints.restore(target=wanted)
    assert bits(restored) == bits(state)
    assert restored["w"].sharding == place(after, 1)
    assert restored["n"].sharding == replicated


def test_a_target_without_shardings_lands_on_the_first_device(saved: Checkpointer) -> None:
    restored, _ = saved.restore(target=jax.eval_shape(lambda: params(0)))
    assert bits(restored) == bits(params(2))
    assert restored["scale"].sharding == SingleDeviceSharding(jax.devices()[0])


@pytest.mark.slow
def test_training_goes_on_at_once(tmp_path: Path) -> None:
    """The buffers are donated to the next steps while the save is still being written."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (2048, 2048)), "b": jnp.ones(3)}
    expected = bits(state)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(5):
            state = step(state)
        jax.block_until_ready(state)
        assert bits(checkpoints.restore(target=state)[0]) == expected


def test_extra_is_taken_as_it_is_at_the_call(tmp_path: Path) -> None:
    extra = {"seen": [1]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, params(1), extra)
        extra["seen"].append(2)
        assert checkpoints.restore()[1] == {"seen": [1]}


# --- the sequence of steps


def test_the_latest_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, max_to_keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (5, 100_000_000, 10):
            if step == 10:
                checkpoints.restore(5)
            checkpoints.save(step, params(step))
        checkpoints.save(11, params(11))
        checkpoints.wait()
        assert checkpoints.steps() == [10, 11]
        assert checkpoints.latest() == 11
        assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "00000011", "lock"]


def test_a_missing_step_says_which_there_are(saved: Checkpointer) -> None:
    with Checkpointer(saved.folder / "new") as empty, pytest.raises(ResumeError, match="no checkpoint here"):
        empty.restore()
    with pytest.raises(ResumeError, match=r"no checkpoint 7(.|\n)*\[1, 2\]"):
        saved.restore(7)


def test_a_step_saved_again_is_replaced(saved: Checkpointer) -> None:
    saved.save(2, params(9))
    assert bits(saved.restore(2, params(0))[0]) == bits(params(9))
    assert saved.steps() == [1, 2]


def test_after_going_back_the_future_is_dropped(saved: Checkpointer) -> None:
    """Otherwise the next resume would take the abandoned step for the latest."""
    saved.save(3, params(3))
    saved.restore(1, params(0))
    saved.save(2, params(22))
    saved.wait()
    assert saved.steps() == [1, 2]
    assert bits(saved.restore(target=params(0))[0]) == bits(params(22))


def test_a_new_run_does_not_write_into_an_old_ones_folder(saved: Checkpointer) -> None:
    with pytest.raises(ResumeError, match="checkpoint 1 would come before 2") as caught:
        saved.save(1, params(1))
    assert "resume from 2" in caught.value.fix
    assert saved.steps() == [1, 2]


# --- damage


def files_of(saved: Checkpointer, step: int) -> list[Path]:
    return [path for path in sorted((saved.folder / f"{step:08d}").rglob("*")) if path.is_file()]


@pytest.mark.slow
def test_one_flipped_bit_anywhere_is_found_and_named(saved: Checkpointer) -> None:
    checked = 0
    for path in files_of(saved, 2):
        good = path.read_bytes()
        for place in {0, len(good) // 2, len(good) - 1} if good else ():
            bad = bytearray(good)
            bad[place] ^= 4
            path.write_bytes(bad)
            with pytest.raises(ResumeError, match="checkpoint 2 is damaged") as caught:
                saved.restore(target=params(0))
            assert "go on from 1" in caught.value.fix
            assert path.name in caught.value.what or path.name == "SHA256SUMS"
            checked += 1
        path.write_bytes(good)
    assert checked > 20
    assert bits(saved.restore(target=params(0))[0]) == bits(params(2))


def test_truncated_missing_and_added_files(saved: Checkpointer) -> None:
    folder = saved.folder / "00000002"
    data = max((folder / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    good = data.read_bytes()
    data.write_bytes(good[:-1])
    with pytest.raises(ResumeError, match=f"{data.name} changed"):
        saved.restore()
    data.unlink()
    with pytest.raises(ResumeError, match=f"{data.name} is missing"):
        saved.restore()
    data.write_bytes(good)
    (folder / "arrays" / "odd").write_text("")
    with pytest.raises(ResumeError, match="odd is not listed"):
        saved.restore()
    (folder / "arrays" / "odd").unlink()
    sums = (folder / "SHA256SUMS").read_text()
    for text in ("", sums[: len(sums) // 2], sums.splitlines()[0] + "\n"):
        (folder / "SHA256SUMS").write_text(text)
        with pytest.raises(ResumeError, match="damaged"):
            saved.restore()
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(ResumeError, match="SHA256SUMS cannot be read"):
        saved.restore()


def test_the_damaged_are_passed_over_when_an_earlier_step_is_offered(saved: Checkpointer) -> None:
    saved.save(3, params(3))
    saved.wait()
    for step in (2, 3):
        (saved.folder / f"{step:08d}" / "meta.json").write_text("{}")
    with pytest.raises(ResumeError, match="go on from 1"):
        saved.restore()
    (saved.folder / "00000001" / "meta.json").write_text("{}")
    with pytest.raises(ResumeError, match="no earlier checkpoint is whole"):
        saved.restore()


def test_digests_are_those_of_sha256sum(saved: Checkpointer) -> None:
    folder = saved.folder / "00000001"
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


# --- a target that does not fit


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": jnp.zeros(8, jnp.float32)}, r"scale was saved as float16\[8\], wanted is float32\[8\]"),
        ({"scale": jnp.zeros(4, jnp.float16)}, r"scale was saved as float16\[8\], wanted is float16\[4\]"),
        ({"scale": jax.random.key(0)}, r"scale was saved as float16\[8\], wanted is key<fry>\[\]"),
        ({"bias": jnp.zeros(4)}, "bias is not in the checkpoint"),
        ({f"w{n}": jnp.zeros(2) for n in range(20)}, "and 15 more"),
        ({"layers": []}, r"layers\.0\.kernel is not in the target"),
    ],
)
def test_a_misfit_is_named(saved: Checkpointer, change: dict[str, Any], says: str) -> None:
    """Orbax alone would cast a float16 leaf to the float32 asked for."""
    with pytest.raises(ResumeError, match=says):
        saved.restore(target=params(0) | change)


@pytest.mark.parametrize("leaf", [1.5, np.zeros(3), "text"])
def test_what_is_no_array_belongs_into_extra(tmp_path: Path, leaf: Any) -> None:
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(CoveyError, match=r"'a\.b'") as caught:
        checkpoints.save(1, {"a": {"b": leaf}})
    assert "extra" in caught.value.fix


def test_extra_that_is_not_json_leaves_nothing_behind(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(TypeError):
            checkpoints.save(1, params(1), {"x": object()})
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


# --- one writer


def test_a_second_writer_is_refused_and_the_first_named(saved: Checkpointer) -> None:
    with pytest.raises(ResumeError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        Checkpointer(saved.folder)
    saved.close()
    Checkpointer(saved.folder).close()


def test_a_lock_is_waited_for_as_long_as_a_killed_launch_may_hold_it(
    saved: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """One of several processes was killed, and process 0 of that launch has not ended yet."""
    with pytest.raises(ResumeError, match=f"writes its checkpoints here: process {os.getpid()} "):
        take_lock(saved.folder, patience=0.2)
    timer = threading.Timer(0.2, saved.close)
    timer.start()
    take_lock(saved.folder, patience=20.0).close()
    timer.join()
    assert caplog.text.count(f"is in use by process {os.getpid()} ") == 2


def test_a_lock_whose_holder_removes_the_folder_is_not_taken(tmp_path: Path) -> None:
    saves = Checkpointer(tmp_path / "run" / "checkpoints")
    timer = threading.Timer(0.2, lambda: (shutil.rmtree(tmp_path / "run"), saves.close()))
    timer.start()
    with pytest.raises(ResumeError, match="removed its folder at its end"):
        take_lock(saves.folder, patience=20.0)
    timer.join()
    assert not (tmp_path / "run").exists()


def test_a_reader_needs_no_lock_and_cannot_write_nor_can_a_closed_one(saved: Checkpointer) -> None:
    with Checkpointer(saved.folder, read_only=True) as reader:
        assert bits(reader.restore(target=params(0))[0]) == bits(params(2))
        with pytest.raises(CoveyError, match="opened to be read"):
            reader.save(3, params(3))
    saved.close()
    saved.close()
    with pytest.raises(CoveyError, match="closed"):
        saved.save(3, params(3))
    with Checkpointer(saved.folder / "nowhere", read_only=True) as reader:
        assert reader.latest() is None
    assert not (saved.folder / "nowhere").exists()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResumeError, match="cannot be written"):
        Checkpointer(tmp_path / "file" / "checkpoints")


def test_leftovers_are_finished_or_removed(saved: Checkpointer) -> None:
    saved.close()
    folder = saved.folder
    shutil.copytree(folder / "00000002", folder / "00000003.partial")  # sealed, not yet in place
    shutil.copytree(folder / "00000002", folder / "00000004.partial")
    (folder / "00000004.partial" / "SHA256SUMS").unlink()  # not yet whole
    (folder / "00000005.partial" / "SHA256SUMS").mkdir(parents=True)  # nor ever
    shutil.copytree(folder / "00000001", folder / "00000000.old")  # on its way out
    (folder / "notes").mkdir()  # not ours
    with Checkpointer(folder) as again:
        assert again.steps() == [1, 2, 3]
        assert bits(again.restore(target=params(0))[0]) == bits(params(2))
    assert {path.name for path in folder.iterdir()} == {"00000001", "00000002", "00000003", "lock", "notes"}


@pytest.mark.parametrize("name", ["00000003.partial", "00000000.old"])
def test_a_stray_file_in_the_way_is_named_and_kept(saved: Checkpointer, name: str) -> None:
    saved.close()
    (saved.folder / name).write_text("mine")
    with pytest.raises(ResumeError, match=f"{name}: a file is in the way\n.*\n  fix: move it elsewhere"):
        Checkpointer(saved.folder)
    assert (saved.folder / name).read_text() == "mine"
    (saved.folder / name).unlink()
    Checkpointer(saved.folder).close()  # whoever was refused holds no lock


def test_a_stray_file_that_is_not_in_the_way_stays(saved: Checkpointer) -> None:
    """Checkpoints have names of eight digits."""
    saved.close()
    (saved.folder / "7.partial").write_text("mine")
    with Checkpointer(saved.folder) as again:
        again.save(7, params(7))
        again.wait()
        assert again.steps() == [1, 2, 7]
    assert (saved.folder / "7.partial").read_text() == "mine"


@pytest.mark.parametrize("name", ["00000003.partial", "00000003"])
def test_a_file_where_a_step_goes_is_named_when_it_is_saved(saved: Checkpointer, name: str) -> None:
    (saved.folder / name).write_text("mine")
    with pytest.raises(ResumeError, match=f"{name}: a file is in the way"):
        saved.save(3, params(3))
    assert (saved.folder / name).read_text() == "mine"
    assert saved.steps() == [1, 2]


@pytest.mark.parametrize("seal", ["a folder", "no text", "empty, and nothing beside it"])
def test_a_seal_that_is_none_is_damage_and_the_last_whole_step_is_named(saved: Checkpointer, seal: str) -> None:
    sums = saved.folder / "00000002" / "SHA256SUMS"
    sums.unlink()
    if seal == "a folder":
        sums.mkdir()
    elif seal == "no text":
        sums.write_bytes(b"\xff\xfe\n")
    else:
        shutil.rmtree(sums.parent)
        sums.parent.mkdir()
        sums.touch()
    with pytest.raises(ResumeError, match="checkpoint 2 is damaged: ") as caught:
        saved.restore()
    assert caught.value.fix.startswith("remove this folder to go on from 1")


def test_a_full_disk_is_reported_and_the_steps_before_stay(saved: Checkpointer, capfd: Any, caplog: Any) -> None:
    """The kernel refuses files above a megabyte; Orbax would log its tracebacks on top."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        saved.save(3, {"w": jax.random.normal(jax.random.key(0), (2048, 1024))})
        saved.wait_until_read()  # raises nothing
        with pytest.raises(ResumeError, match="checkpoint 3 could not be written"):
            saved.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Traceback" not in capfd.readouterr().err + caplog.text
    assert saved.steps() == [1, 2]
    assert sorted(path.name for path in saved.folder.iterdir()) == ["00000001", "00000002", "lock"]
    saved.save(3, params(3))
    assert bits(saved.restore(target=params(0))[0]) == bits(params(3))


@pytest.mark.parametrize(("address", "tool"), [("s3://bucket/run", "mount-s3"), ("gs://bucket/run", "gcsfuse")])
def test_an_object_store_is_refused_by_name(
    address: str, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trap: a path takes it for a folder `s3:` in the working directory."""
    monkeypatch.chdir(tmp_path)
    for folder in (address, Path(address)):
        with pytest.raises(CoveyError, match=f"{address[:5]} addresses") as refused:
            Checkpointer(folder)
        assert tool in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_failure_is_raised_by_the_next_save(saved: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "commit", full)
    saved.save(3, params(3))
    saved.wait_until_read()  # raises nothing
    with pytest.raises(ResumeError, match="No space left"):
        saved.save(4, params(4))


# --- killed


WRITER = """
    import json, os, signal, sys
    import jax, numpy as np
    from covey.train.checkpoint import Checkpointer

    def tell(word):
        os.write(1, f"{word}\\n".encode())  # one write, so that a kill cannot come between a word and its end

    def die_at(name, count):
        call = getattr(os, name)
        def counted(*args, **kwargs):
            nonlocal count
            count -= 1
            if count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        setattr(os, name, counted)

    def state(step):
        key = jax.random.wrap_key_data(np.array([0, step], np.uint32))
        return {"w": jax.device_put(np.full((64, 64), step, np.float32) / 3), "key": key}

    def write(folder, where=None, count=0):
        with Checkpointer(folder, max_to_keep=2) as checkpoints:
            step = checkpoints.latest() or 0
            if where:
                die_at(where, count)
            while True:
                step += 1
                for _ in range(2):  # the second replaces the first
                    checkpoints.save(step, state(step), {"step": step})
                    checkpoints.wait()
                    tell(step)

    for line in sys.stdin:
        child = os.fork()  # before JAX has a thread
        if not child:
            write(*json.loads(line))
        tell(child)
        _, status = os.waitpid(child, 0)
        tell(f"ended {os.waitstatus_to_exitcode(status)}")
"""
KILLED = f"ended {-signal.SIGKILL}"


@pytest.fixture(scope="module")
def writer() -> Iterator[Any]:
    """`writer(folder)`: the number of a new process, which writes checkpoints without end, and with `(folder, "rename",
    3)` dies at that call of `os.rename`. `writer()`: the next step that it has saved, or its end.
    """
    command = [sys.executable, "-c", textwrap.dedent(WRITER)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as process:  # type: ignore[call-overload]

        def ask(*words: Any) -> str:
            if words:
                process.stdin.write(json.dumps(list(words)) + "\n")
                process.stdin.flush()
            return str(process.stdout.readline().strip())

        yield ask
        process.stdin.close()


def told_before_death(writer: Any) -> list[int]:
    """The steps that the process has saved since it was asked last."""
    return [int(line) for line in iter(writer, KILLED)]


def expected_state(step: int) -> dict[str, Any]:
    return {"w": jnp.full((64, 64), np.float32(step) / 3), "key": jax.random.key(step)}


def check_after_death(folder: Path, finished: int) -> None:
    """The lock is free, no finished step is lost, the latest is whole, and nothing lies about."""
    with Checkpointer(folder, max_to_keep=2) as checkpoints:
        latest = checkpoints.latest()
        assert (latest or 0) >= finished
        for step in checkpoints.steps():
            restored, extra = checkpoints.restore(step, expected_state(0))
            assert bits(restored) == bits(expected_state(step))
            assert extra == {"step": step}
        assert {path.name for path in folder.iterdir()} == {"lock", *(f"{step:08d}" for step in checkpoints.steps())}
        assert len(checkpoints.steps()) <= 3  # one more than kept when the removal was interrupted


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, writer: Any) -> None:
    draw, finished = random.Random(0), 0
    for _ in range(10):
        process = int(writer(str(tmp_path)))
        for _ in range(draw.randrange(1, 6)):
            finished = int(writer())
        time.sleep(draw.uniform(0.0, 0.15))
        with pytest.raises(ResumeError, match=f"process {process} on"):
            Checkpointer(tmp_path)
        os.kill(process, signal.SIGKILL)
        finished = max([finished, *told_before_death(writer)])
        check_after_death(tmp_path, finished)
    assert finished > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "counts"),
    [("rename", range(1, 7)), ("replace", (1, 2, 3, 4)), ("fsync", (1, 9, 25)), ("unlink", (1, 5, 9, 30))],
)
def test_killed_between_two_operations_on_files(tmp_path: Path, where: str, counts: Any, writer: Any) -> None:
    finished = 0
    for count in counts:
        assert int(writer(str(tmp_path), where, count))
        finished = max([finished, *told_before_death(writer)])
        check_after_death(tmp_path, finished)


# --- memory


def test_arrays_that_were_read_are_donated_without_a_copy(tmp_path: Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jax.random.normal(jax.random.key(0), (512, 512))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.wait_until_read()  # nothing was saved yet
        checkpoints.save(1, {"w": state})
        checkpoints.wait_until_read()
        address = state.unsafe_buffer_pointer()
        assert step(state).unsafe_buffer_pointer() == address


def test_an_array_may_be_larger_than_what_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap: Orbax refuses an array that is as large as its limit."""
    monkeypatch.setattr("covey.train.checkpoint.MAX_CONCURRENT_BYTES", 2**10)
    state = {"w": jnp.arange(2**10, dtype=jnp.float32)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        assert np.array_equal(checkpoints.restore(1, target=state)[0]["w"], state["w"])


GROWTH = """
import sys
from pathlib import Path
import jax
from covey.train import checkpoint

def megabytes(name):
    status = Path("/proc/self/status").read_text()
    return int(status.split(name + ":")[1].split()[0]) / 2**10

checkpoint.MAX_CONCURRENT_BYTES = 2**23
drawn = jax.random.normal(jax.random.key(0), (2**19,))
state = {f"w{i}": drawn * (i + 1) for i in range(60)}  # as little to be compressed as new draws, and soon made
with checkpoint.Checkpointer(sys.argv[1]) as saves:
    saves.save(1, {"w": state["w0"]})
    saves.wait()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = megabytes("VmRSS")
    saves.save(2, state)
    saves.wait()
print(megabytes("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc, and counts on glibc")
def test_a_save_holds_no_second_copy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert float(found.stdout) < 60  # of 120 MiB of state, with 8 MiB in flight
