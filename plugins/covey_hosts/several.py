"""Several processes as core sees them: exchanges over the channel, checks of order and of equality, rows by process."""

import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import jax
import numpy as np
from jax._src import distributed as runtime  # the only way to the key-value store at jax 0.10
from jaxtyping import Int

from covey.errors import CoveyError, reason_of
from covey.parallel import processes
from covey_hosts import arrays, checks, order
from covey_hosts.channel import Channel, listen, not_connected
from covey_hosts.links import CONNECT_SECONDS
from covey_hosts.wire import split

_opened = count()


class Several(Channel):
    """Several processes of a run, from the view of one of them."""

    phase = order.phase
    in_order = order.in_order
    check_same = checks.check_same
    check_shared_folder = checks.check_shared_folder
    put, put_host, to_host = arrays.put, arrays.put_host, arrays.to_host
    read_own_rows = arrays.read_own_rows
    check_even_mesh = arrays.check_even_mesh
    check_per_process_mesh = arrays.check_per_process_mesh

    def gather_parts(self, parts: Sequence[bytes], numbers: Sequence[int], name: str) -> Sequence[bytes | memoryview]:
        """Return the parts of all processes in the order of their numbers. Only process 0 gets them."""
        sizes = self.all_gather((list(numbers), [len(part) for part in parts]), f"sizes of {name}")
        if self.index:
            self.exchange({0: b"".join(parts)}, {}, name)
            return []
        whole = self.exchange(
            {}, {process: sum(of_parts) for process, (_, of_parts) in enumerate(sizes) if process}, name
        )
        numbered = list[tuple[int, bytes | memoryview]](zip(numbers, parts, strict=True))
        for process, (theirs, lengths) in enumerate(sizes[1:], 1):
            pieces = split(memoryview(whole.get(process, b"")), lengths)
            numbered += zip(theirs, pieces, strict=True)
        return [part for _, part in sorted(numbered, key=lambda each: each[0])]

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Wait at the end of the `with` statement for all processes; raise if its body has failed in one of them.

        Raises:
            CoveyError: the body has raised an error in another process.
        """
        try:
            yield
        except Exception as error:
            self.all_gather(reason_of(error), name)
            raise
        for number, failure in enumerate(self.all_gather("", name)):
            if failure:
                raise CoveyError(f"process {number} has failed at this: {failure}")

    def routes(self, table: Any, layout: Any, sizes: Any) -> processes.Routes:
        """Return the ways of values of groups to the processes that compute their rows."""
        from covey_hosts.routes import Routes  # late: a run opens its processes before it imports a learner

        return Routes(self, table, layout, sizes)

    def move(
        self,
        arrays: Mapping[int, np.ndarray],
        have: Sequence[Sequence[int]],
        need: Sequence[Sequence[int]],
        lengths: Int[np.ndarray, "n"],
        dtype: Any,
        name: str,
    ) -> Mapping[int, np.ndarray]:
        """Return `arrays`, and the arrays that this process needs, by number. The first that has one sends it."""
        outgoing, incoming = self._route(have, need)
        sent = {to: np.concatenate([arrays[i] for i in each]).astype(dtype) for to, each in outgoing.items()}
        sizes = {of: int(lengths[each].sum()) * np.dtype(dtype).itemsize for of, each in incoming.items()}
        received = self.exchange({to: each.view(np.uint8).data for to, each in sent.items()}, sizes, name)
        moved = dict(arrays)
        for of, numbers in incoming.items():
            data: np.ndarray = np.frombuffer(received.get(of, b""), dtype)
            moved |= zip(numbers, np.split(data, np.cumsum(lengths[numbers])[:-1]), strict=True)
        return moved

    def _route(
        self, have: Sequence[Sequence[int]], need: Sequence[Sequence[int]]
    ) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return the numbers of the arrays that this process sends to each other process, and gets from each, in the
        order in which they are sent.
        """
        sender_of = {number: process for process in reversed(range(self.count)) for number in have[process]}
        outgoing, incoming = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for receiver, numbers in enumerate(need):
            for number in sorted(set(numbers).difference(have[receiver])):
                if receiver == self.index:
                    incoming[sender_of[number]].append(number)
                elif sender_of[number] == self.index:
                    outgoing[receiver].append(number)
        return outgoing, incoming


@contextmanager
def opened(host: str, port: int, silent: float) -> Iterator[Channel]:
    """Open the channel between all processes for the body of the `with` statement, unless it is open already.

    After an error it stays open: the process may wait for the others at its end.

    Args:
        host: host that process 0 listens at; every interface if empty.
        port: port that process 0 listens at; a free one if 0.
        silent: seconds without a sign after which a process is taken to be stopped.

    Raises:
        CoveyError: the processes do not reach each other.
    """
    if isinstance(processes.current, Channel):
        yield processes.current
        return
    with Several(jax.process_index(), jax.process_count(), silent) as several:
        processes.current = several
        _connect(several, f"{host}:{port}")
        yield several
    processes.current = processes.ALONE


def _connect(channel: Channel, place: str) -> None:
    """Connect to the host of JAX's coordinator, at a port that process 0 publishes there."""
    state: Any = runtime.global_state
    key = f"covey/channel/{next(_opened)}"
    if channel.index == 0:
        server, token = listen(place), secrets.token_hex(16)
        state.client.key_value_set(key, f"{server.getsockname()[1]} {token}")
        channel.accept(server, token.encode())
        return
    try:
        port, token = state.client.blocking_key_value_get(key, int(1000 * CONNECT_SECONDS)).split()
    except jax.errors.JaxRuntimeError as error:
        raise not_connected("process 0 has published no address") from error
    channel.connect(state.coordinator_address.rpartition(":")[0].strip("[]"), int(port), token.encode())
