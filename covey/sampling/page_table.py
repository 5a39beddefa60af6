"""Pages of a KV cache, on the host: which slot holds which, which are shared, and which are free.

A page holds `size` positions of one slot. Full pages of a prompt are the same for all samples of its request: they are
filled once and counted by those that read them. What a sample writes itself is in pages of its own.

Plain Python without JAX, and without a clock: equal calls give equal tables.
"""

import heapq
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from covey.config.schema import RolloutConfig

NULL_PAGE = 0
"""The page that no slot has; the table names it where a slot has none."""


class PageSizes(NamedTuple):
    """Sizes of a paged cache.

    Attributes:
        size: number of positions of a page.
        per_slot: number of pages of the longest slot.
        total: number of pages, the null page included.
    """

    size: int
    per_slot: int
    total: int

    def num_pages(self, length: int) -> int:
        """Return the number of pages that hold `length` positions, at most those of the longest slot."""
        return min(-(-length // self.size), self.per_slot)

    def num_slots(self, length: int) -> int:
        """Return the number of slots for which there are pages where each holds `length` positions of its own."""
        return max((self.total - 1) // self.num_pages(length), 1)

    @classmethod
    def of(cls, config: RolloutConfig, slots: int, length: int) -> "PageSizes | None":
        """Return the sizes for slots of `length` positions; None unless the settings want pages."""
        if config.page_size is None:
            return None
        per_slot = -(-length // config.page_size)
        of_all = slots * per_slot
        return cls(config.page_size, per_slot, 1 + max(min(config.num_pages or of_all, of_all), per_slot))


class Copy(NamedTuple):
    """Page that a slot shares and is about to write: its content goes to one of its own."""

    source: int
    target: int


class PageTable:
    """Pages of each slot.

    Attributes:
        sizes: those of the cache; `size` is the number of positions of a page.
        rows: int32 [S, n], the pages of each slot in their order.
    """

    def __init__(self, slots: int, sizes: PageSizes):
        self.sizes, self.size = sizes, sizes.size
        self.rows: Int[np.ndarray, "S n"] = np.full((slots, sizes.per_slot), NULL_PAGE, np.int32)
        self._count = [0] * slots
        self._free = list(range(1, sizes.total))
        self._holders = [0] * sizes.total
        self._of_prompt: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    def missing(self, slot: int, length: int) -> int:
        """Return the number of further pages that a slot needs for `length` positions."""
        return max(self.sizes.num_pages(length) - self._count[slot], 0)

    def grow(self, slot: int, length: int) -> None:
        """Give a slot the pages that it is `missing`, which are free."""
        for _ in range(self.missing(slot, length)):
            self._hold(slot, heapq.heappop(self._free))

    def missing_for_prompt(self, prompt: Hashable, length: int) -> int:
        """Return the number of free pages that a slot needs for `length` positions that begin with a prompt."""
        return self.sizes.num_pages(length) - len(self._of_prompt.get(prompt, ()))

    def begin(self, slot: int, prompt: Hashable, prompt_length: int, length: int) -> list[tuple[int, int]]:
        """Give a free slot pages for `length` positions that begin with a prompt; return those to fill with it, and
        the number of each in the prompt. The full pages of a prompt are shared by those that begin with it.
        """
        shared = self._of_prompt.get(prompt)
        for page in shared or ():
            self._hold(slot, page)
        self.grow(slot, length)
        if shared is None and (full := prompt_length // self.size):
            self._of_prompt[prompt] = self.rows[slot, :full].tolist()
        filled = range(len(shared or ()), self.sizes.num_pages(prompt_length))
        return [(int(self.rows[slot, number]), number) for number in filled]

    def own(self, slot: int, start: int | None) -> list[Copy]:
        """Give a slot that is about to write from position `start` on free pages of its own there; return the copies to
        make of those that it shared.
        """
        copies = []
        for number in self.shared(slot, start):
            page, target = int(self.rows[slot, number]), heapq.heappop(self._free)
            self.rows[slot, number] = target
            self._holders[page] -= 1
            self._holders[target] = 1
            copies.append(Copy(page, target))
        if start is not None:
            for page in self.rows[slot, start // self.size : self._count[slot]].tolist():
                self._forget_prompt(page)
        return copies

    def shared(self, slot: int, start: int | None) -> list[int]:
        """Return the numbers of the pages from position `start` on that a slot shares; none without a position."""
        if start is None:
            return []
        held = range(start // self.size, self._count[slot])
        return [number for number in held if self._holders[self.rows[slot, number]] > 1]

    def free(self, slot: int) -> None:
        """Take all pages from a slot."""
        for page in self.rows[slot, : self._count[slot]].tolist():
            self._holders[page] -= 1
            if not self._holders[page]:
                self._forget_prompt(page)
                heapq.heappush(self._free, page)
        self.rows[slot], self._count[slot] = NULL_PAGE, 0

    def forget_prompts(self) -> None:
        """Share no pages of prompts with slots that begin from now on: the prompts are prefilled anew."""
        self._of_prompt.clear()

    def _hold(self, slot: int, page: int) -> None:
        self.rows[slot, self._count[slot]] = page
        self._count[slot] += 1
        self._holders[page] += 1

    def _forget_prompt(self, page: int) -> None:
        """Share the prompt of this page no further."""
        self._of_prompt = {prompt: pages for prompt, pages in self._of_prompt.items() if page not in pages}
