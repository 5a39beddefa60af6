"""Messages between processes, and the verdict on a process that is lost."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from covey.errors import Stopped, reason_of
from covey.parallel.processes import PeerLostError

HELLO, BEAT, VALUES, ANSWER, VERDICT, LEAVES = "hello", "beat", "values", "answer", "verdict", "leaves"
"""Kinds of messages."""
FAST = 1
"""Level of compression."""


class Message(NamedTuple):
    """Message to another process: its kind, the exchange that it belongs to, its content, and the sender's phase."""

    kind: str
    key: str = ""
    parts: Sequence[bytes] = ()
    doing: str = "start"


class Verdict(NamedTuple):
    """Reason why a run cannot go on: a text that names the process; whether that process is lost and takes no part in
    the shutdown; and the signal that has stopped it, if any.
    """

    text: str
    lost: bool = False
    signal: str = ""

    def error(self) -> PeerLostError:
        """Return the error that the other processes raise."""
        error = PeerLostError(self.text, fix="its own output, or the system's log, says why")
        error.stopped = Stopped(self.signal) if self.signal else None
        return error

    def message(self) -> Message:
        """Return the message that tells another process."""
        return Message(VERDICT, parts=[json.dumps(self).encode()])


def verdict_on(error: BaseException, index: int) -> Verdict:
    """Make the verdict on process `index`, which ends by `error`."""
    if isinstance(error, KeyboardInterrupt):
        return Verdict(
            f"process {index} has failed: it was stopped by {str(error) or 'Ctrl-C'}",
            signal=error.signal if isinstance(error, Stopped) else "SIGINT",
        )
    return Verdict(f"process {index} has failed: {reason_of(error)}")


def split(data: memoryview, sizes: Iterable[int]) -> Iterator[memoryview]:
    """Yield the parts of these sizes that `data` is joined from."""
    return (data[start:end] for start, end in pairwise(accumulate(sizes, initial=0)))


def join_values(values: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a message with the values of all processes, in their order.

    Process 0 sends N values to each of N processes. The values are much alike, so they are compressed.
    """
    sizes = json.dumps([len(value) for value in values]).encode()
    return [zlib.compress(part, FAST) for part in (sizes, b"".join(values))]


def split_values(sizes: bytes, data: bytes) -> dict[int, bytes]:
    """Return the values of all processes, by process, from the parts that `join_values` has made."""
    parts = split(memoryview(zlib.decompress(data)), json.loads(zlib.decompress(sizes)))
    return {number: bytes(part) for number, part in enumerate(parts)}


def values_by_process(parts: Sequence[bytes]) -> dict[int, bytes]:
    """Return the values of an answer by process; none if all are equal."""
    return {0: parts[1], int(parts[0]): parts[2]} if parts else {}
