"""The frozen policy of the KL: the weights that it begins with, and how it follows the actor."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from covey.config.schema import GRPOConfig
from covey.models.decoder import Decoder
from covey.models.lora import adapters_change_base, merge_lora, split_trainable, without_lora
from covey.parallel.programs import replace_leaves
from covey.parallel.reshard import reshard


def initial_reference(actor: Decoder, config: GRPOConfig) -> Decoder:
    """Return the actor, or its base where `config` asks for it or where new adapters change nothing yet."""
    return without_lora(actor) if config.reference == "base" or not adapters_change_base(actor) else actor


def own_arrays(reference: Decoder, actor: Decoder, moves: bool) -> Decoder:
    """Return `reference` with its own copy of the arrays that training `actor` will overwrite. A reference that `moves`
    has a copy of all arrays, and its adapters are merged.
    """
    graph, params = nnx.split(merge_lora(reference) if moves else reference)
    overwritten = set().union(*map(_buffers, jax.tree.leaves(split_trainable(actor)[1])))
    copied = [moves or bool(_buffers(x) & overwritten) for x in jax.tree.leaves(params)]
    return nnx.merge(graph, replace_leaves(params, copied, _copy_all))


def mixed(reference: Any, actor: Decoder, mixing: float) -> Any:
    """Return α·actor + (1 − α)·reference, adapters merged (Gorbatovski et al., 2024, TR-DPO, eq. 5).

    Args:
        reference: state of the reference; the result has its dtypes and lies on its devices.
        actor: the actor with its current weights.
        mixing: α.
    """
    _, params = nnx.split(merge_lora(actor))
    return _mix(reference, reshard(params, jax.tree.map(lambda x: x.sharding, reference), copy=True), mixing)


def _buffers(x: jax.Array) -> set[int]:
    """Return the memory addresses of the shards of `x`: two arrays may share them without being one object."""
    return {piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards}


@jax.jit
def _copy_all(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]


@jax.jit
def _mix(reference: Any, actor: Any, mixing: float) -> Any:
    """Compute α·actor + (1 − α)·reference in float32, rounded to the dtype of `reference`."""
    mix = lambda r, a: (mixing * a.astype(jnp.float32) + (1 - mixing) * r.astype(jnp.float32)).astype(r.dtype)  # noqa: E731
    return jax.tree.map(mix, reference, actor)
