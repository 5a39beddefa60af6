"""Micro-batch sizes of the stages rollout, reference log-probs, old log-probs and training. Sizes change speed and
memory, never the result.

A step's prompts form training micro-batches. Those are gathered into *service batches*, large enough for every
stage before training to work in full slices; a service batch is merged, each stage runs over it in slices of its own
size, and the results are split again at the boundaries of the training micro-batches.

All sizes count prompts before the ×G repeat: inside a stage that is size × num_generations completions.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any, TypeVar

import numpy as np

from covey.config.schema import RLTrainingConfig
from covey.errors import DataError, RecipeError, raise_together

T = TypeVar("T")

STAGES = ("rollout", "ref_logps", "old_logps", "train")
"""Names of the stages; their sizes are the settings `training.<stage>_micro_batch_size`."""
DIVISORS_SHOWN = 6


@dataclass(frozen=True)
class StageSizes:
    """Number of prompts that each stage processes at a time, before the ×G repeat."""

    rollout: int
    ref_logps: int
    old_logps: int
    train: int

    @property
    def service(self) -> int:
        """Minimum number of prompts in a service batch: the least common multiple of the stages before training.

        >>> StageSizes(rollout=4, ref_logps=6, old_logps=2, train=1).service
        12
        """
        return math.lcm(self.rollout, self.ref_logps, self.old_logps)


def stage_sizes(training: RLTrainingConfig, num_generations: int) -> StageSizes:
    """Return the stage sizes that `training` sets; None means the whole step, `prompts_per_step` prompts.

    A size that does not divide the step is legal: its last slice is short.

    Raises:
        RecipeError: sizes are below 1 or above the step; one error lists them all, each with its arithmetic.
    """
    step = training.prompts_per_step
    given = {stage: getattr(training, f"{stage}_micro_batch_size") for stage in STAGES}
    sizes = {stage: step if size is None else size for stage, size in given.items()}
    bad = {stage: size for stage, size in sizes.items() if not 1 <= size <= step}
    raise_together([_size_error(stage, size, step, num_generations) for stage, size in bad.items()])
    return StageSizes(**sizes)


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


def _size_error(stage: str, size: int, step: int, num_generations: int) -> RecipeError:
    """Return the error for an invalid stage size, in prompts and in completions, with the valid sizes."""
    name, G = f"{stage}_micro_batch_size", num_generations
    what = f"{name} {size} prompts × num_generations {G} = {size * G} samples"
    what += f", and a step has prompts_per_step {step} × {G} = {step * G}"
    nearest = min(max(size, 1), step)
    fix = f"{nearest}, or null for the whole step"
    if 1 <= size // G <= step and size % G == 0 and G > 1:
        fix += f"; {size} samples would be {size // G} prompts"
    want = f"1 to {step} prompts: counted before the ×{G} repeat, × {G} samples inside the stage; "
    want += f"the nearest that divide the step evenly: {_divisors_near(size, step)}"
    return RecipeError(what, want=want, fix=fix, where=f"training.{name}")


def _divisors_near(size: int, step: int) -> str:
    divisors = [n for n in range(1, step + 1) if step % n == 0]
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda n: abs(n - size))[:DIVISORS_SHOWN])))
