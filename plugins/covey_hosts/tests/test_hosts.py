"""Processes share one checkpoint and one export, and one that is killed is named. This file is also what the processes
run: `test_hosts.py FOLDER ADDRESS`.
"""

import filecmp
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import covey
from covey.cli.main import main
from covey.config.processes import PEER_LOST
from covey.config.schema import MeshConfig
from covey.errors import CoveyError, ResumeError
from covey.models.loading import weights
from covey.parallel import make_mesh, mesh_from_config, processes
from covey.train.checkpoint import Checkpointer
from covey.train.storage import CheckpointStore
from covey_formats.hf import write_hf
from covey_hosts.several import opened
from covey_hosts.start import initialize


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except CoveyError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def say(*what: object) -> None:
    print(*what, flush=True)


# Checkpoints and exports: 2 processes of 2 devices against 1 of 4.

MODEL = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"
SHAPES = {"grid": (P("fsdp", "tp"), (64, 96)), "columns": (P(None, "fsdp"), (32, 8)), "whole": (P(), (5,))}


def grid(fsdp: int, tp: int) -> Mesh:
    return make_mesh((fsdp, tp), ("fsdp", "tp"), jax.devices())


def put(host: np.ndarray, place: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(host.shape, place, lambda at: host[at])


def values(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {name: random.normal(size=shape).astype(np.float32) for name, (_, shape) in SHAPES.items()}


def state(step: int, mesh: Mesh) -> dict[str, Any]:
    places = {name: NamedSharding(mesh, spec) for name, (spec, _) in SHAPES.items()}
    arrays = {name: put(host, places[name]) for name, host in values(step).items()}
    key = jax.jit(lambda: jax.random.key(step), out_shardings=NamedSharding(mesh, P()))()
    return {"params": arrays, "key": key, "step": jnp.int32(step)}


def is_right(found: Any, step: int, mesh: Mesh) -> bool:
    """Return whether this process's shards are those of `state`, with the layout on `mesh`."""
    wanted = state(step, mesh)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
        if leaf.dtype == other.dtype and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            pairs = zip(leaf.addressable_shards, other.addressable_shards, strict=True)
            assert all(np.array_equal(one.data, two.data) for one, two in pairs)
    return True


def loaded_on(mesh: Mesh) -> weights.LoadedModel[Any]:
    """The model, with each process's shards alone on its devices."""
    return weights.load(MODEL, param_dtype="bfloat16", mesh=mesh)


def crossing() -> bool:
    """Return whether programs on one device of each process, and the exchanges over all devices behind them, are right
    in every round: when both ran at once, each took the other's messages.
    """
    mesh = mesh_from_config(MeshConfig(fsdp=2))
    assert mesh is not None
    x = put(np.ones((512, 256), np.float32), NamedSharding(mesh, P("fsdp")))

    def spread(x: jax.Array) -> jax.Array:
        for _ in range(20):
            x = jnp.tanh(x @ (x.T @ x))  # a sum over both
        return jax.lax.with_sharding_constraint(0 * x + 1, NamedSharding(mesh, P()))

    whole = jax.jit(spread)
    whole(x).block_until_ready()
    for step in range(20):
        found = whole(x)
        if processes.here().all_gather(step, "crossing") != [step, step] or not np.all(found.addressable_data(0) == 1):
            return False
    return True


def save(folder: Path, address: str) -> None:
    """Refuse to train; resume what another number of processes saved; save, export, and be killed in the middle of two
    saves, one of them in a bucket.
    """
    initialize(os.environ)
    with (
        opened("127.0.0.1", 0, silent=6.0),
        Checkpointer(folder / "saves") as saves,
        Checkpointer(folder / "far", address=address) as far,
    ):
        me, mesh = processes.here().index, grid(4, 1)
        say("trained", main(["train", "quickstart", f"--model.source={MODEL}", f"--out={folder / 'run'}"]))
        say("crossing", crossing())
        found, extra = saves.restore(1, state(0, mesh))
        say("restored", is_right(found, 1, mesh), extra)
        saves.save(2, state(2, mesh), {"from": me})
        saves.wait()
        say("own files", len(list((folder / "saves" / "00000002").rglob(f"ocdbt.process_{me}"))))
        loaded = loaded_on(grid(2, 2))
        write_hf(loaded.model, loaded.tokenizer, folder / "two", source=MODEL, shard_size=20_000)
        say("refused", refused(lambda: saves.save(1, state(1, mesh))))
        far.save(2, state(2, mesh), {"from": me})
        far.wait()
        say("far", is_right(far.restore(2, state(0, mesh))[0], 2, mesh))
        if me == 1:
            both = threading.Barrier(2)

            def die(*_: object) -> dict[str, str]:
                both.wait()
                os.kill(os.getpid(), signal.SIGKILL)
                return {}

            CheckpointStore.local_digests = die
        far.save(3, state(3, mesh))
        saves.save(3, state(3, mesh))
        saves.wait()


def changed_package(place: Path) -> Path:
    """Return a folder with a copy of the package in which the advantage is negated."""
    shutil.copytree(Path(covey.__file__).parent, place / "covey")
    with (place / "covey" / "losses" / "advantages.py").open("a") as file:
        file.write("\n\ngroup_zscore = lambda rewards, z=group_zscore: -z(rewards)\n")
    return place


@pytest.mark.slow
def test_two_processes_save_and_export_together_and_a_killed_one_leaves_the_last_whole_step(
    tmp_path: Path, bucket: Any, host: Any
) -> None:
    """Process 1 is killed in the middle of the third save, on the disk and in a bucket. It has other code: together
    they train nothing.
    """
    folder, mesh = tmp_path / "saves", grid(2, 2)
    with Checkpointer(folder) as saves:
        saves.save(1, state(1, mesh), {"from": "one"})
    (tmp_path / "one").mkdir()
    loaded = loaded_on(mesh)
    write_hf(loaded.model, loaded.tokenizer, tmp_path / "one", source=MODEL, shard_size=20_000)
    roots = [Path(covey.__file__).parents[1], changed_package(tmp_path / "package")]
    words = [__file__, str(tmp_path), f"{bucket.address}/runs/two"]
    started = host.start(words, 2, environments=[{"PYTHONPATH": str(root)} for root in roots])
    texts = host.end(started, [PEER_LOST, -signal.SIGKILL])
    shown = "\n\n".join(texts)
    assert "process 1 of 2 is gone" in texts[0], shown
    for text in texts:
        assert "covey/losses/advantages.py is another file" in text, shown
        assert "trained 2" in text
        assert "crossing True" in text, shown
        assert "restored True {'from': 'one'}" in text, shown
        assert "own files 1" in text
        assert "far True" in text
        assert "checkpoint 1 would come before 2" in text
    assert not (tmp_path / "run").exists()
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", names, shallow=False) == (names, [], [])
    assert sum(name.endswith(".safetensors") for name in names) > 1

    with Checkpointer(folder) as saves:
        assert saves.steps() == [1, 2]
        assert not list(folder.glob("*.partial*"))
        found, extra = saves.restore(target=state(0, grid(1, 4)))
        assert is_right(found, 2, grid(1, 4))
        assert extra == {"from": 0}
        file = max((folder / "00000002").rglob("ocdbt.process_1/**/*"), key=lambda path: path.stat().st_size)
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ResumeError, match=r"ocdbt\.process_1"):
            saves.restore(2)
    left = [name for name in bucket.names() if "/00000003/" in name]
    assert any("ocdbt.process_1" in name for name in left)
    with Checkpointer(tmp_path / "far") as saves:
        assert saves.steps() == [2]
        assert not [name for name in bucket.names() if "/00000003/" in name]
        assert is_right(saves.restore(target=state(0, grid(1, 4)))[0], 2, grid(1, 4))
    assert any(CheckpointStore(folder).damage(2, (part, 9)) for part in (0, 1))


if __name__ == "__main__":
    save(Path(sys.argv[1]), sys.argv[2])
