"""Processes share one order of programs, one checkpoint and one export; one that is stopped or killed is named. This
file is also what the processes run: `test_hosts.py work SILENT`, `test_hosts.py save FOLDER ADDRESS`.
"""

import filecmp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from covey.config.processes import PEER_LOST
from covey.config.schema import MeshConfig
from covey.errors import CoveyError, ResumeError
from covey.models.export import write_hf
from covey.models.loading import weights
from covey.parallel import channel, distributed, make_mesh, mesh_from_config, order, shardings
from covey.train.checkpoint import Checkpointer
from covey.train.storage import CheckpointStore, FolderStore

STOPPED = 2
"""The process that halts itself."""


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except CoveyError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def say(*what: object) -> None:
    print(*what, flush=True)


def work(silent: float) -> None:
    """All checks in turn; at the end one process halts, one waits for it in a phase and one in a device program."""
    with joined(silent) as (me, count):
        assert channel.all_gather(f"from {me}", "test") == [f"from {number}" for number in range(count)]
        started = time.perf_counter()
        for step in range(100):
            with order.phase("update", step, (4, 128)):
                pass
        say("ms", 10 * (time.perf_counter() - started))
        say("order", refused(lambda: enter("sample" if me == 1 else "update", 7)))
        say("shapes", refused(lambda: enter("update", 7, (4 + me, 128))))
        thread = threading.Thread(target=lambda: say("thread", refused(lambda: enter("sync", 8))), name="producer")
        thread.start()
        thread.join()
        total, x = program(count)
        channel.all_gather(None, "compiled")
        if me == STOPPED:
            say("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        if me == 1:
            total(x).block_until_ready()
        say("lost", refused(lambda: enter("update", 100)))
        time.sleep(60)


@contextmanager
def joined(silent: float) -> Iterator[tuple[int, int]]:
    distributed.initialize(os.environ)
    with channel.opened("127.0.0.1", 0, silent):
        yield jax.process_index(), jax.process_count()


def enter(name: str, step: int, program: Any = "") -> None:
    with order.phase(name, step, program):
        pass


def program(count: int) -> tuple[Any, jax.Array]:
    mesh = make_mesh((count,), ("fsdp",), jax.devices())
    host = np.arange(count, dtype=np.float32)
    x = jax.make_array_from_callback(host.shape, NamedSharding(mesh, P("fsdp")), lambda at: host[at])
    total = jax.jit(jnp.sum)
    assert float(total(x).addressable_shards[0].data) == host.sum()
    return total, x


# Checkpoints and exports: 2 processes of 2 devices against 1 of 4.

MODEL = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
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

    def put_shards(path: str, host: np.ndarray) -> jax.Array:
        return put(host, shardings({path: host}, mesh)[path])

    return weights.load(MODEL, param_dtype="bfloat16", put=put_shards)


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
        if channel.all_gather(step, "crossing") != [step, step] or not np.all(found.addressable_data(0) == 1):
            return False
    return True


def save(folder: Path, address: str) -> None:
    """Resume what another number of processes saved; save, export, and be killed in the middle of two saves, one of
    them in a bucket.
    """
    with (
        joined(6.0) as (me, _),
        Checkpointer(folder / "saves") as saves,
        Checkpointer(folder / "far", address=address) as far,
    ):
        mesh = grid(4, 1)
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


@pytest.mark.slow
def test_three_processes_keep_one_order_and_name_the_one_that_is_stopped(processes: Any) -> None:
    started = processes.start([__file__, "work", "6"], 3, devices=1)
    texts = processes.end(started, [PEER_LOST, PEER_LOST, -signal.SIGKILL], halted=STOPPED)
    shown = "\n\n".join(texts)
    assert "process 0 wants to launch 'update' of step 7, process 1 'sample' of step 7" in texts[0], shown
    assert "process 1 wants to launch 'sample' of step 7, process 0 'update' of step 7" in texts[1], shown
    assert "process 2 wants to launch 'update' of step 7, process 1 'sample' of step 7" in texts[2], shown
    assert "with other shapes or another program than process 0" in texts[1]
    for number, text in enumerate(texts):
        assert f"process {number}: the thread 'producer' wants to launch 'sync' of step 8" in text
    assert "lost PeerLostError: process 2 of 3 has given no sign for" in texts[0]
    assert f"process {started[2].pid} on" in texts[0]
    assert "covey: process 2 of 3 has given no sign for" in texts[1]
    assert float(texts[0].partition("ms ")[2].split()[0]) < 100


@pytest.mark.slow
def test_two_processes_save_and_export_together_and_a_killed_one_leaves_the_last_whole_step(
    tmp_path: Path, bucket: Any, processes: Any
) -> None:
    """Process 1 is killed in the middle of the third save, on the disk and in a bucket."""
    folder, mesh = tmp_path / "saves", grid(2, 2)
    with Checkpointer(folder) as saves:
        saves.save(1, state(1, mesh), {"from": "one"})
    (tmp_path / "one").mkdir()
    loaded = loaded_on(mesh)
    write_hf(loaded.model, loaded.tokenizer, tmp_path / "one", source=MODEL, shard_size=20_000)
    started = processes.start([__file__, "save", str(tmp_path), f"{bucket.address}/runs/two"], 2)
    texts = processes.end(started, [PEER_LOST, -signal.SIGKILL])
    shown = "\n\n".join(texts)
    assert "process 1 of 2 is gone" in texts[0], shown
    for text in texts:
        assert "crossing True" in text, shown
        assert "restored True {'from': 'one'}" in text, shown
        assert "own files 1" in text
        assert "far True" in text
        assert "checkpoint 1 would come before 2" in text
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
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(ResumeError, match=r"ocdbt\.process_1"):
            saves.restore(2)
    left = [name for name in bucket.names() if "/00000003/" in name]
    assert any("ocdbt.process_1" in name for name in left)
    with Checkpointer(tmp_path / "far") as saves:
        assert saves.steps() == [2]
        assert not [name for name in bucket.names() if "/00000003/" in name]
        assert is_right(saves.restore(target=state(0, grid(1, 4)))[0], 2, grid(1, 4))
    assert any(FolderStore(folder).damage(2, (part, 9)) for part in (0, 1))


if __name__ == "__main__":
    work(float(sys.argv[2])) if sys.argv[1] == "work" else save(Path(sys.argv[2]), sys.argv[3])
