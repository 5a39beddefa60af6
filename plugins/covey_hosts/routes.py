"""Ways of values between the processes that have sampled groups and the processes whose devices compute their rows."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from covey.packing.rows import Layout
from covey.parallel import processes
from covey.parallel.arrays import row_sharding
from covey.parallel.mesh import spans_processes
from covey.rl.batches import RowSizes
from covey.rl.roles import PER_PROCESS_ROLES
from covey.rl.step_data import GroupTable

if TYPE_CHECKING:
    from covey_hosts.several import Several


class Routes(processes.Routes):
    """Ways of values between several processes; methods as in core. All processes must call them."""

    def __init__(self, several: "Several", table: GroupTable, layout: Layout, sizes: RowSizes):
        self._several, self._table = several, table
        self._rows_by_process = rows_by_process(several.count, len(layout.rows), layout.length, sizes)
        self.rows = self._rows_by_process[several.index]
        self._sampled = self._by_process(np.repeat(table.owner, table.sizes))
        self._computed = self._in_rows([list(chain.from_iterable(p.indices for p in row)) for row in layout.rows])
        self._groups_in_rows = self._in_rows([[piece.group for piece in row] for row in layout.rows])
        before = set(chain.from_iterable(rows.tolist() for rows in self._rows_by_process[: several.index]))
        # The first process that computes a row adds it.
        self.rows_to_sum = np.array([row for row in self.rows.tolist() if row not in before], int)

    def prompts_to_rows(self, prompts: Sequence[np.ndarray]) -> Mapping[int, np.ndarray]:
        """Return the prompts in this process's rows by number of the group, given the prompts of its groups."""
        local, table = dict(zip(self._table.local_groups.tolist(), prompts, strict=True)), self._table
        sampled = self._by_process(table.owner)
        return self._several.move(local, sampled, self._groups_in_rows, table.prompts, np.int32, "prompts")

    def to_rows(self, values: Sequence[np.ndarray], dtype: Any, name: str) -> Mapping[int, np.ndarray]:
        """Return per-token values in this process's rows by number of the completion, given those of its groups."""
        local = dict(zip(self._table.local_completions.tolist(), values, strict=True))
        return self._several.move(local, self._sampled, self._computed, self._table.lengths, dtype, name)

    def to_groups(self, values: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
        """Return per-token values of this process's groups, given the values in its rows."""
        every, lengths = dict(enumerate(values)), self._table.lengths
        moved = self._several.move(every, self._computed, self._sampled, lengths, np.float32, name)
        return [moved[i] for i in self._table.local_completions.tolist()]

    def _by_process(self, owners: Int[np.ndarray, "n"]) -> list[list[int]]:
        """Return the numbers of the items that each process has sampled, given the owner of each item."""
        return [np.flatnonzero(owners == process).tolist() for process in range(self._several.count)]

    def _in_rows(self, by_row: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the numbers that `by_row` has in the rows that each process computes."""
        return [[i for row in rows.tolist() for i in by_row[row]] for rows in self._rows_by_process]


def rows_by_process(num_processes: int, count: int, length: int, sizes: RowSizes) -> list[Int[np.ndarray, "r"]]:
    """Return the numbers of the rows, of `count` rows of `length` tokens, that the devices of each process compute in
    any of the roles that the processes play together.
    """
    of_meshes = [
        rows_on_mesh(num_processes, mesh, count, sizes.at_a_time(count, length, role))
        for mesh, role in {m: role for role, m in sizes.meshes.items() if role not in PER_PROCESS_ROLES}.items()
    ]
    return [np.unique(np.concatenate(rows)) for rows in zip(*of_meshes, strict=True)]


def rows_on_mesh(num_processes: int, mesh: Mesh | None, count: int, rows_at_once: int) -> list[Int[np.ndarray, "r"]]:
    """Return the numbers of the rows that the devices of each process compute, by process.

    Args:
        num_processes: number of processes.
        mesh: where rows are computed; on one that does not span processes each process computes all rows.
        count: number of rows.
        rows_at_once: number of rows of a micro-batch, in which each device has a part.
    """
    rows = np.arange(count)
    if mesh is None or not spans_processes(mesh):
        return [rows] * num_processes
    computes = np.zeros((num_processes, rows_at_once), bool)
    parts: Mapping[Any, Any] = row_sharding(mesh).devices_indices_map((rows_at_once,))
    for device, (part,) in parts.items():
        computes[device.process_index, part] = True
    return [rows[of_process[rows % rows_at_once]] for of_process in computes]
