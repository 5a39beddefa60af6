"""The loop over layers, in which each iteration needs the weights of one layer.

On accelerators the loop scans over the layers' stacked weights: they are copied once per call, and the loop does not
grow with the number of layers. A conditional with a branch for each layer would copy them in each iteration, forward
and backward, takes minutes to compile, and on a GPU the host may have to choose the branch.

On a CPU, where memory is what a run lacks, the loop selects each layer's weights from the separate arrays that decoding
needs. Differentiated naively, each iteration would add a gradient for every layer, all zeros but one; instead the
gradient goes into slots that the loop scans over.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

Tree = TypeVar("Tree")


def scan_layers(
    step: Callable[[Array, Tree, Any], Array],
    x: Array,
    trees: Sequence[Tree],
    per_layer: Any,
    *,
    platform: str,
    policy: Callable[..., Any] | None,
) -> Array:
    """Return `x` after `step(x, weights, extra)` for each layer.

    Args:
        step: a layer as a function of its input, its weights and its numbers.
        trees: weights of each layer, all with the same names, shapes and types.
        per_layer: other numbers of the layers, arrays [n, ...].
        platform: that of the devices for which the program is built; see `Decoder`.
        policy: what a layer saves for the backward pass, as for `jax.checkpoint`.
    """
    loop_over = _scan_selected if platform == "cpu" else _scan_stacked
    body, weights = loop_over(step, trees)
    return jax.lax.scan(jax.checkpoint(body, policy=policy), x, (weights, per_layer))[0]


def save_all_but_selected(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy for `jax.checkpoint` that saves all but a layer's selected weights, which are a copy of the model."""
    is_routed = primitive.name == "custom_vjp_call" and not params["call_jaxpr"].eqns  # `_route_gradient`
    return not is_routed and primitive.name != "cond"


def _scan_stacked(step: Callable[..., Array], trees: Sequence[Tree]) -> tuple[Callable[..., Any], Any]:
    """Return the body of a loop over the layers' stacked weights, and those weights."""

    def body(x: Array, inputs: Any) -> tuple[Array, None]:
        return step(x, *inputs), None

    return body, jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _scan_selected(step: Callable[..., Array], trees: Sequence[Tree]) -> tuple[Callable[..., Any], Any]:
    """Return the body of a loop that selects each layer's weights, and the layers' numbers and gradient slots."""

    def body(x: Array, inputs: Any) -> tuple[Array, None]:
        (number, slot), extra = inputs
        return step(x, _select_layer(trees, number, slot), extra), None

    slots = jax.tree.map(lambda *leaves: _gradient_slots(leaves[0].dtype, leaves), *trees)
    return body, (jnp.arange(len(trees)), slots)


def _select_layer(trees: Sequence[Tree], number: Int[Array, ""], slot: Tree) -> Tree:
    """Return `trees[number]`, whose gradient goes to `slot`: the leaves at `number` of the gradient slots."""
    leaves = jax.lax.stop_gradient(list(trees))
    chosen = jax.lax.switch(number, [lambda tree=tree: tree for tree in leaves])
    selected: Tree = jax.tree.map(lambda value, slot: _route_gradient(slot.dtype, value, slot), chosen, slot)
    return selected


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient_slots(kind: DTypeLike, leaves: Sequence[Array]) -> Array:
    """Return zeros [n, ...] whose gradient becomes that of the n `leaves`; float32 for narrower floats, since XLA has
    none on a CPU and would convert all of the slots in each iteration.
    """
    slot_dtype = jnp.promote_types(kind, jnp.float32) if jnp.issubdtype(kind, jnp.floating) else kind
    return jnp.zeros((len(leaves), *leaves[0].shape), slot_dtype)


def _gradient_slots_backward(kind: DTypeLike, _: None, grad: Array) -> tuple[tuple[Array, ...]]:
    return (tuple(part.astype(kind) for part in grad),)


_gradient_slots.defvjp(lambda kind, leaves: (_gradient_slots(kind, leaves), None), _gradient_slots_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _route_gradient(kind: DTypeLike, value: Array, slot: Array) -> Array:
    return value


# Called again instead of returning the value, so that a second derivative takes the same path.
_route_gradient.defvjp(
    lambda kind, value, slot: (_route_gradient(kind, value, slot), None),
    lambda kind, _, grad: (None, grad.astype(kind)),
)
