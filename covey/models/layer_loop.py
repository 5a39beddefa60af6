"""The loop over layers, in which each iteration needs the weights of one layer.

On accelerators the loop scans over the layers' stacked weights, and does not grow with the number of layers. A learner
stores stacks (`layer_stack`); a list of layers is stacked once per call. A conditional with a branch for each layer
would copy weights in each iteration, forward and backward. It takes minutes to compile, and on a GPU the host may have
to choose the branch.

On a CPU, where memory is what a run lacks, the loop selects each layer's weights from the separate arrays that decoding
needs. Differentiated naively, each iteration would add a gradient for every layer, all zeros but one; instead the
gradient goes into slots that the loop scans over. A trainer, which sums gradients, provides the sums (`loops_add_to`):
the loop then adds each layer's gradient to the sums in place. The gradient of all layers never exists at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Tree = TypeVar("Tree")

Sums = list[Array | None]
"""Sum of the gradients of each leaf of a layer, [n, ...] over the layers; None for a leaf that has slots."""
_provided: ContextVar[dict[tuple[int, ...], Array] | None] = ContextVar("_provided", default=None)


def scan_layers(
    step: Callable[[Array, Tree, Any], Array],
    x: Array,
    trees: Sequence[Tree] | Tree,
    per_layer: Any,
    *,
    platform: str,
    policy: Callable[..., Any] | None,
) -> Array:
    """Return `x` after `step(x, weights, extra)` for each layer.

    Args:
        step: a layer as a function of its input, its weights and its numbers.
        trees: weights of each layer, all with the same names, shapes and types; or, on accelerators, a tree of stacks
            [n, ...].
        per_layer: other numbers of the layers, arrays [n, ...].
        platform: platform of the devices for which the program is built; see `Decoder`.
        policy: what a layer saves for the backward pass, as for `jax.checkpoint`.
    """
    if platform != "cpu":
        weights = jax.tree.map(lambda *x: jnp.stack(x), *trees) if isinstance(trees, Sequence) else trees
        # Passes in loops of their own share no computation, and the barrier against it would copy each layer's weights.
        # A loop of one turn is no loop to XLA.
        is_alone = len(jax.tree.leaves(per_layer)[0]) == 1
        body = jax.checkpoint(lambda x, inputs: (step(x, *inputs), None), prevent_cse=is_alone, policy=policy)
        return jax.lax.scan(body, x, (weights, per_layer))[0]
    assert isinstance(trees, Sequence), "a CPU has a list of layers"
    sums = _take_sums(trees)
    selecting, numbered_slots = _scan_selected(step, trees, sums)
    run = jax.checkpoint(selecting, policy=policy)
    (x, passed), _ = jax.lax.scan(run, (x, sums), (numbered_slots, per_layer))
    return _begin_with(x, passed, sums)


@contextmanager
def loops_add_to(sums: Iterable[tuple[Sequence[Array], Array]]) -> Iterator[None]:
    """While this thread traces a loss for a CPU, let the first loop over exactly these arrays add their gradients to
    their sum.

    The gradient of a sum is then the new sum, of the old sum and the gradients, and the gradient of its arrays is 0. If
    no loop runs over the arrays, the sum gets no gradient, and the arrays get theirs.

    Args:
        sums: (the same weight in each layer of a loop, its sum [n, ...]) for each weight.
    """
    token = _provided.set({tuple(map(id, leaves)): total for leaves, total in sums})
    try:
        yield
    finally:
        _provided.reset(token)


def save_all_but_selected(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy for `jax.checkpoint` that saves all but a layer's selected weights, which are a copy of the model."""
    is_routed = primitive.name == "custom_vjp_call" and not params["call_jaxpr"].eqns  # `_route_gradient`
    return not is_routed and primitive.name != "cond"


def _scan_selected(step: Callable[..., Array], trees: Sequence[Tree], sums: Sums) -> tuple[Callable[..., Any], Any]:
    """Return the body of a loop that selects each layer's weights and carries `sums`, and the layers' numbers and
    gradient slots.
    """

    def body(carry: tuple[Array, Sums], inputs: Any) -> tuple[tuple[Array, Sums], None]:
        (x, sums), ((number, slots), extra) = carry, inputs
        tree, sums = _select_layer(trees, number, slots, sums)
        return (step(x, tree, extra), sums), None

    pairs = zip(_leaves_by_name(trees), sums, strict=True)
    slots = [_gradient_slots(leaves[0].dtype, leaves) if total is None else None for leaves, total in pairs]
    return body, (jnp.arange(len(trees)), slots)


def _take_sums(trees: Sequence[Any]) -> Sums:
    """Return the sums that were provided for the leaves of `trees`, each only once: a second loop would add the sum
    itself again.
    """
    provided = _provided.get() or {}
    return [provided.pop(tuple(map(id, leaves)), None) for leaves in _leaves_by_name(trees)]


def _select_layer(
    trees: Sequence[Tree], number: Int[Array, ""], slots: Sequence[Array | None], sums: Sums
) -> tuple[Tree, Sums]:
    """Return `trees[number]` and `sums`. The gradient of a leaf goes to its sum, or to its slot, which is the array at
    `number` of the gradient slots.
    """
    leaves = jax.lax.stop_gradient(list(trees))
    chosen = jax.lax.switch(number, [lambda tree=tree: tree for tree in leaves])
    values, structure = jax.tree.flatten(chosen)
    routed = [_route(number, *arguments) for arguments in zip(values, slots, sums, strict=True)]
    selected: Tree = jax.tree.unflatten(structure, [value for value, _ in routed])
    return selected, [total for _, total in routed]


def _route(number: Int[Array, ""], value: Array, slot: Array | None, total: Array | None) -> tuple[Array, Array | None]:
    if total is not None:
        return _add_gradient(value, total, number)
    assert slot is not None, "a leaf without a sum has a slot"
    return _route_gradient(slot.dtype, value, slot), None


def _leaves_by_name(trees: Sequence[Any]) -> list[tuple[Array, ...]]:
    return list(zip(*map(jax.tree.leaves, trees), strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient_slots(kind: DTypeLike, leaves: Sequence[Array]) -> Array:
    """Return zeros [n, ...] whose gradient becomes the gradient of the n `leaves`. Narrower floats get float32 zeros:
    XLA lacks the narrow types on a CPU, and would convert all slots in each iteration.
    """
    slot_dtype = jnp.promote_types(kind, jnp.float32) if jnp.issubdtype(kind, jnp.floating) else kind
    return jnp.zeros((len(leaves), *leaves[0].shape), slot_dtype)


_gradient_slots.defvjp(
    lambda kind, leaves: (_gradient_slots(kind, leaves), None),
    lambda kind, _, grad: (tuple(part.astype(kind) for part in grad),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _route_gradient(kind: DTypeLike, value: Array, slot: Array) -> Array:
    return value


# Called again instead of returning the value, so that a second derivative takes the same path.
_route_gradient.defvjp(
    lambda kind, value, slot: (_route_gradient(kind, value, slot), None),
    lambda kind, _, grad: (None, grad.astype(kind)),
)


@jax.custom_vjp
def _add_gradient(
    value: Float[Array, "..."], total: Float[Array, "n ..."], number: Int[Array, ""]
) -> tuple[Float[Array, "..."], Float[Array, "n ..."]]:
    return value, total


def _add_gradient_backward(number: Array, grads: tuple[Array, Array]) -> tuple[None, Array, None]:
    grad, total = grads
    new = jax.lax.dynamic_index_in_dim(total, number, keepdims=False) + grad.astype(total.dtype)
    return None, jax.lax.dynamic_update_index_in_dim(total, new, number, axis=0), None


_add_gradient.defvjp(lambda value, total, number: (_add_gradient(value, total, number), number), _add_gradient_backward)


@jax.custom_vjp
def _begin_with(x: Array, passed: Sums, sums: Sums) -> Array:
    """Return `x`, the result of a loop; its backward pass begins with `sums` as the gradient of `passed`, which are the
    same after the loop.
    """
    return x


_begin_with.defvjp(lambda x, passed, sums: (x, sums), lambda sums, grad: (grad, sums, None))
