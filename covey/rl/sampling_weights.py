"""Weights of a rollout as its engine takes them, and the loan of a learner's stacks for it.

A step of decoding reads all weights once, as fast as memory gives them only from a list of layers with arrays of their
own: from stacks a TPU takes more than twice as long, and a GPU first copies kernels of the MLPs. An update scans over
stacks. Where both share devices there is one copy nevertheless: while a rollout samples, the stacks are taken apart,
one after the other, and made again behind it. Each way is a pass over the weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from covey.models.decoder import Decoder
from covey.models.dtypes import round_for_sampling, sampling_type
from covey.models.layer_stack import LayerStacks, buffers, unstack_layers
from covey.parallel.programs import abstract, takes_shapes

State = nnx.State[Any, Any]
Path = tuple[Any, ...]


class SamplingWeights:
    """Conversion of a model's parameters to those with which it samples: kernels and adapters rounded, layers a list.

    Args:
        model: the model, of arrays or of shapes.

    Attributes:
        model: the model that samples, of shapes.
        stacks: conversion between stacks and a list.
    """

    def __init__(self, model: Decoder):
        graph, params = nnx.split(model)
        self.stacks, self._dtype = LayerStacks(model), sampling_type(model)
        self._is_stacked = bool(model.stacked)
        self._programs: dict[Any, Callable[[State], State]] = {}
        shapes = abstract(params)
        graph = nnx.split(unstack_layers(nnx.merge(graph, shapes)))[0]
        self.model: Decoder = nnx.merge(graph, self.convert(shapes))

    def convert(self, params: State) -> State:
        """Return `params`, or a part of them, as the engine takes them; shapes give shapes."""
        if not self._is_stacked:
            return round_for_sampling(params, self._dtype)
        layers, rest = self.stacks.split(params)
        converted: State = nnx.merge_state(self._listed(layers), round_for_sampling(rest, self._dtype))
        return converted

    def split_lendable(self, params: State) -> tuple[State, State]:
        """Return the stacks in `params` whose layers are sampled with as they are, and all else."""
        flat = nnx.to_flat_state(self.stacks.split(params)[0])
        rounded = dict(nnx.to_flat_state(round_for_sampling(abstract(nnx.from_flat_state(dict(flat))), self._dtype)))
        lendable = {path for path, leaf in flat if leaf.dtype == rounded[path].dtype}
        parts = nnx.to_flat_state(params)
        kept = {path: leaf for path, leaf in parts if path not in lendable}
        return nnx.from_flat_state({path: leaf for path, leaf in parts if path in lendable}), nnx.from_flat_state(kept)

    def _listed(self, layers: State) -> State:
        """Return the layers of these stacks, by one program."""
        structure = jax.tree.structure(layers)
        if structure not in self._programs:
            places = jax.tree.map(lambda x: x.sharding, self._take_apart(abstract(layers)))
            program = jax.jit(self._take_apart, out_shardings=places)
            self._programs[structure] = takes_shapes(program, places)
        return self._programs[structure](layers)

    def _take_apart(self, layers: State) -> State:
        return round_for_sampling(self.stacks.unstack(layers), self._dtype)


class StackLoan:
    """Loan of stacks to a rollout. Meanwhile their holders have shapes in their place, so that nothing keeps the
    memory, and whoever uses them before they are given back fails.

    Args:
        stacks: conversion between stacks and a list.
        holders: objects with the names of those of their attributes that hold states with the stacks.
    """

    def __init__(self, stacks: LayerStacks, holders: Sequence[tuple[Any, str]]):
        self._stacks, self._holders = stacks, holders
        self._lent: list[tuple[State, State]] = []

    def take(self, owner: Any, name: str, paths: Sequence[Path]) -> State:
        """Take the stacks at `paths` apart, in the state that `owner` has as `name`. Return the layers of all that are
        lent.
        """
        for path in paths:
            leaf = dict(nnx.to_flat_state(getattr(owner, name)))[path]
            stack = nnx.from_flat_state({path: leaf})
            del leaf
            # Without a pause the next stack would be taken apart before this one is free.
            layers = jax.block_until_ready(self._stacks.unstack(stack))
            shape = abstract(stack)
            self._replace(stack, shape)
            self._lent.append((shape, layers))
        return nnx.from_flat_state({path: x for _, layers in self._lent for path, x in nnx.to_flat_state(layers)})

    def give_back(self) -> None:
        """Make the stacks again, of layers that nothing else refers to any more."""
        while self._lent:
            shape, layers = self._lent.pop()
            self._replace(shape, jax.block_until_ready(self._stacks.stack(layers)))

    def _replace(self, old: State, new: State) -> None:
        (before,), (after,) = jax.tree.leaves(old), jax.tree.leaves(new)
        key = buffers(before)
        for owner, name in self._holders:
            held = jax.tree.map(lambda x: after if buffers(x) == key else x, getattr(owner, name))
            setattr(owner, name, held)
