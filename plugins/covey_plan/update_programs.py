"""Programs of an optimizer step and of rows, without arrays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from covey.models.dtypes import round_kernels
from covey.packing.rows import Rows
from covey.parallel.arrays import rows_placement
from covey.parallel.shapes import abstract
from covey.rl.scorers import RowScorer
from covey.train.gradient_sums import GradientSums
from covey.train.programs import UpdatePrograms, WholeUpdate
from covey_plan.program import Program


def abstract_rows(count: int, length: int, sharding: Sharding) -> Rows:
    """Return the shapes of `count` rows of `length` tokens."""
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=sharding)
    return Rows._make([*[shape((count, length))] * 7, shape((count, length, 2)), None])


def score_program(scorer: RowScorer, params: Any, count: int, length: int) -> Program:
    """Return the program that scores `count` rows of `length` tokens; `params` are arrays or shapes."""
    rows = abstract_rows(count, length, rows_placement(params))
    return Program(scorer.name, scorer.program, (round_kernels(abstract(params), scorer.operand_type), rows))


def gradients_program(updates: UpdatePrograms, batch: Any) -> Program:
    """Return the program that adds the gradients of a micro-batch of these shapes to the sums of the step."""
    frozen = round_kernels(updates.frozen, updates.operand_type)
    return Program("gradients", updates.accumulate, (updates.trainable, frozen, _sums(updates), abstract(batch), 0))


def reduce_programs(updates: UpdatePrograms) -> list[Program]:
    """Return the program that sums the gradients of all parts of the rows, where each has its own."""
    return [Program("reduce", updates.reduce, (_sums(updates),))] if updates.reduce else []


def apply_program(updates: UpdatePrograms) -> Program:
    """Return the program of the update: of its largest part, where it is made layer by layer."""
    sums = jax.eval_shape(updates.layout.reduce, _sums(updates))
    sums = jax.tree.map(abstract, sums, updates.layout.shardings(reduced=True))
    weights, state, update = updates.trainable, updates.init(updates.trainable), updates.update
    rates = dict.fromkeys(updates.learning_rates(0), 1.0)
    if isinstance(update, WholeUpdate):
        return Program("apply", update.apply, (weights, state, sums, 1.0, rates))
    of_weights, of_state, of_sums = (list[Any](jax.tree.leaves(tree)) for tree in (weights, state, sums))
    for number in update.shared:
        of_state[number] = jax.ShapeDtypeStruct(of_state[number].shape, of_state[number].dtype)
    part = max(update.parts, key=lambda part: sum(of_weights[number].size for number in part.weights))
    pairs = (of_weights, part.weights), (of_state, part.state), (of_sums, part.sums)
    own = [[leaves[number] for number in numbers] for leaves, numbers in pairs]
    return Program("apply", part.program.apply, (*own, part.index, 1.0, 1.0, rates))


def _sums(updates: UpdatePrograms) -> GradientSums:
    """Return the shapes of the sums of gradients."""
    sums: GradientSums = jax.eval_shape(updates.zeros, updates.trainable)
    placed: GradientSums = jax.tree.map(abstract, sums, updates.layout.shardings())
    return placed
