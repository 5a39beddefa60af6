"""Trainers of actor and critic: the supervised trainer with a loss on rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from covey.config.algorithms import Algorithm
from covey.losses.logprobs import row_scores
from covey.losses.policy import LossInputs, MetricSums, Surrogate, policy_loss
from covey.losses.value import ValueInputs, row_values, value_loss
from covey.models.decoder import Decoder
from covey.models.value_model import ValueModel
from covey.packing.bins import rows_together
from covey.packing.rows import Rows, micro_batches
from covey.parallel.placement import num_row_shards, put_rows
from covey.train.trainer import MicroBatch, Trainer
from covey.types import Group


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


class RowBatch(NamedTuple):
    """Rows and inputs of a loss on its devices."""

    rows: Rows
    inputs: Any


class RLTrainer(Trainer):
    """Train the policy on rows.

    Args:
        model: the actor.
        optimizer: any optax transformation.
        algorithm: settings of the loss.
        temperature: the rollout's. Log-probs are of the full distribution at it, as `Completion.logps` are.
        surrogate: replaces the algorithm's surrogate.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        algorithm: Algorithm,
        temperature: float,
        surrogate: Surrogate | None = None,
    ):
        super().__init__(model, optimizer, partial(_policy_loss, algorithm, temperature, surrogate))


class CriticTrainer(Trainer):
    """Train the critic on rows.

    Args:
        model: the critic.
        optimizer: any optax transformation.
        value_clip: see `GRPOConfig.value_clip`.
    """

    whose = " of the critic"

    def __init__(self, model: ValueModel, optimizer: optax.GradientTransformation, value_clip: float):
        super().__init__(model, optimizer, partial(_value_loss, value_clip))


def parts(
    batch: RowBatch, denominator: float, trainer: Trainer, mesh: Mesh | None, max_tokens: int
) -> Iterator[MicroBatch]:
    """Yield a micro-batch on the trainer's devices in pieces of about `max_tokens`; the first has the denominator."""
    for piece in micro_batches(batch, rows_at_a_time(batch.rows, mesh, max_tokens)):
        yield MicroBatch(put_rows(piece, trainer.trainable), denominator)
        denominator = 0.0


def rows_at_a_time(rows: Rows, mesh: Mesh | None, max_tokens: int) -> int:
    """Return the number of rows computed together: at most `max_tokens`, but at least one for each device of `mesh`."""
    count, length = rows.tokens.shape
    return rows_together(count, length, max_tokens, num_row_shards(mesh))


def arrays_of(batches: Sequence[TrainBatch]) -> dict[str, np.ndarray]:
    """Return the arrays of several micro-batches; those of the first are named `0.tokens`, `0.advantage`, ..."""
    return {f"{i}.{name}": array for i, batch in enumerate(batches) for name, array in batch.arrays().items()}


def _policy_loss(
    algorithm: Algorithm, temperature: float, surrogate: Surrogate | None, graph: Any, params: Any, batch: RowBatch
) -> tuple[Array, MetricSums]:
    bonus = bool(algorithm.entropy_bonus)
    scores = row_scores(graph, params, batch.rows, temperature, entropy_gradient=bonus)
    return policy_loss(algorithm, scores.logps, scores.entropy, batch.rows.segment_ids, batch.inputs, surrogate)


def _value_loss(clip: float, graph: Any, params: Any, batch: RowBatch) -> tuple[Array, MetricSums]:
    values, inputs = row_values(graph, params, batch.rows), batch.inputs
    return value_loss(values, inputs.old_values, inputs.returns, inputs.weight, clip)
