"""Programs of a run: jitted functions together with the shapes of their arguments.

A program is lowered and compiled from shapes alone, without making an array, for whatever devices the shardings of the
shapes name; those may be a description of devices that are not there (`jax.experimental.topologies`). Its function is
the object that the run itself calls, so that what is planned is what runs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Program:
    """A jitted function of a run with the arguments of one call.

    Attributes:
        name: what the program does, for people.
        function: the jitted function; the run calls this object.
        args, kwargs: shapes (`abstract`) in place of arrays; values where an argument is static or a Python number.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """Lower the program for the devices of its arguments; or for `platform`, whose compiler need not be there.

        Args:
            platform: `cpu`, `tpu`, `cuda` or `rocm`; the model must have been built for it too.
        """
        platforms = None if platform is None else (platform,)
        lowered: jax.stages.Lowered = self.function.trace(*self.args, **self.kwargs).lower(lowering_platforms=platforms)
        return lowered


def on_host() -> AbstractContextManager[Any]:
    """Return a context in which JAX computes on the host's processor, if it knows that: small programs for a number are
    no programs for the accelerator.
    """
    try:
        context: AbstractContextManager[Any] = jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves out the processor
        return nullcontext()
    return context


def replace_leaves(tree: Tree, chosen: Sequence[bool], replace: Callable[[list[Any]], list[Any]]) -> Tree:
    """Return `tree` with `replace` of those leaves that are `chosen`: one call for all, which may be one program."""
    leaves, structure = jax.tree.flatten(tree)
    given = [leaf for leaf, one in zip(leaves, chosen, strict=True) if one]
    new = iter(replace(given) if given else ())
    replaced: Tree = jax.tree.unflatten(
        structure, [next(new) if one else leaf for leaf, one in zip(leaves, chosen, strict=True)]
    )
    return replaced


def abstract(tree: Tree, sharding: Sharding | None = None) -> Tree:
    """Return the shapes of the arrays of `tree`, on `sharding`, or by default on the devices where the arrays are."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        place = sharding or getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=getattr(x, "weak_type", False))

    shapes: Tree = jax.tree.map(shape, tree)
    return shapes
