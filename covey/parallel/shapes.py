"""Shapes in place of arrays: of a model that is not loaded, and on devices that need not exist."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding

Tree = TypeVar("Tree")


def is_abstract(tree: Any) -> bool:
    """Return whether `tree` has shapes in place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def takes_shapes(function: Any, shardings: Any) -> Callable[..., Any]:
    """Return a jitted function that also takes shapes. It then returns the shapes of its results, on `shardings`."""

    def call(*args: Any) -> Any:
        if is_abstract(args):
            return jax.tree.map(abstract, jax.eval_shape(function, *args), shardings)
        return function(*args)

    return call


def abstract(tree: Tree, sharding: Sharding | None = None) -> Tree:
    """Return the shapes of the arrays of `tree`, on `sharding`, or by default on the devices where the arrays are."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        place = sharding or getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=getattr(x, "weak_type", False))

    shapes: Tree = jax.tree.map(shape, tree)
    return shapes
