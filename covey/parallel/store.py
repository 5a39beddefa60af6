"""Key-value store that the processes of a run share: short texts, through JAX's coordination service.

It uses no device program, so it may be used from any thread, and also while a program over several processes runs.
Process 0 keeps the store. A request takes about 0.3 ms within a machine, and 20 ms with a value of 1 MiB, which process
0 sends to each of the others. So the groups of a step are exchanged by a device program (`distributed.gathered`), which
cannot be launched here: the store is also for threads beside the one that launches programs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
from jax._src import distributed as runtime  # the only way to the client at jax 0.10

from covey.errors import CoveyError

POLL_SECONDS = 1.0
"""Seconds of one request that waits; Python handles signals between two of them."""
PIECE = 1 << 20
"""Largest number of characters of one value; a longer one of an exchange is sent in pieces."""
_exchanges: Counter[str] = Counter()


class Store(Protocol):
    """Store of texts by key."""

    def set(self, key: str, value: str) -> None:
        """Write `value`, also over an earlier one."""

    def wait(self, key: str, seconds: float) -> str | None:
        """Return the value of `key` as soon as there is one; None if there is none after `seconds`."""

    def under(self, folder: str) -> dict[str, str]:
        """Return the values of all keys below `folder`, by what follows it."""

    def delete(self, key: str) -> None:
        """Delete `key` and all keys below it."""


class CoordinationStore:
    """The store of JAX's coordination service.

    Raises:
        jax.errors.JaxRuntimeError: process 0 does not answer any more.
    """

    def __init__(self) -> None:
        self._client: Any = runtime.global_state.client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def wait(self, key: str, seconds: float) -> str | None:
        try:
            found: str = self._client.blocking_key_value_get(key, max(int(1000 * seconds), 1))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return found

    def under(self, folder: str) -> dict[str, str]:
        return {key.removeprefix(f"{folder}/"): value for key, value in self._client.key_value_dir_get(folder)}

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)


def exchange(value: str, about: str, check: Callable[[], None] = lambda: None) -> list[str]:
    """Return the `value` of every process, by process index, on every process.

    All processes must make the same exchanges `about` one thing in the same order; those about different things may
    come from different threads. A dead process is not noticed here; `liveness` ends the ones that wait for it.

    Args:
        value: text of any length.
        about: name of this place, the same in all processes.
        check: called every second while this process waits; may raise.
    """
    if jax.process_count() == 1:
        return [value]
    store, number = CoordinationStore(), _exchanges[about]
    _exchanges[about] += 1
    folder = f"covey/exchange/{about}/{number}"
    _set_in_pieces(store, f"{folder}/{jax.process_index()}", value)
    values = [_in_pieces(store, f"{folder}/{process}", check) for process in range(jax.process_count())]
    if number and jax.process_index() == 0:  # all have read the values of the exchange before
        store.delete(f"covey/exchange/{about}/{number - 1}")
    return values


@contextmanager
def together(about: str, several: bool = True) -> Iterator[None]:
    """Wait at the end of the `with` statement until all processes are there; raise if it has failed in one of them.

    Args:
        about: name of this place, the same in all processes.
        several: whether the other processes come here too; if not, nothing is waited for.

    Raises:
        CoveyError: the body has raised an error in another process.
    """
    if not several:
        yield
        return
    try:
        yield
    except Exception as error:
        exchange(str(error) if isinstance(error, CoveyError) else f"{type(error).__name__}: {error}", about)
        raise
    for number, failure in enumerate(exchange("", about)):
        if failure:
            raise CoveyError(f"process {number} has failed at this: {failure}")


def _set_in_pieces(store: Store, key: str, value: str) -> None:
    pieces = [value[start : start + PIECE] for start in range(0, len(value), PIECE)] or [""]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", f"{len(pieces)} {piece}")


def _in_pieces(store: Store, key: str, check: Callable[[], None]) -> str:
    count, _, first = _waited_for(store, f"{key}/0", check).partition(" ")
    rest = [_waited_for(store, f"{key}/{number}", check).partition(" ")[2] for number in range(1, int(count))]
    return "".join([first, *rest])


def _waited_for(store: Store, key: str, check: Callable[[], None]) -> str:
    while (value := store.wait(key, POLL_SECONDS)) is None:
        check()
    return value
