"""Rows of groups, of which each process has those of its own devices.

All processes assign the completions to rows by the table of the groups, which is the same in all. The tokens of a row
lie in the processes that have sampled its groups; the processes whose devices compute the row get them from those. So
the work and the memory of a process do not grow with the number of processes. With one process it has all rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from covey.packing.rows import Layout, Rows, scatter_to_rows
from covey.parallel import channel, distributed
from covey.rl.group_table import GroupTable
from covey.rl.micro_batches import slices
from covey.types import Group

RowHolders = Callable[[int, int], Sequence[Int[np.ndarray, "r"]]]
"""Function (number of rows, row length) → numbers of the rows that the devices of each process compute, by process."""


class Route(NamedTuple):
    """Numbers of the arrays that this process sends to each other one, and of those that it gets, in the order in which
    they are sent.
    """

    outgoing: Mapping[int, Sequence[int]]
    incoming: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, moves: Iterable[tuple[int, int, int]]) -> "Route":
        """Return this process's part of moves, each from a process to a process, of an array with a number."""
        me, outgoing, incoming = (
            distributed.index(),
            defaultdict[int, list[int]](list),
            defaultdict[int, list[int]](list),
        )
        for sender, receiver, number in moves:
            if sender == me != receiver:
                outgoing[receiver].append(number)
            elif receiver == me != sender:
                incoming[sender].append(number)
        return cls(outgoing, incoming)

    def move(
        self, values: Mapping[int, np.ndarray], lengths: Int[np.ndarray, "n"], dtype: Any, about: str
    ) -> dict[int, np.ndarray]:
        """Return the arrays that this process gets, by number. All processes must call it.

        Args:
            values: those that it sends, by number.
            lengths: number of entries of each array, of all processes.
            dtype: type in which they are sent.
            about: what they are.
        """
        arrays = dict[int, np.ndarray]()
        sent = {to: np.concatenate([values[i] for i in each]).astype(dtype) for to, each in self.outgoing.items()}
        sizes = {of: int(lengths[list(each)].sum()) * np.dtype(dtype).itemsize for of, each in self.incoming.items()}
        received = channel.exchange({to: each.view(np.uint8).data for to, each in sent.items()}, sizes, about)
        for of, numbers in self.incoming.items():
            data: np.ndarray = np.frombuffer(received.get(of, b""), dtype)
            arrays |= zip(numbers, np.split(data, np.cumsum(lengths[list(numbers)])[:-1]), strict=True)
        return arrays


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
        self.own = holders[distributed.index()]
        prompts = dict(zip(table.own.tolist(), (np.asarray(group.prompt_tokens) for group in groups), strict=True))
        by_row = [[piece.group for piece in row] for row in layout.rows]
        prompts |= self._route_to_rows(by_row, table.owner).move(prompts, table.prompts, np.int32, "prompts")
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
        values = {i: per_token[i] for row in self.own for i in self._completions[row]}
        values |= self._to_owners.move(values, self.table.lengths, np.float32, about)
        return [values[i] for i in self.table.own_completions.tolist()]

    def _held(self, per_token: Sequence[np.ndarray], dtype: Any, about: str) -> dict[int, np.ndarray]:
        """Return arrays of the completions in own rows, and of the own ones, by number, given the own ones."""
        values = dict(zip(self.table.own_completions.tolist(), per_token, strict=True))
        return values | self._to_rows.move(values, self.table.lengths, dtype, about)

    @property
    def counted(self) -> Int[np.ndarray, "r"]:
        """Numbers of the rows that this process counts in sums over the rows of all: each is counted by the first
        process that has it.
        """
        before = set(chain.from_iterable(rows.tolist() for rows in self._holders[: distributed.index()]))
        return np.array([row for row in self.own.tolist() if row not in before], int)

    @cached_property
    def _completions(self) -> list[list[int]]:
        """Numbers of the completions in each row."""
        return [list(chain.from_iterable(piece.indices for piece in row)) for row in self.layout.rows]

    @cached_property
    def _owners(self) -> Int[np.ndarray, "B"]:
        """Process that has sampled each completion."""
        return np.repeat(self.table.owner, self.table.sizes)

    @cached_property
    def _to_rows(self) -> Route:
        return self._route_to_rows(self._completions, self._owners)

    def _route_to_rows(self, by_row: Sequence[Sequence[int]], owners: Int[np.ndarray, "n"]) -> Route:
        """Return the way from owners to rows of arrays, which `by_row` numbers for each row."""
        owner_of = owners.tolist()
        return Route.of(
            (owner_of[i], holder, i) for holder, rows in enumerate(self._holders) for row in rows for i in by_row[row]
        )

    @cached_property
    def _to_owners(self) -> Route:
        """Way of values from the rows back to the owners; of the processes that hold a row, the first sends."""
        holds, owner_of = [set(rows.tolist()) for rows in self._holders], self._owners.tolist()
        senders = [
            next(process for process, rows in enumerate(holds) if row in rows) for row in range(len(self._completions))
        ]
        return Route.of(
            (senders[row], owner_of[i], i)
            for row, completions in enumerate(self._completions)
            for i in completions
            if row not in holds[owner_of[i]]
        )


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
