"""Benchmark of the host's work in a step of several processes, played in one process.

Two parts, each a table and a line of JSON. *groups*: seconds and memory that one process of 1, 8 and 64 needs for the
groups of a step: their table, the assignment to rows, the rows of its own devices, the inputs of the loss. What other
processes would send is zeros of the same size, so the time on the network is not in it. Beside it the work of a process
that receives all groups and packs all rows. *control*: the control channel of process 0 with 63, 255 and 999 others,
which a second process plays over sockets: seconds until all have the answer to an exchange, to a check of the order and
to a table of a step, and the share of a processor that the beats cost process 0.
"""

import json
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.common import Settings, short, tell_json
from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, RLTrainingConfig
from covey.parallel import processes
from covey.parallel.values import deserialize, serialize
from covey.rl.batches import PackedSlice, RowSizes, make_train_batch
from covey.rl.roles import ClusterConfig
from covey.rl.step_data import Experience, GroupTable, join, table_of
from covey.types import Completion, FinishReason, Group
from covey_hosts.channel import Channel
from covey_hosts.links import Peer
from covey_hosts.several import Several
from covey_hosts.wire import ANSWER, BEAT, HELLO, VALUES, Message

ROOT = Path(__file__).parents[1]
PROCESSES, CONNECTED = (1, 8, 64), (64, 256, 1000)
ALL_GROUPS = "all groups"
"""Number of processes that stands for the work when each process receives all groups."""
TOKEN = b"0123456789abcdef"
ROUNDS, BEATS_SECONDS = 3, 5.0
PROMPTS, SAMPLES, PROMPT, LONGEST = 128, 16, 100, 8192
ROW_LENGTH, ROWS = 16384, 64
"""Tokens of a row, and rows of a micro-batch, which the processes divide."""


def main(settings: Settings) -> None:
    """Measure the parts that `--only` names, by default both."""
    for part in settings.chosen(PARTS):
        names, results = PARTS[part]()
        print(f"\nhosts, {part}:")
        for name, figures in zip(names, results, strict=True):
            print(f"{name}: " + ", ".join(f"{what} {value:g}" for what, value in figures.items()))
        tell_json(f"hosts {part}", settings, {"cases": dict(zip(names, results, strict=True))})


def _of_children(cases: Sequence[str], *words: str) -> list[dict[str, float]]:
    """Run this module once for each case, since a process measures its own memory; return what the processes print."""
    command = [sys.executable, "-m", "benchmarks.hosts", *words]
    outputs = [subprocess.run([*command, case], cwd=ROOT, check=True, capture_output=True).stdout for case in cases]
    return [json.loads(output) for output in outputs]


# --- groups


def measure_groups() -> tuple[list[str], list[dict[str, float]]]:
    """Measure one process of each number of processes."""
    cases = [ALL_GROUPS, *map(str, PROCESSES)]
    return [case if case == ALL_GROUPS else f"1 of {case}" for case in cases], _of_children(cases, "groups")


def groups_of_one(case: str) -> dict[str, float]:
    """Return seconds by phase, megabytes of memory and of messages of one process."""
    count, laps = 1 if case == ALL_GROUPS else int(case), dict[str, float]()
    own, sent = _groups(PROMPTS // count), b""
    tables = [
        serialize(table_of(own)),
        *(serialize(_table(number, PROMPTS // count)) for number in range(1, count)),
    ]
    if case == ALL_GROUPS:
        sent, own = serialize(own), []
    before, lap = _memory(), partial(_lap, laps, [time.process_time()])
    own = deserialize(sent) if sent else own
    lap("unpack_groups")
    table = join(list(map(deserialize, tables)))
    lap("table")
    training = RLTrainingConfig(row_length=ROW_LENGTH, max_tokens_per_micro_batch=ROWS * ROW_LENGTH)
    sizes_of_rows = RowSizes(ClusterConfig({}, training))
    advantages = [np.full(len(c.tokens), 0.5, np.float32) for group in own for c in group.completions]
    x = Experience(own, table, advantages=advantages)
    with _processes(count) as moved:
        packed = PackedSlice(x, sizes_of_rows)
        lap("fill_rows")
        make_train_batch(x, packed, algorithm_of(GRPOConfig()), 0.0, LONGEST)
        lap("inputs_of_loss")
    messages = len(sent) + sum(map(len, tables)) * (count > 1) + sum(moved)
    sizes = {"seconds": sum(laps.values()), "memory_mb": _memory() - before, "messages_mb": messages / 1e6}
    return {name: short(value) for name, value in (laps | sizes | {"tokens": table.lengths.sum()}).items()}


def _lap(laps: dict[str, float], last: list[float], name: str) -> None:
    now = time.process_time()
    laps[name], last[0] = now - last[0], now


def _memory() -> float:
    """Return the most memory that this process has had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _lengths(groups: int, seed: int) -> np.ndarray:
    """Return random lengths of completions, [groups, SAMPLES]."""
    return np.minimum(np.random.default_rng(seed).geometric(1.5 / LONGEST, (groups, SAMPLES)), LONGEST)


def _groups(count: int) -> list[Group]:
    def completion(size: int) -> Completion:
        logps = np.full(size, -1.0, np.float32)
        return Completion(np.zeros(size, np.int32), logps, logps.copy(), FinishReason.STOP, "word " * size)

    return [
        Group("p", np.zeros(PROMPT, np.int32), tuple(map(completion, row)), rewards=np.arange(float(SAMPLES)))
        for row in _lengths(count, 0).tolist()
    ]


def _table(number: int, count: int) -> GroupTable:
    """Return the table of so many groups of another process. Numbers that differ in a run are random, so that a message
    is compressed no better than there.
    """
    lengths, rng = _lengths(count, number).ravel(), np.random.default_rng(number)
    nothing: list[Any] = [None] * len(lengths)
    per_group, per_completion = partial(np.full, count), partial(np.full, len(lengths))
    return GroupTable(
        owner=per_group(number),
        prompts=per_group(PROMPT),
        sizes=per_group(SAMPLES),
        lengths=lengths,
        sampled=lengths,
        truncated=per_completion(False),
        kept_probability=lengths * rng.random(len(lengths)),
        empty=per_completion(False),
        characters=5 * lengths + rng.integers(0, 100, len(lengths)),
        repetition=rng.random(len(lengths)),
        first_equal=per_completion(0),
        rewards=rng.integers(0, 2, len(lengths)).astype(float),
        keys=rng.integers(0, 2**32, (len(lengths), 2), np.uint32),
        by_function={},
        branches=nothing,
        episodes=nothing,
    )


def _rows_by_process(num_processes: int, count: int, length: int, sizes: RowSizes) -> list[np.ndarray]:
    """Return the rows of each process, which has an equal part of each micro-batch."""
    rows = np.arange(count)
    return [rows[rows % ROWS // (ROWS // num_processes) == process] for process in range(num_processes)]


@contextmanager
def _processes(count: int) -> Iterator[list[int]]:
    """Let this process be the first of `count`, for which the others answer with zeros; yield the bytes of messages."""
    moved: list[int] = []

    def exchange(outgoing: Mapping[int, Any], sizes: Mapping[int, int], about: str) -> dict[int, bytearray]:
        moved.extend([*map(len, outgoing.values()), *sizes.values()])
        return {process: bytearray(size) for process, size in sizes.items()}

    several = Several(0, count)
    rows = mock.patch("covey_hosts.routes.rows_by_process", _rows_by_process)
    with mock.patch.object(several, "exchange", exchange), mock.patch.object(processes, "current", several), rows:
        yield moved


# --- control traffic


def measure_control() -> tuple[list[str], list[dict[str, float]]]:
    """Measure process 0 with each number of processes."""
    return [f"{count} processes" for count in CONNECTED], _of_children(list(map(str, CONNECTED)), "control")


def control_of(case: str) -> dict[str, float]:
    """Return seconds until all of so many processes have the answer, and seconds of processor time of process 0, by
    what is exchanged; and the share of a processor that beats cost it.
    """
    count, costs = int(case), dict[str, float]()
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    command = [sys.executable, "-m", "benchmarks.hosts", "others", f"{count}:{server.getsockname()[1]}"]
    others = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        between = Channel(0, count, 600.0).__enter__()
        between.accept(server, TOKEN)
        for name, (value, about) in exchanges(count, 0).items():
            cost = time.process_time()
            for _ in range(ROUNDS):
                between.compare(value, about) if about == LAUNCH else between.all_gather(value, about)
            costs[f"{name}_cpu"] = (time.process_time() - cost) / ROUNDS
        assert others.stdout is not None
        seconds = json.loads(others.stdout.readline())
        cost = time.process_time()
        time.sleep(BEATS_SECONDS)
        costs["beats_cpu_percent"] = 100 * (time.process_time() - cost) / BEATS_SECONDS
    finally:
        others.kill()  # the others do not leave as processes do, so that the channel is left open
    return {name: short(value) for name, value in (seconds | costs).items()}


LAUNCH = "a launch"


def exchanges(count: int, number: int) -> dict[str, tuple[Any, str]]:
    """Return value and place of what process `number` exchanges in a step: whether a signal came; a launch, which
    process 0 compares, and the same sent to all; and its part of a table of 1,024 prompts with 16 completions.
    """
    table = _table(number, max(1024 // count, 1))
    launch = "0" * 24, "'update' of step 1"
    return {
        "signal": ("", "stop"),
        "order": (launch, LAUNCH),
        "order_to_all": (launch, "a launch, sent to all"),
        "table": (table, "groups"),
    }


def be_others(case: str) -> dict[str, float]:
    """Be all processes but the first; print the median of the seconds until all have the answer to an exchange, and
    then send beats until this process is killed.
    """
    count, port = map(int, case.split(":"))
    peers = [Peer(socket.create_connection(("127.0.0.1", port))) for _ in range(count - 1)]
    for number, peer in enumerate(peers, 1):
        peer.connection.sendall(TOKEN)
        peer.write(Message(HELLO, str(number), [b"a process"]))
    seconds, exchange = dict[str, list[float]](), 0
    of_each = [exchanges(count, number) for number in range(1, count)]
    for name, about in {name: about for name, (_, about) in of_each[0].items()}.items():
        messages = [serialize([about, values[name][0]]) for values in of_each]
        for _ in range(ROUNDS):
            exchange += 1
            started = time.perf_counter()
            for peer, data in zip(peers, messages, strict=True):
                peer.write(Message(VALUES, f"/{exchange}", [data]))
            for peer in peers:
                while _skip(peer) not in (VALUES, ANSWER):
                    pass
            seconds.setdefault(name, []).append(time.perf_counter() - started)
    print(json.dumps({name: float(np.median(each)) for name, each in seconds.items()}), flush=True)
    interval = Channel(0, count).beat_seconds
    threading.Thread(target=_read_all, args=(peers,), daemon=True).start()
    while True:
        for peer in peers:
            peer.write(Message(BEAT))
        time.sleep(interval)


def _skip(peer: Peer) -> str:
    """Read a message without taking it apart, and return its kind: one process stands for many."""
    kind, _, _, sizes = json.loads(peer.read_bytes(int.from_bytes(peer.read_bytes(4), "big")))
    peer.read_bytes(sum(sizes))
    return str(kind)


def _read_all(peers: Sequence[Peer]) -> None:
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer.connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(1 << 16)


PARTS = {"groups": measure_groups, "control": measure_control}
CHILDREN = {"groups": groups_of_one, "control": control_of, "others": be_others}

if __name__ == "__main__":
    print(json.dumps(CHILDREN[sys.argv[1]](sys.argv[2])), flush=True)
