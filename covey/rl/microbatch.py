"""Micro-batches of the stages rollout, reference log-probs, old log-probs and training.

A step's prompts form training micro-batches. Those are gathered into *service batches*, large enough for every
stage before training to work in full slices; a service batch is merged, each stage runs over it in slices of its own
size, and the results are split again at the boundaries of the training micro-batches.

The sizes (`stage_sizes`) change speed and memory, never the result.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, TypeVar

import numpy as np

from covey.errors import DataError
from covey.rl.stage_sizes import StageSizes

T = TypeVar("T")


def slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield `items` in order, `size` at a time; the last slice may be short.

    >>> list(slices("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    assert size >= 1, "slices of nothing would lose every item"
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part


def service_batches(examples: Iterable[T], sizes: StageSizes) -> Iterator[list[list[T]]]:
    """Yield the examples of one step as service batches: lists of training micro-batches.

    Micro-batches of `sizes.train` prompts are gathered until they hold at least `sizes.service` prompts, or until the
    examples end: the remainder is yielded too, however small it is.

    Hazard: `examples` must be those of one optimizer step. A service batch that spanned two would sample prompts of the
    second with the policy before the first one's update, and the result would depend on the sizes.

    >>> [[len(m) for m in service] for service in service_batches(range(8), StageSizes(2, 4, 1, 3))]
    [[3, 3], [2]]
    """
    gathered: list[list[T]] = []
    for micro_batch in slices(examples, sizes.train):
        gathered.append(micro_batch)
        if sum(map(len, gathered)) >= sizes.service:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


def merge(micro_batches: Sequence[Any]) -> Any:
    """Merge several micro-batches: lists are joined, arrays concatenated, mappings merged column by column.

    Raises:
        DataError: the mappings have different columns.

    >>> merge([{"x": [1, 2], "y": np.zeros((2, 3))}, {"x": [3], "y": np.ones((1, 3))}])["y"].shape
    (3, 3)
    """
    first = micro_batches[0]
    if isinstance(first, Mapping):
        _refuse_other_columns(micro_batches)
        return {name: merge([batch[name] for batch in micro_batches]) for name in first}
    if hasattr(first, "shape"):
        return np.concatenate(micro_batches)
    return [item for batch in micro_batches for item in batch]


def cut(results: Any, counts: Sequence[int], times: int = 1) -> list[Any]:
    """Split `results` of a merged batch at the boundaries of its micro-batches: the inverse of `merge`.

    Args:
        results: a list, an array, or a mapping of those.
        counts: number of items in each micro-batch.
        times: number of results per item: G where every prompt was repeated.

    >>> cut(["a1", "a2", "b1", "b2", "c1", "c2"], counts=[1, 2], times=2)
    [['a1', 'a2'], ['b1', 'b2', 'c1', 'c2']]
    """
    if isinstance(results, Mapping):
        columns = {name: cut(values, counts, times) for name, values in results.items()}
        return [{name: parts[i] for name, parts in columns.items()} for i in range(len(counts))]
    assert len(results) == sum(counts) * times, f"{len(results)} results for {sum(counts)} × {times} samples"
    ends = accumulate((count * times for count in counts), initial=0)
    return [results[start:end] for start, end in pairwise(ends)]


def _refuse_other_columns(micro_batches: Sequence[Mapping[str, Any]]) -> None:
    wanted = set(micro_batches[0])
    for number, batch in enumerate(micro_batches):
        if set(batch) != wanted:
            what = f"micro-batch {number} has the columns {', '.join(sorted(batch))}"
            raise DataError(what, want=f"those of the first: {', '.join(sorted(wanted))}")
