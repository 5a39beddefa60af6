"""Processes that would launch different programs are refused, and one that is stopped is named. This file is also what
the processes run: `test_order.py SILENT`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from covey.config.processes import ADDRESS, COUNT, NUMBER, PEER_LOST
from covey.launch.local import _free_port
from covey.parallel import joining, liveness, make_mesh, order
from covey.parallel.liveness import PeerLostError
from covey.parallel.order import LaunchOrder, OrderError
from covey.parallel.store import CoordinationStore, exchange

STOPPED = 2
"""The process that halts itself."""


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (OrderError, PeerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def say(*what: object) -> None:
    print(*what, flush=True)


def work(silent: float) -> None:
    """All checks in turn; at the end one process halts, one waits for it in a phase and one in a device program."""
    joining.join(os.environ)
    me, count = jax.process_index(), jax.process_count()
    with liveness.watching(silent):
        assert exchange(f"from {me}", "test") == [f"from {number}" for number in range(count)]
        started = time.perf_counter()
        for step in range(100):
            with order.phase("update", step, (4, 128)):
                pass
        say("ms", 10 * (time.perf_counter() - started))
        other = LaunchOrder(CoordinationStore(), me, count, name="another")
        say("order", refused(lambda: other.enter("sample" if me == 1 else "update", 7)))
        other = LaunchOrder(CoordinationStore(), me, count, name="shapes")
        say("shapes", refused(lambda: other.enter("update", 7, (4 + me, 128))))
        thread = threading.Thread(target=lambda: say("thread", refused(lambda: enter("sync", 8))), name="producer")
        thread.start()
        thread.join()
        total, x = program(count)
        exchange("compiled", "test")
        if me == STOPPED:
            say("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        if me == 1:
            total(x).block_until_ready()
        say("lost", refused(lambda: enter("update", 100)))
        time.sleep(60)


def enter(name: str, step: int) -> None:
    with order.phase(name, step):
        pass


def program(count: int) -> tuple[Any, jax.Array]:
    mesh = make_mesh((count,), ("fsdp",), jax.devices())
    host = np.arange(count, dtype=np.float32)
    x = jax.make_array_from_callback(host.shape, NamedSharding(mesh, PartitionSpec("fsdp")), lambda at: host[at])
    total = jax.jit(jnp.sum)
    assert float(total(x).addressable_shards[0].data) == host.sum()
    return total, x


def processes(count: int, devices: int, words: list[str]) -> list["subprocess.Popen[str]"]:
    """Start this many processes that find each other, with so many devices each."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={devices}")
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        ADDRESS: f"127.0.0.1:{_free_port()}",
        COUNT: str(count),
    }
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env=environment | {NUMBER: str(number)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(count)
    ]


@pytest.mark.slow
def test_three_processes_keep_one_order_and_name_the_one_that_is_stopped() -> None:
    started = processes(3, 1, [__file__, "6"])
    try:
        texts = [started[number].communicate(timeout=120)[0] for number in (0, 1)]
    finally:
        for process in started:
            process.kill()
    texts.append(started[2].communicate()[0])
    shown = "\n\n".join(texts)
    assert [process.returncode for process in started] == [PEER_LOST, PEER_LOST, -signal.SIGKILL], shown
    assert "process 0 wants to launch 'update' of step 7, process 1 'sample' of step 7" in texts[0], shown
    assert "process 1 wants to launch 'sample' of step 7, process 0 'update' of step 7" in texts[1], shown
    assert "order not refused" in texts[2]
    assert "with other shapes or another program than process 0" in texts[1]
    for number, text in enumerate(texts):
        assert f"process {number}: the thread 'producer' wants to launch 'sync' of step 8" in text
    assert "lost PeerLostError: process 2 of 3 has given no sign for" in texts[0]
    assert f"process {started[2].pid} on" in texts[0]
    assert "covey: process 2 of 3 has given no sign for" in texts[1]
    assert float(texts[0].partition("ms ")[2].split()[0]) < 100


def test_one_process_needs_no_order() -> None:
    with liveness.watching(), order.phase("update", 1), order.phase("update", 0):
        assert liveness.current() is None
    assert exchange("alone", "test") == ["alone"]


if __name__ == "__main__":
    work(float(sys.argv[1]))
