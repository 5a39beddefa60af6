"""Selection of one layer's weights inside a loop over layers.

Decoding needs each layer's weights in separate arrays. A loop over them would have to stack them first: a copy of the
model in every call, and one of its gradient. Here the loop selects each layer's weights from the separate arrays.
Differentiated naively, each iteration would add a gradient for every layer, all zeros but one; instead the gradient
goes into slots that the loop scans over.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

Tree = TypeVar("Tree")


def gradient_slots(trees: Sequence[Tree], platform: str) -> Tree:
    """Return what a scan takes as `xs` to receive the gradients of `trees`: a tree like each of them, with leaves
    [n, ...]; float32 on a CPU, since XLA has no narrower floats there and would convert a whole leaf per iteration.
    """
    widen = platform == "cpu"
    slots: Tree = jax.tree.map(lambda *leaves: _gradient_slots(leaves[0].dtype, widen, leaves), *trees)
    return slots


def select_layer(trees: Sequence[Tree], number: Int[Array, ""], slot: Tree) -> Tree:
    """Return `trees[number]`, whose gradient goes to `slot`: the leaves at `number` of `gradient_slots`."""
    leaves = jax.lax.stop_gradient(list(trees))
    chosen = jax.lax.switch(number, [lambda tree=tree: tree for tree in leaves])
    selected: Tree = jax.tree.map(lambda value, slot: _route_gradient(slot.dtype, value, slot), chosen, slot)
    return selected


def save_all_but_selected(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy for `jax.checkpoint` that saves all but the result of `select_layer`, a copy of the model."""
    is_routed = primitive.name == "custom_vjp_call" and not params["call_jaxpr"].eqns  # `_route_gradient`
    return not is_routed and primitive.name != "cond"


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradient_slots(kind: DTypeLike, widen: bool, leaves: Sequence[Array]) -> Array:
    widen = widen and jnp.issubdtype(kind, jnp.floating)
    return jnp.zeros((len(leaves), *leaves[0].shape), jnp.promote_types(kind, jnp.float32) if widen else kind)


def _gradient_slots_backward(kind: DTypeLike, widen: bool, _: None, grad: Array) -> tuple[tuple[Array, ...]]:
    return (tuple(part.astype(kind) for part in grad),)


_gradient_slots.defvjp(
    lambda kind, widen, leaves: (_gradient_slots(kind, widen, leaves), None), _gradient_slots_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _route_gradient(kind: DTypeLike, value: Array, slot: Array) -> Array:
    return value


# Called again instead of returning the value, so that a second derivative takes the same path.
_route_gradient.defvjp(
    lambda kind, value, slot: (_route_gradient(kind, value, slot), None),
    lambda kind, _, grad: (None, grad.astype(kind)),
)
