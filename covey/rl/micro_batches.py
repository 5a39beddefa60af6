"""Micro-batches of a step: slices of its stages, and the training micro-batches with the losses of policy and critic.

A step's prompts form training micro-batches. Those are gathered into *service batches*, large enough for every
stage before training to work in full slices; a service batch is merged, each stage runs over it in slices of its own
size, and the results are split again at the boundaries of the training micro-batches.

The sizes (`stage_sizes`) change speed and memory, never the result.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from covey.config.algorithms import Algorithm
from covey.errors import DataError
from covey.losses.logprobs import token_logps
from covey.losses.policy import LossInputs, Surrogate, policy_loss
from covey.losses.value import ValueInputs, row_values, value_loss
from covey.packing.rows import Rows, rows_at_a_time, split_micro_batches
from covey.parallel.sharding import put_rows
from covey.rl.stage_sizes import StageSizes
from covey.train.programs import LossFn
from covey.train.trainer import MicroBatch
from covey.types import Group, MetricSums

T = TypeVar("T")


@dataclass(frozen=True)
class TrainBatch:
    """Training micro-batch: groups packed into rows, with the other inputs of the losses.

    Attributes:
        groups: the groups in the rows.
        rows: NumPy arrays.
        inputs: inputs of the actor's loss.
        denominator: part of these completions in the denominator of the actor's loss.
        value_inputs: inputs of the critic's loss; None without a critic. Its denominator is the number of its tokens.
    """

    groups: Sequence[Group]
    rows: Rows
    inputs: LossInputs
    denominator: float
    value_inputs: ValueInputs | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the rows and the other inputs of the losses by name; the critic's names begin with `critic.`."""
        of_critic = {} if self.value_inputs is None else self.value_inputs._asdict()
        named = {f"critic.{name}": array for name, array in of_critic.items()}
        arrays = self.rows._asdict() | self.inputs._asdict() | named
        return {name: array for name, array in arrays.items() if array is not None}

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of each array, which have to be equal in all processes."""
        return [(name, array.shape) for name, array in self.arrays().items()]


class RowBatch(NamedTuple):
    """Rows and inputs of a loss on its devices."""

    rows: Rows
    inputs: Any


def policy_micro_batches(
    batches: Iterable[TrainBatch], like: Any, mesh: Mesh | None, max_tokens: int, fixed_shapes: bool = False
) -> Iterator[MicroBatch]:
    """Yield the inputs of the policy's loss, about `max_tokens` at a time, on the devices that hold `like`. For
    `fixed_shapes` see `packing.bins.rows_per_micro_batch`.
    """
    for batch in batches:
        at_once = rows_at_a_time(batch.rows, mesh, max_tokens, fixed_shapes)
        yield from _cut(RowBatch(batch.rows, batch.inputs), batch.denominator, like, at_once)


def value_micro_batches(
    batches: Iterable[TrainBatch], like: Any, mesh: Mesh | None, max_tokens: int, fixed_shapes: bool = False
) -> Iterator[MicroBatch]:
    """Yield the inputs of the value loss; arguments as for `policy_micro_batches`."""
    for batch in batches:
        if batch.value_inputs is not None:
            count = float(batch.value_inputs.weight.sum())
            at_once = rows_at_a_time(batch.rows, mesh, max_tokens, fixed_shapes)
            yield from _cut(RowBatch(batch.rows, batch.value_inputs), count, like, at_once)


def abstract_policy_batch(rows: Rows, *, old_logps: bool, ref_logps: bool) -> RowBatch:
    """Return the shapes of the inputs of the policy's loss beside `rows`, which are shapes too.

    Args:
        old_logps: whether a batch is used for several updates.
        ref_logps: whether there is a reference.
    """
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=rows.tokens.sharding)
    per_token = shape(rows.tokens.shape)
    inputs = LossInputs(
        advantage=per_token,
        weight=per_token,
        rollout_logps=per_token,
        beta=shape((rows.tokens.shape[0], 1)),
        old_logps=per_token if old_logps else None,
        ref_logps=per_token if ref_logps else None,
    )
    return RowBatch(rows, inputs)


def policy_loss_fn(algorithm: Algorithm, temperature: float, surrogate: Surrogate | None = None) -> LossFn:
    """Return the policy's loss on a `RowBatch` with `LossInputs`.

    Args:
        algorithm: settings of the loss.
        temperature: the rollout's. Log-probs are of the full distribution at it, as `Completion.logps` are.
        surrogate: replaces the algorithm's surrogate.
    """

    def loss(graph: Any, params: Any, batch: RowBatch) -> tuple[Array, MetricSums]:
        scores = token_logps(graph, params, batch.rows, temperature, entropy_gradient=bool(algorithm.entropy_bonus))
        return policy_loss(algorithm, scores.logps, scores.entropy, batch.rows.segment_ids, batch.inputs, surrogate)

    return loss


def value_loss_fn(value_clip: float) -> LossFn:
    """Return the critic's loss on a `RowBatch` with `ValueInputs`; see `GRPOConfig.value_clip`."""

    def loss(graph: Any, params: Any, batch: RowBatch) -> tuple[Array, MetricSums]:
        values, inputs = row_values(graph, params, batch.rows), batch.inputs
        return value_loss(values, inputs.old_values, inputs.returns, inputs.weight, value_clip)

    return loss


def arrays_of(batches: Sequence[TrainBatch]) -> dict[str, np.ndarray]:
    """Return the arrays of several micro-batches; those of the first are named `0.tokens`, `0.advantage`, ..."""
    return {f"{i}.{name}": array for i, batch in enumerate(batches) for name, array in batch.arrays().items()}


def _cut(batch: RowBatch, denominator: float, like: Any, at_once: int) -> Iterator[MicroBatch]:
    """Yield a micro-batch in pieces of `at_once` rows; the first has the denominator."""
    for piece in split_micro_batches(batch, at_once):
        yield MicroBatch(put_rows(piece, like), denominator)
        denominator = 0.0


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
