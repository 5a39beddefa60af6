"""Rows of groups, of which each process has those of its own devices.

All processes assign the completions to rows by the table of the groups, which is the same in all. The tokens of a row
lie in the processes that have sampled its groups; the processes whose devices compute the row get them from those. So
the work and the memory of a process do not grow with the number of processes. With one process it has all rows.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from covey.packing.rows import Layout, Rows, scatter_to_rows
from covey.parallel import processes
from covey.rl.group_table import GroupTable
from covey.rl.micro_batches import slices
from covey.types import Group

RowHolders = Callable[[int, int], Sequence[Int[np.ndarray, "r"]]]
"""Function (number of rows, row length) → numbers of the rows that the devices of each process compute, by process."""


class PackedSlice:
    """Rows of consecutive groups.

    Args:
        groups: those of the groups that this process has sampled.
        table: numbers of all of them.
        layout: the rows.
        holders: rows that the devices of each process compute, by process.

    Attributes:
        rows: NumPy rows; those that no device of this process computes are zeros.
        own: numbers of the rows that devices of this process compute.
    """

    def __init__(
        self, groups: Sequence[Group], table: GroupTable, layout: Layout, holders: Sequence[Int[np.ndarray, "r"]]
    ):
        self.table, self.layout, self._holders = table, layout, holders
        self.own = holders[processes.here().index]
        self._sampled = self._by_process(np.repeat(table.owner, table.sizes))
        self._computed = self._in_rows([list(chain.from_iterable(p.indices for p in row)) for row in layout.rows])
        prompts = processes.here().move(
            dict(zip(table.own.tolist(), (np.asarray(group.prompt_tokens) for group in groups), strict=True)),
            self._by_process(table.owner),
            self._in_rows([[piece.group for piece in row] for row in layout.rows]),
            table.prompts,
            np.int32,
            "prompts",
        )
        tokens = self._held([np.asarray(c.tokens) for group in groups for c in group.completions], np.int32, "tokens")
        self.rows: Rows = layout.fill(prompts, tokens, self.own)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each completion, of all processes."""
        lengths: list[int] = self.table.lengths.tolist()
        return lengths

    def scatter(self, per_token: Sequence[np.ndarray], about: str) -> Float[np.ndarray, "R M"]:
        """Scatter per-token values to the scored tokens of the own rows; 0 in all others. All processes must call it.

        Args:
            per_token: one array per completion of this process's groups.
            about: what the values are.
        """
        return scatter_to_rows(self.rows, self._held(per_token, np.float32, about))

    def gather(self, per_token: Sequence[np.ndarray], about: str) -> list[np.ndarray]:
        """Return per-token values of this process's groups, one float32 array per completion; the inverse of `scatter`.
        All processes must call it.

        Args:
            per_token: one array per completion of all processes, with the values of those in own rows.
            about: what the values are.
        """
        every = dict(enumerate(per_token))
        values = processes.here().move(every, self._computed, self._sampled, self.table.lengths, np.float32, about)
        return [values[i] for i in self.table.own_completions.tolist()]

    def _held(self, per_token: Sequence[np.ndarray], dtype: Any, about: str) -> Mapping[int, np.ndarray]:
        """Return arrays of the completions in own rows, and of the own ones, by number, given the own ones."""
        own = dict(zip(self.table.own_completions.tolist(), per_token, strict=True))
        return processes.here().move(own, self._sampled, self._computed, self.table.lengths, dtype, about)

    @property
    def counted(self) -> Int[np.ndarray, "r"]:
        """Numbers of the rows that this process counts in sums over the rows of all: each is counted by the first
        process that has it.
        """
        before = set(chain.from_iterable(rows.tolist() for rows in self._holders[: processes.here().index]))
        return np.array([row for row in self.own.tolist() if row not in before], int)

    def _by_process(self, owners: Int[np.ndarray, "n"]) -> list[list[int]]:
        """Return the numbers of what each process has sampled, given the owner of each."""
        return [np.flatnonzero(owners == process).tolist() for process in range(len(self._holders))]

    def _in_rows(self, by_row: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the numbers that `by_row` has in the rows that each process computes."""
        return [[i for row in rows.tolist() for i in by_row[row]] for rows in self._holders]


class PackedGroups:
    """Rows of groups, packed slice by slice; stages that use the same slice share its rows.

    Args:
        groups: those of the groups that this process has sampled.
        table: numbers of all of them.
        pack: returns the rows of some groups.
        holders: see `RowHolders`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        table: GroupTable,
        pack: Callable[[GroupTable], Layout],
        holders: RowHolders,
    ):
        self._groups, self._table, self._pack, self._holders = groups, table, pack, holders
        self._slices: dict[tuple[int, int], PackedSlice] = {}

    def slice(self, start: int, stop: int) -> PackedSlice:
        """Return the rows of groups `start` to `stop`."""
        if (start, stop) not in self._slices:
            table = self._table.select(range(start, stop))
            layout, own = self._pack(table), self._table.own
            groups = [group for number, group in zip(own, self._groups, strict=True) if start <= number < stop]
            holders = self._holders(len(layout.rows), layout.length)
            self._slices[start, stop] = PackedSlice(groups, table, layout, holders)
        return self._slices[start, stop]

    def map(
        self, compute: Callable[[Rows, Sequence[int]], list[np.ndarray]], size: int, about: str
    ) -> list[np.ndarray]:
        """Apply `compute` to `size` groups at a time; return one array per completion of this process's groups."""
        out: list[np.ndarray] = []
        for part in slices(range(len(self._table)), size):
            packed = self.slice(part[0], part[-1] + 1)
            out += packed.gather(compute(packed.rows, packed.lengths), about)
        return out
