"""The processes of a run, as one object: `processes.here()`.

A single process has every item, exchanges nothing and waits for nobody. Several processes train one model on one mesh:
each runs the same program, on its own devices of the mesh. Models, optimizer states and batches are arrays over all
processes, and JAX exchanges their parts. Only the rollout differs: each process samples and scores its slice of the
prompts of a step on its own devices. A package opens several processes by the entry point `start` of `covey.processes`:

    with processes.start():  # before any other use of JAX
        values = processes.here().all_gather(value, "name of the exchange")
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Int

from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER, PEER_LOST
from covey.errors import CoveyError, Stopped
from covey.registry import offered

T = TypeVar("T")


class PeerLostError(CoveyError):
    """Another process of the run is stopped, gone, or has failed, so this process cannot go on.

    Attributes:
        stopped: the signal that has stopped the other process, if any; the caller sets its `step`.
    """

    exit_code = PEER_LOST
    stopped: Stopped | None = None


class Processes:
    """A single process. A subclass has the same methods for several processes: all of them must call each method, with
    the same `name`. A `PeerLostError` says that another process is stopped, gone, has failed, or makes another call.

    Attributes:
        index: index of this process, from 0.
        count: number of processes.
        seconds_to_end: seconds within which all processes end after one is killed.
    """

    index, count = 0, 1
    seconds_to_end = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.index == 0

    def slice_bounds(self, length: int) -> list[int]:
        """Return the index of the first item of each process, out of `length` items; last comes `length` itself."""
        return [length * number // self.count for number in range(self.count + 1)]

    def local_slice(self, items: Sequence[T]) -> tuple[int, Sequence[T]]:
        """Return this process's contiguous part of `items`, after the index of its first item."""
        start = len(items) * self.index // self.count
        return start, items[start : len(items) * (self.index + 1) // self.count]

    def all_gather(self, value: T, name: str) -> list[T]:
        """Return the `value` of every process, by process index."""
        return [value]

    def gather_items(self, items: Sequence[T], name: str) -> list[T]:
        """Return the `items` of all processes, by process index."""
        return list(chain.from_iterable(self.all_gather(list(items), name)))

    def gather_parts(self, parts: Sequence[bytes], numbers: Sequence[int], name: str) -> Sequence[bytes | memoryview]:
        """Return the parts of all processes in the order of their numbers. Only process 0 gets them.

        Args:
            parts: parts of this process.
            numbers: number of each part, among the parts of all processes.
            name: name of the exchange.
        """
        return parts

    def broadcast(self, value: T, name: str) -> T:
        """Return the `value` of process 0."""
        return self.all_gather(value, name)[0]

    def compare(self, value: T, name: str) -> dict[int, T]:
        """Return the values of process 0 and of the first process with another value, by process index; nothing if all
        are equal.
        """
        return {}

    def routes(self, table: Any, layout: Any, sizes: Any) -> "Routes":
        """Return the ways of values of groups to the processes that compute their rows.

        Args:
            table: numbers of the groups (`rl.step_data.GroupTable`).
            layout: their places in rows (`packing.rows.Layout`).
            sizes: meshes of the roles, and how many rows are computed together (`rl.batches.RowSizes`).
        """
        return Routes()

    def put(self, tree: Any, targets: Any) -> Any:
        """Put arrays on the shardings in the same tree. Both may have devices of several processes."""
        return jax.device_put(tree, targets)

    def put_host(self, tree: T, to: Sharding) -> T:
        """Put arrays that each process has as a whole on `to`. Each process puts the parts of its own devices."""
        put: T = jax.device_put(tree, to)
        return put

    def to_host(self, x: jax.Array) -> np.ndarray:
        """Return the whole of `x`, also where other processes hold parts of it."""
        return np.asarray(x)

    def read_own_rows(self, x: jax.Array, rows: Sharding, out: np.ndarray) -> None:
        """Write the rows of `x` that this process's devices hold into `out`, if `x` has the sharding `rows`; otherwise
        all rows.
        """
        out[:] = self.to_host(x)

    def check_even_mesh(self, mesh: Mesh) -> None:
        """Refuse the mesh of a model of which the processes do not have equal parts.

        Raises:
            RecipeError: see above.
        """

    def check_per_process_mesh(self, mesh: Mesh, actor: Mesh | None, role: str) -> None:
        """Refuse the mesh of a role that each process plays for itself, on its own part of the mesh.

        Raises:
            RecipeError: the mesh has devices of another process and none of this one, divides a copy of the weights
                over processes, or has some of the actor's devices and others.
        """

    def together(self, name: str) -> AbstractContextManager[None]:
        """Wait at the end of the `with` statement for all processes; raise if its body has failed in one of them.

        Raises:
            CoveyError: the body has raised an error in another process.
        """
        return nullcontext()

    def phase(self, name: str, step: int, program: Any = "") -> AbstractContextManager[None]:
        """Launch programs over several processes in the body of the `with` statement.

        Args:
            name: name of the phase.
            step: number of the step.
            program: a value, such as shapes, whose `repr` must be equal; or a function that returns it.

        Raises:
            CoveyError: a process is at another phase than process 0.
        """
        return nullcontext()

    def in_order(self, name: str, function: Any) -> Any:
        """Return the jitted `function` so that all processes launch it at the same moment when its shapes are new."""
        return function

    def check_same(
        self, name: str, value: Callable[[], Any], fix: str, want: str = "the same in all processes"
    ) -> None:
        """Refuse processes with another `value` than process 0. A single process does not compute it.

        Args:
            name: name of the value.
            value: function that returns the value of this process. The error names differences of dicts, no digests.
            fix: `fix` of the error.
            want: `want` of the error.

        Raises:
            RecipeError: the values differ.
        """

    def check_shared_folder(self, folder: Path) -> None:
        """Refuse a folder that is not the same for all processes, or that one of them cannot write in.

        Raises:
            CoveyError: a process sees another folder or none, or may not write there.
        """

    def leave(self, code: int) -> None:
        """End this process at once with `code` if another process is lost, which JAX's shutdown would wait for."""


class Routes:
    """Ways of values from the process that has sampled a group to the processes that compute its rows. One process has
    all of them.

    Attributes:
        rows: numbers of the rows that this process computes; None for all.
        rows_to_sum: the rows that this process adds to sums over the rows of all processes.
    """

    rows: Int[np.ndarray, "r"] | None = None
    rows_to_sum: "slice | np.ndarray" = slice(None)

    def prompts_to_rows(self, prompts: Sequence[np.ndarray]) -> Sequence[np.ndarray] | Mapping[int, np.ndarray]:
        """Return the prompts in this process's rows by number of the group, given the prompts of its groups."""
        return prompts

    def to_rows(
        self, values: Sequence[np.ndarray], dtype: Any, name: str
    ) -> Sequence[np.ndarray] | Mapping[int, np.ndarray]:
        """Return per-token values in this process's rows by number of the completion, given the values of its groups.

        Args:
            values: one array per completion.
            dtype: type in which they are sent.
            name: name of the values.
        """
        return values

    def to_groups(self, values: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
        """Return per-token values of this process's groups, given one array per completion of all processes, with the
        values in its rows.
        """
        return list(values)


ALONE = Processes()
current = ALONE
"""The processes of this run; set by the package that opens several."""


def here() -> Processes:
    """Return the processes of this run.

    Raises:
        CoveyError: there are several, and nothing is open between them.
    """
    if current is ALONE and jax.process_count() > 1:
        raise CoveyError("the processes have no channel", fix="run the program in `with processes.start():`")
    return current


def start(environment: Mapping[str, str] | None = None) -> AbstractContextManager[None]:
    """Join the processes that the environment names, if any, for the body of the `with` statement.

    Call it before any other use of JAX. If the program has already called `jax.distributed.initialize`, the processes
    are not joined again. An error in the body ends all processes.

    Args:
        environment: environment variables (`config.processes`); the system's if not set.

    Raises:
        CoveyError: the environment is contradictory, or the processes do not come together, or run different code; or
            no package opens several processes.
    """
    environment = os.environ if environment is None else environment
    named = any(map(environment.get, (MODE, ADDRESS, COUNT, NUMBER, BIND)))
    if not (named and environment.get(MODE) != "off") and not jax.distributed.is_initialized():
        return nullcontext()
    opened: AbstractContextManager[None] = offered("covey.processes", "start")(environment)
    return opened
