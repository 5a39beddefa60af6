"""Batches of a step: rows of groups, training micro-batches, and the losses of policy and critic on them.

A step's prompts are sampled and scored in batches of whole training micro-batches, large enough for every stage before
training to work in full slices (`StageSizes.rollout_batch_size`). Each stage runs over such a batch in slices of its
own size, and the result is split again at the boundaries of the training micro-batches. The sizes (`stage_sizes`)
change speed and memory, never the result.

All processes assign the completions to rows by the table of the groups, which is the same in all. The tokens of a row
lie in the processes that have sampled its groups; the processes whose devices compute the row get them from there. So
the work and the memory of a process do not grow with the number of processes. One process has all rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from covey.config.algorithms import Algorithm
from covey.losses.logprobs import token_logps
from covey.losses.policy import AGGREGATES, LossInputs, Surrogate, policy_loss
from covey.losses.value import ValueInputs, row_values, value_loss
from covey.models.decoder import Decoder
from covey.models.recurrence import check_branches
from covey.packing.bins import rows_per_micro_batch
from covey.packing.rows import Layout, Rows, make_layout, scatter_to_rows, split_micro_batches
from covey.parallel import processes
from covey.parallel.arrays import num_row_shards, put_rows
from covey.rl.roles import ClusterConfig, Role
from covey.rl.step_data import Experience, GroupTable, slices, tokens_in_loss
from covey.sampling.logits import SamplingParams, token_keys
from covey.train.programs import LossFn
from covey.train.trainer import MicroBatch
from covey.types import Group, Mean, MetricSums

T = TypeVar("T")


class RowSizes:
    """Sizes of the rows and micro-batches of a run.

    Args:
        config: meshes and settings.
        actor: the model whose rows these are; None for a model whose layers have no states, on a CPU.

    Attributes:
        meshes: mesh of each role.
        model: architecture of the actor.
        fixed_shapes: whether shapes follow the settings and not the lengths of a step; see `Decoder.fixed_shapes`.
        compile_cost: cost of another row length than the default in a step, in tokens.
    """

    def __init__(self, config: ClusterConfig, actor: Decoder | None = None):
        self.training, self.compile_cost = config.training_config, 0.0
        self.model = None if actor is None else actor.config
        self.fixed_shapes = actor is not None and actor.fixed_shapes
        self.meshes = {role: config.mesh(role) for role in Role}
        self._num_shards = {role: num_row_shards(mesh) for role, mesh in self.meshes.items()}

    def layout(self, table: GroupTable) -> Layout:
        """Assign the completions of groups to rows."""
        return make_layout(
            table.shapes,
            self.training.row_length,
            packing=self.training.packing,
            max_tokens=self.training.max_tokens_per_micro_batch,
            compile_cost=self.compile_cost,
        )

    def rows_at_a_time(self, rows: Rows, role: Role = Role.ACTOR) -> int:
        """Return the number of rows that `role` computes together."""
        count, length = rows.tokens.shape
        return self.at_a_time(count, length, role)

    def at_a_time(self, count: int, length: int, role: Role) -> int:
        """Return the number of rows, of `count` rows of `length` tokens, that `role` computes together."""
        limit = self.training.max_tokens_per_micro_batch
        return rows_per_micro_batch(count, length, limit, self._num_shards[role], self.fixed_shapes)


class PackedSlice:
    """Rows of consecutive groups.

    Args:
        x: the groups.
        sizes: sizes of the rows.

    Attributes:
        rows: NumPy rows; zeros in the rows that no device of this process computes.
        rows_to_sum: the rows that this process adds to sums over the rows of all processes.
        lengths: number of tokens of each completion, of all processes.

    Raises:
        EpisodeError: the layers have no room for the branches of a row.
    """

    def __init__(self, x: Experience, sizes: RowSizes):
        self.layout, self.lengths = sizes.layout(x.table), x.table.lengths.tolist()
        self._routes = routes = processes.here().routes(x.table, self.layout, sizes)
        prompts = routes.prompts_to_rows([np.asarray(group.prompt_tokens) for group in x.groups])
        tokens = routes.to_rows([np.asarray(c.tokens) for c in x.completions], np.int32, "tokens")
        self.rows: Rows = self.layout.fill(prompts, tokens, routes.rows)
        self.rows_to_sum = routes.rows_to_sum
        if sizes.model is not None and self.rows.ends is not None:
            check_branches(sizes.model, self.rows.group_ids, self.rows.positions)

    def scatter(self, per_token: Sequence[np.ndarray], name: str) -> Float[np.ndarray, "R M"]:
        """Scatter per-token values to the scored tokens of this process's rows; 0 elsewhere. All processes must call
        it.

        Args:
            per_token: one array per completion of this process's groups.
            name: name of the values.
        """
        return scatter_to_rows(self.rows, self._routes.to_rows(per_token, np.float32, name))

    def gather(self, per_token: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
        """Return per-token values of this process's groups, one float32 array per completion; the inverse of `scatter`.
        All processes must call it.

        Args:
            per_token: one array per completion of all processes, with the values of the completions in this process's
                rows.
            name: name of the values.
        """
        return self._routes.to_groups(per_token, name)


class PackedGroups:
    """Rows of groups, packed slice by slice; stages that use the same slice share its rows.

    Args:
        x: the groups.
        sizes: sizes of the rows.
    """

    def __init__(self, x: Experience, sizes: RowSizes):
        self._groups, self._sizes = x, sizes
        self._slices: dict[tuple[int, int], PackedSlice] = {}

    def slice(self, start: int, stop: int) -> PackedSlice:
        """Return the rows of groups `start` to `stop`."""
        if (start, stop) not in self._slices:
            self._slices[start, stop] = PackedSlice(self._groups.part(start, stop), self._sizes)
        return self._slices[start, stop]

    def map(self, compute: Callable[[Rows, Sequence[int]], list[np.ndarray]], size: int, name: str) -> list[np.ndarray]:
        """Apply `compute` to `size` groups at a time; return one array per completion of this process's groups."""
        out: list[np.ndarray] = []
        for numbers in slices(range(len(self._groups.table)), size):
            packed = self.slice(numbers[0], numbers[-1] + 1)
            out += packed.gather(compute(packed.rows, packed.lengths), name)
        return out


@dataclass(frozen=True)
class TrainBatch:
    """Training micro-batch: groups packed into rows, with the other inputs of the losses.

    Attributes:
        groups: the groups in the rows that this process has sampled.
        rows: NumPy arrays; of several processes, as the inputs, with zeros for rows of other processes' devices.
        inputs: inputs of the actor's loss.
        denominator: part of these completions in the denominator of the actor's loss.
        value_inputs: inputs of the critic's loss; None without a critic.
        value_denominator: number of tokens in the critic's loss.
        rows_to_sum: the rows that this process adds to sums over the rows of all processes.
        table: numbers of the groups of all processes; None where these are `groups`.
    """

    groups: Sequence[Group]
    rows: Rows
    inputs: LossInputs
    denominator: float
    value_inputs: ValueInputs | None = None
    value_denominator: float = 0.0
    rows_to_sum: "slice | np.ndarray" = field(default_factory=lambda: slice(None))
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


def make_train_batch(
    x: Experience,
    packed: PackedSlice,
    algorithm: Algorithm,
    beta: float,
    max_new_tokens: int,
    *,
    with_keys: bool = False,
) -> TrainBatch:
    """Return the micro-batch of some groups.

    Args:
        x: the groups with their advantages.
        packed: their rows.
        algorithm: gives the weight of each token.
        beta: weight of the KL.
        max_new_tokens: limit of a completion, by which the aggregate `constant` divides.
        with_keys: whether the agreement with the sampler is measured, where the completions have keys.
    """
    in_loss = [tokens_in_loss(c, algorithm.mask_truncated) for c in x.completions]
    counts = np.where(x.table.truncated & algorithm.mask_truncated, 0, x.table.sampled)
    weights, denominator = AGGREGATES[algorithm.aggregate](counts, max_new_tokens)
    per_token = [w * mask for w, mask in zip(weights[x.table.local_completions], in_loss, strict=True)]
    inputs = LossInputs(
        advantage=packed.scatter(x.advantages, "advantages"),
        weight=packed.scatter(per_token, "weights"),
        rollout_logps=packed.scatter([c.logps for c in x.completions], "log-probs of the rollout"),
        beta=np.full((len(packed.rows.tokens), 1), beta, np.float32),
        old_logps=None if x.old_logps is None else packed.scatter(x.old_logps, "old log-probs"),
        ref_logps=None if x.ref_logps is None else packed.scatter(x.ref_logps, "log-probs of the reference"),
    )
    if with_keys and x.table.keys.any(1).all():
        sampled = packed.scatter(x.sampled_masks, "sampled tokens")
        inputs = inputs._replace(keys=token_keys_of(packed.rows, x.table.keys, sampled))
    scored = float(counts[~np.isnan(x.table.rewards)].sum())
    values = _value_inputs(x, packed, in_loss)
    return TrainBatch(x.groups, packed.rows, inputs, denominator, values, scored, packed.rows_to_sum, x.table)


def token_keys_of(
    rows: Rows, keys: UInt32[np.ndarray, "B 2"], sampled: Float[np.ndarray, "R M"]
) -> UInt32[np.ndarray, "R M 2"]:
    """Return the random key of each scored token, from the keys of completions; 0 where the model drew none."""
    of_tokens, at = np.zeros((*sampled.shape, 2), np.uint32), sampled > 0  # rows of other processes have none
    number, index = rows.scatter_index[at].T
    of_tokens[at] = token_keys(keys[number], index)
    return of_tokens


def _value_inputs(x: Experience, packed: PackedSlice, in_loss: Sequence[np.ndarray]) -> ValueInputs | None:
    if x.returns is None or x.values is None:
        return None
    weight = [mask & is_scored for mask, is_scored in zip(in_loss, ~np.isnan(x.completion_rewards), strict=True)]
    return ValueInputs(
        returns=packed.scatter(x.returns, "returns"),
        old_values=packed.scatter(x.values, "values"),
        weight=packed.scatter(weight, "weights of values"),
    )


class Replay(Generic[T]):
    """Items for several passes. The first pass makes them as it goes.

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
        own = batch.rows_to_sum, {name: array[batch.rows_to_sum] for name, array in batch.arrays().items()}
        parts = processes.here().all_gather(own, "arrays of a bad batch")
        for name, array in batch.arrays().items():
            arrays[f"{number}.{name}"] = whole = np.array(array)
            for rows, of_process in parts:
                whole[rows] = of_process[name]
    return groups, arrays
