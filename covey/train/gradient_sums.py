"""Sums of gradients over the micro-batches of a step. On a CPU the layers of a loop share one array per weight, so
that the loop's backward pass adds to it in place (`models.layer_loop`); other weights have an array each.

Adapters on a mesh that divides rows over `data` have a sum for each part of the rows, [..., parts, n_in, n_out], on the
devices of that part: these add their sums once a step (`GradientLayout.reduce`), and not in each micro-batch. Other
weights do not, because the sums of a whole model in each part would need too much memory.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from covey.models.decoder import Decoder
from covey.models.layer_loop import loops_add_to
from covey.models.layer_stack import stacked_sharding
from covey.parallel.arrays import dotted_path, mesh_of


class GradientSums(NamedTuple):
    """Sums of gradients, float32.

    Attributes:
        loops: one array [n, ...] per weight of a layer, for the n layers of a loop.
        others: one array per weight outside of the loops, in the order of the trainable arrays.
    """

    loops: list[Float[Array, "n ..."]]
    others: list[Float[Array, "..."]]


class GradientLayout:
    """Layout of the sums of gradients of a model.

    Args:
        model: the model.
        trainable: its trainable arrays; gradients exist for these alone.

    Attributes:
        parts: number of parts of the rows with sums of their own; 1 where there are no such sums.
        layers: dotted path of a weight → its path within the layer, for the weights of each layer in a loop.
        outside: dotted paths of the weights outside of the loops.
        places: number of a trainable array → number of its leaf of the sums, and the place of its layer in that leaf;
            None outside of loops.
    """

    def __init__(self, model: nnx.Module, trainable: Any):
        paths, self._structure = jax.tree_util.tree_flatten_with_path(trainable)
        numbers = {dotted_path(path): number for number, (path, _) in enumerate(paths)}
        runs = _find_loops(model, numbers)
        self.layers = [layer for run in runs for layer in run]
        self.outside = [name for name in numbers if not any(name in layer for layer in self.layers)]
        self._loops = [[numbers[name] for name in names] for run in runs for names in zip(*run, strict=True)]
        self._others = [numbers[name] for name in self.outside]
        self.places: dict[int, tuple[int, int | None]] = {
            number: (at, place) for at, loop in enumerate(self._loops) for place, number in enumerate(loop)
        } | {number: (at, None) for at, number in enumerate(self._others, start=len(self._loops))}
        adapters = {number for name, number in numbers.items() if name.endswith((".lora.a", ".lora.b"))}
        mesh = mesh_of(trainable) if adapters else None
        self.parts = mesh.shape.get("data", 1) if mesh else 1
        self._divided = adapters if self.parts > 1 else set()
        self._reduced: list[Sharding] = [x.sharding for _, x in paths]
        self._shardings = [_by_part(x) if n in self._divided else x.sharding for n, (_, x) in enumerate(paths)]

    def zeros(self, trainable: Any) -> GradientSums:
        """Return sums of no gradients."""
        loops, others = self._split(self._divide(trainable))
        stacked = [jnp.zeros((len(leaves), *leaves[0].shape), jnp.float32) for leaves in loops]
        return GradientSums(stacked, [jnp.zeros(x.shape, jnp.float32) for x in others])

    def shardings(self, reduced: bool = False) -> Any:
        """Return the shardings of the sums. `reduced` sums have the shardings of the weights."""
        loops, others = self._split(self._reduced if reduced else self._shardings)
        stacked: list[Any] = [stacked_sharding(each[0]) for each in loops]
        return GradientSums(stacked, others)

    def add_gradients(
        self, loss: Callable[[Any], tuple[Array, Any]], trainable: Any, sums: GradientSums
    ) -> tuple[GradientSums, Any]:
        """Return `sums` plus the gradient of `loss`, a function trainable → (loss, auxiliary); and the auxiliary."""
        loops, others = self._split(self._divide(trainable))

        def loss_of(totals: list[Array], others: list[Array]) -> tuple[Array, Any]:
            arrays, totals = _join(loops, totals)
            with loops_add_to(zip(arrays, totals, strict=True)):
                return loss(self._merge(arrays, others))

        gradient = jax.grad(loss_of, argnums=(0, 1), has_aux=True)
        (totals, new), auxiliary = gradient(sums.loops, others)
        return GradientSums(
            totals, [a + b.astype(jnp.float32) for a, b in zip(sums.others, new, strict=True)]
        ), auxiliary

    def reduce(self, sums: GradientSums) -> GradientSums:
        """Return the sums over all parts of the rows."""
        loops = zip((loop[0] for loop in self._loops), sums.loops, strict=True)
        parts = loops, zip(self._others, sums.others, strict=True)
        return GradientSums(*[[x.sum(-3) if n in self._divided else x for n, x in part] for part in parts])

    def as_trainable(self, sums: GradientSums) -> Any:
        """Return the sums, of all parts, as a tree like the trainable arrays."""
        return self._merge([list(total) for total in sums.loops], sums.others)

    def norm(self, sums: GradientSums, scale: float) -> Float[Array, ""]:
        """Return the norm of `sums` · `scale`: the root of the squares of the trainable arrays, added in their order.
        The layers of a loop share kernels.
        """
        square = partial(optax.tree.norm, squared=True)
        loops = [list(jax.vmap(square)(total * scale)) for total in sums.loops]
        squares = self._merge(loops, [square(x * scale) for x in sums.others])
        return jnp.sqrt(jnp.asarray(sum(jax.tree.leaves(squares))))

    def _divide(self, trainable: Any) -> list[Array]:
        """Return the trainable arrays, adapters with a copy for each part of the rows, on its devices."""
        leaves: list[Array] = jax.tree.leaves(trainable)
        for n in self._divided:
            copies = jnp.repeat(jnp.expand_dims(leaves[n], -3), self.parts, axis=-3)
            leaves[n] = jax.lax.with_sharding_constraint(copies, self._shardings[n])
        return leaves

    def _split(self, leaves: Sequence[Any]) -> tuple[list[list[Any]], list[Any]]:
        return [[leaves[i] for i in loop] for loop in self._loops], [leaves[i] for i in self._others]

    def _merge(self, loops: Sequence[Sequence[Any]], others: Sequence[Any]) -> Any:
        numbers = [*(i for loop in self._loops for i in loop), *self._others]
        leaves = dict(zip(numbers, [*(x for loop in loops for x in loop), *others], strict=True))
        return jax.tree.unflatten(self._structure, [leaves[i] for i in range(len(leaves))])


def _find_loops(model: nnx.Module, trained: Iterable[str]) -> list[list[dict[str, str]]]:
    """Return the `GradientLayout.layers` of each loop. Accelerators have none: their loops return the gradients of all
    layers.

    Args:
        trained: dotted paths of the trainable arrays.
    """
    loops = []
    for path, node in nnx.iter_graph(model):
        for layers in node.layer_runs() if isinstance(node, Decoder) and node.platform == "cpu" else []:
            prefixes = [".".join(map(str, (*path, "layers", number, ""))) for number in layers]
            names = [name.removeprefix(prefixes[0]) for name in trained if name.startswith(prefixes[0])]
            loops += [[{prefix + name: name for name in names} for prefix in prefixes]] if names else []
    return loops


def _by_part(adapter: Any) -> Sharding:
    """Return the sharding of an array that has a copy of `adapter` for each part of the rows."""
    mesh, axes = adapter.sharding.mesh, tuple(adapter.sharding.spec)
    axes += (None,) * (adapter.ndim - len(axes))
    return NamedSharding(mesh, PartitionSpec(*axes[:-2], "data", *axes[-2:]))


@jax.custom_vjp
def _join(arrays: list[list[Array]], sums: list[Array]) -> tuple[list[list[Array]], list[Array]]:
    """Tie each sum to its arrays; the values pass unchanged. The gradient of a sum is its new value: the sum that a
    loop has added to, or the sum itself, plus the gradients that its arrays got outside of loops.
    """
    return arrays, sums


def _join_forward(arrays: Any, sums: Any) -> Any:
    values = jax.tree.map(lambda x: x.value, (arrays, sums), is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    return values, values[1]


def _join_backward(sums: list[Array], grads: Any) -> Any:
    return None, [_new_sum(*of_weight) for of_weight in zip(sums, *reversed(grads), strict=True)]


def _new_sum(total: Array, new_total: Any, grads: list[Any]) -> Array:
    total = total if isinstance(new_total, SymbolicZero) else new_total
    if all(isinstance(grad, SymbolicZero) for grad in grads):
        return total
    zeros = partial(jnp.zeros, total.shape[1:])
    dense = [zeros() if isinstance(grad, SymbolicZero) else grad for grad in grads]
    return total + jnp.stack(dense).astype(total.dtype)


_join.defvjp(_join_forward, _join_backward, symbolic_zeros=True)
