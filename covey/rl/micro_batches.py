"""Micro-batches of a step: slices of its stages, and the training micro-batches with the losses of policy and critic.

A step's prompts are sampled and scored in batches of whole training micro-batches, large enough for every stage before
training to work in full slices (`StageSizes.rollout_batch_size`). Each stage runs over such a batch in slices of its
own size, and the result is split again at the boundaries of the training micro-batches.

The sizes (`stage_sizes`) change speed and memory, never the result.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from covey.config.algorithms import Algorithm
from covey.losses.logprobs import token_logps
from covey.losses.policy import LossInputs, Surrogate, policy_loss
from covey.losses.value import ValueInputs, row_values, value_loss
from covey.packing.rows import Rows, split_micro_batches
from covey.parallel import processes
from covey.parallel.arrays import put_rows
from covey.rl.group_table import GroupTable
from covey.rl.roles import Role
from covey.sampling.logits import SamplingParams
from covey.train.programs import LossFn
from covey.train.trainer import MicroBatch
from covey.types import Group, Mean, MetricSums

T = TypeVar("T")


@dataclass(frozen=True)
class TrainBatch:
    """Training micro-batch: groups packed into rows, with the other inputs of the losses.

    Attributes:
        groups: the groups in the rows; of several processes those that this one has sampled.
        rows: NumPy arrays; of several processes, as the inputs, with zeros for rows of other processes' devices.
        inputs: inputs of the actor's loss.
        denominator: part of these completions in the denominator of the actor's loss.
        value_inputs: inputs of the critic's loss; None without a critic.
        value_denominator: number of tokens in the critic's loss.
        counted: the rows that this process counts in a sum over those of all processes.
        table: numbers of the groups of all processes; None where these are `groups`.
    """

    groups: Sequence[Group]
    rows: Rows
    inputs: LossInputs
    denominator: float
    value_inputs: ValueInputs | None = None
    value_denominator: float = 0.0
    counted: "slice | np.ndarray" = field(default_factory=lambda: slice(None))
    table: GroupTable | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the rows and the other inputs of the losses by name; the critic's names begin with `critic.`."""
        of_critic = {} if self.value_inputs is None else self.value_inputs._asdict()
        named = {f"critic.{name}": array for name, array in of_critic.items()}
        arrays = self.rows._asdict() | self.inputs._asdict() | named
        return {name: array for name, array in arrays.items() if array is not None}

    def loss_batch(self, role: Role) -> tuple["RowBatch", float]:
        """Return the rows with the inputs of the loss of `role`, actor or critic, and the denominator."""
        if role == Role.ACTOR:
            return RowBatch(self.rows, self.inputs), self.denominator
        assert self.value_inputs is not None, "an algorithm with a critic computes returns"
        return RowBatch(self.rows, self.value_inputs), self.value_denominator

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of each array, which have to be equal in all processes."""
        return [(name, array.shape) for name, array in self.arrays().items()]


class Replay(Generic[T]):
    """Items that can be iterated several times, although they may still have to be made: each pass goes through those
    that exist and then makes the others.

    >>> replay = Replay(iter("ab"))
    >>> [*replay], [*replay]
    (['a', 'b'], ['a', 'b'])
    """

    def __init__(self, items: Iterable[T]):
        self._made: list[T] = []
        self._rest = iter(items)

    def __iter__(self) -> Iterator[T]:
        yield from self._made
        for item in self._rest:
            self._made.append(item)
            yield item


class RowBatch(NamedTuple):
    """Rows and inputs of a loss on its devices."""

    rows: Rows
    inputs: Any


def put_micro_batches(batch: RowBatch, denominator: float, like: Any, rows: int) -> Iterator[MicroBatch]:
    """Yield a batch in pieces of `rows` rows on the devices that hold `like`; the first has the denominator."""
    for piece in split_micro_batches(batch, rows):
        yield MicroBatch(put_rows(piece, like), denominator)
        denominator = 0.0


def abstract_policy_batch(rows: Rows, *, old_logps: bool, ref_logps: bool, keys: bool) -> RowBatch:
    """Return the shapes of the inputs of the policy's loss beside `rows`, which are shapes too.

    Args:
        old_logps: whether a batch is used for several updates.
        ref_logps: whether there is a reference.
        keys: whether the agreement with the sampler is measured.
    """

    def shape(sizes: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=rows.tokens.sharding)

    per_token = shape(rows.tokens.shape)
    inputs = LossInputs(
        advantage=per_token,
        weight=per_token,
        rollout_logps=per_token,
        beta=shape((rows.tokens.shape[0], 1)),
        old_logps=per_token if old_logps else None,
        ref_logps=per_token if ref_logps else None,
        keys=shape((*rows.tokens.shape, 2), jnp.uint32) if keys else None,
    )
    return RowBatch(rows, inputs)


AGREEMENT = "sampling/token_agreement"
"""Metric: share of the tokens drawn by the sampler that the trainer's logits would have drawn too, with their noise."""
REDRAWN_COLUMN = 64
"""A truncated draw is compared in each column with this distance: it needs whole rows of logits, a second pass over the
head, which for all tokens would take half as long as an update.
"""


def policy_loss_fn(algorithm: Algorithm, sampling_params: SamplingParams, surrogate: Surrogate | None = None) -> LossFn:
    """Return the policy's loss on a `RowBatch` with `LossInputs`; inputs with keys add the metric `AGREEMENT`.

    Args:
        algorithm: settings of the loss.
        sampling_params: settings of the distribution that the tokens were drawn from. Log-probs are of the full
            distribution at its temperature, as `Completion.logps` are.
        surrogate: replaces the algorithm's surrogate.
    """
    every = 1 if sampling_params.is_plain else REDRAWN_COLUMN
    score = partial(
        token_logps,
        temperature=sampling_params.temperature,
        entropy_gradient=bool(algorithm.entropy_bonus),
        sampling_params=sampling_params,
        every=every,
    )

    def loss(graph: Any, params: Any, batch: RowBatch) -> tuple[Array, MetricSums]:
        rows, inputs = batch.rows, batch.inputs
        scores = score(graph, params, rows, keys=inputs.keys)
        total, sums = policy_loss(algorithm, scores.logps, scores.entropy, rows.segment_ids, inputs, surrogate)
        if scores.agreed is not None:
            sums[AGREEMENT] = Mean(jnp.sum(scores.agreed), jnp.sum(inputs.keys[:, ::every].any(-1)))
        return total, sums

    return loss


def value_loss_fn(value_clip: float) -> LossFn:
    """Return the critic's loss on a `RowBatch` with `ValueInputs`; see `GRPOConfig.value_clip`."""

    def loss(graph: Any, params: Any, batch: RowBatch) -> tuple[Array, MetricSums]:
        values, inputs = row_values(graph, params, batch.rows), batch.inputs
        return value_loss(values, inputs.old_values, inputs.returns, inputs.weight, value_clip)

    return loss


def gather_batches(batches: Sequence[TrainBatch]) -> tuple[list[Group], dict[str, np.ndarray]]:
    """Return the groups and the arrays of several micro-batches, of all processes; arrays of the first micro-batch are
    named `0.tokens`, `0.advantage`, ... All processes must call it.
    """
    groups, arrays = list[Group](), dict[str, np.ndarray]()
    for number, batch in enumerate(batches):
        groups += batch.groups if batch.table is None else batch.table.collect(batch.groups, "groups of a bad batch")
        own = batch.counted, {name: array[batch.counted] for name, array in batch.arrays().items()}
        parts = processes.here().all_gather(own, "arrays of a bad batch")
        for name, array in batch.arrays().items():
            arrays[f"{number}.{name}"] = whole = np.array(array)
            for rows, of_process in parts:
                whole[rows] = of_process[name]
    return groups, arrays


def slices(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield `items` in order, `size` at a time; the last slice may be short.

    >>> list(slices("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    assert size >= 1, "slices of nothing would lose every item"
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part
