"""Spans, which say what each token of a row attends to in two numbers per token.

Rows hold trees of tokens in depth-first order: a prompt, its completions one after the other, and so on at any depth.
The ancestors of a query are then the keys before it whose subtree has not ended, and a sliding window cuts them off
below one index:

    query q attends to key k  <=>  start[q] <= k <= q < end[k]

Padding attends to itself alone, so that nothing is divided by zero.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NO_WINDOW = int(jnp.iinfo(jnp.int32).max)
"""Sliding window of a layer with full attention, where a number is needed."""
MASKED_SCORE = -1e30
"""Score of a masked key: finite, so that a fully masked query has a finite output."""
MAX_ROW_LENGTH = 1 << 16
"""Longest row whose windows can be found: (position, index) fits 32 bits."""


class Spans(NamedTuple):
    """First index that each query attends to, and the index after the last descendant of each key."""

    start: Int[Array, "B T"]
    end: Int[Array, "B T"]

    @property
    def time(self) -> int:
        """Length of the rows."""
        return self.start.shape[1]

    def pad(self, time: int) -> "Spans":
        """Return the spans of rows that are padded to `time` tokens."""
        index = jnp.broadcast_to(jnp.arange(self.time, time), (len(self.start), time - self.time))
        return Spans(jnp.concatenate([self.start, index], 1), jnp.concatenate([self.end, index + 1], 1))

    def limit(self, positions: Int[Array, "B T"], window: Any) -> "Spans":
        """Return the spans of a layer that masks keys `window` positions or more before the query.

        The first ancestor inside the window is the latest token at its position, since depth-first order visits no
        other branch between an ancestor and its descendants.
        """
        assert self.time <= MAX_ROW_LENGTH, "rows are shorter"
        oldest = jnp.maximum(positions - (window - 1), jnp.take_along_axis(positions, self.start, axis=1))
        index = jnp.arange(self.time, dtype=jnp.uint32)
        ordered = jnp.sort(positions.astype(jnp.uint32) * self.time + index, axis=1)
        wanted = oldest.astype(jnp.uint32) * self.time + index
        latest = jax.vmap(partial(jnp.searchsorted, side="right"))(ordered, wanted) - 1
        start = jnp.take_along_axis(ordered, latest, axis=1) % self.time
        return Spans(start.astype(self.start.dtype), self.end)


def span_mask(spans: Spans, start: Any = 0, size: int | None = None, keys: int | None = None) -> Bool[Array, "B n U"]:
    """Return the mask of `size` queries from index `start` on, over the first `keys` keys; all of them by default."""
    query, key = start + jnp.arange(size or spans.time)[:, None], jnp.arange(keys or spans.time)
    first = jax.lax.dynamic_slice_in_dim(spans.start, start, len(query), axis=1)[:, :, None]
    visible: Array = (first <= key) & (key <= query) & (query < spans.end[:, None, : len(key)])
    return visible


def causal_spans(length: Int[Array, "B"], time: int) -> Spans:
    """Return the spans of plain causal attention over rows whose first `length` positions hold tokens."""
    index = jnp.broadcast_to(jnp.arange(time), (length.shape[0], time))
    real = index < length[:, None]
    return Spans(jnp.where(real, 0, index), jnp.where(real, length[:, None], index + 1))


def distinct_windows(windows: Sequence[int | None] | None) -> list[int]:
    """Return the sliding windows that occur among the layers, in ascending order.

    >>> distinct_windows((None, 512, None, 512)), distinct_windows(None)
    ([512, 2147483647], [2147483647])
    """
    return sorted({NO_WINDOW if window is None else window for window in windows or (None,)})
