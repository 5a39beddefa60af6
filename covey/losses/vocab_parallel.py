"""Vocabulary-parallel head: on a mesh, each device computes the logits of its own part of the vocabulary.

The head [V, D] is stored split over `tp` along V and over `fsdp` along D, and rows of tokens are split over `fsdp`. A
product with a block of the vocabulary needs D whole. Gathering the head would move V × D numbers to each device, and a
gradient of that size back. Instead one all-to-all exchanges a device's piece [V/tp, D/fsdp] for its part of the
vocabulary, [V/(tp·fsdp), D], and the hidden states of a chunk of tokens are gathered over `fsdp`. No device holds more
of the head than its part. Tokens × D numbers move, which is less than V × D while a micro-batch has fewer tokens than
the vocabulary. The devices then combine a few numbers per token: the maximum logit and the sums of the softmax, as in
Megatron-LM's parallel cross-entropy (Shoeybi et al., 2019, section 3). Whether a token would be drawn again
(`TargetRace`) takes the sums of its blocks besides.

On one device every method of `VocabLayout` returns what it was given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from covey.parallel.arrays import mesh_axes, num_row_shards, partition_spec
from covey.sampling.logits import BLOCKS, exponential_noise, place_noise, split_blocks


class VocabPart(NamedTuple):
    """A device's part of the head.

    Attributes:
        weight: rows of the head, and padding from token id `end` on.
        first, end: token id of the first row, and the one after the last row that is not padding.
        is_whole: whether the part is the whole head.
        is_padded: whether any device's part has padding.
    """

    weight: Float[Array, "S D"]
    first: Int[Array, ""]
    end: Int[Array, ""]
    is_whole: bool = True
    is_padded: bool = False

    def rows(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Return the head's row of each token; zeros for tokens of other parts."""
        if self.is_whole:
            return self.weight[tokens]
        owned = (tokens >= self.first) & (tokens < self.end)
        return jnp.where(owned[..., None], self.weight[jnp.where(owned, tokens - self.first, 0)], 0)


class _Split(NamedTuple):
    """Split of the vocabulary over a mesh axis: `size` entries into `num_parts` parts of `step`, the last ones padded.

    `dimension` is the dimension of the stored head that the axis splits; None if the axis replicates the head.
    """

    axis: str
    num_parts: int
    dimension: int | None
    size: int

    @property
    def step(self) -> int:
        return -(-self.size // self.num_parts)

    def split(self, weight: Array) -> Array:
        """Exchange the entries of the axis's devices, [size, ...], for the entries of one part, [step, ...]."""
        if self.dimension == 0:
            return weight
        weight = jnp.pad(weight, ((0, self.step * self.num_parts - self.size), (0, 0)))
        if self.dimension == 1:
            pieces = jax.lax.all_to_all(weight.reshape(self.num_parts, self.step, -1), self.axis, 0, 0)
            return jnp.concatenate(list(pieces), axis=1)
        return jax.lax.dynamic_slice_in_dim(weight, jax.lax.axis_index(self.axis) * self.step, self.step)

    def join(self, grad: Array) -> Array:
        """Exchange the gradient of one part, [step, ...], for one of the stored form, [size, ...]."""
        if self.dimension == 0:
            return grad
        if self.dimension == 1:
            pieces = jnp.stack(jnp.split(grad, self.num_parts, axis=1))
            grad = jax.lax.all_to_all(pieces, self.axis, 0, 0).reshape(self.num_parts * self.step, -1)
        else:
            grad = jax.lax.all_gather(grad, self.axis, tiled=True)
        return grad[: self.size]


UNSPLIT = PartitionSpec()
"""Partition of an array that is whole on each device."""


@dataclass(frozen=True)
class VocabLayout:
    """Division of a head and of rows of tokens over the devices of a mesh.

    `run` calls a function on each device. The other methods work on the device's own arrays, inside that function.

    Attributes:
        vocabulary: number of tokens that the head has logits for.
        mesh: None for one device.
        weight_spec: partition of the stored head.
        row_axes: mesh axes that split rows.
        vocab_axes: mesh axes that split the vocabulary while logits are computed.
    """

    vocabulary: int
    mesh: Any = None
    weight_spec: PartitionSpec = UNSPLIT
    row_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, weight: Float[Array, "V D"], num_rows: int) -> "VocabLayout":
        """Return the layout of a head on its mesh, for `num_rows` rows of tokens. Rows that the mesh does not divide
        are computed on every device.
        """
        mesh, vocabulary = jax.typeof(weight).sharding.mesh, weight.shape[0]
        if mesh.empty or mesh.size == 1:
            return cls(vocabulary)
        row_axes = mesh_axes("rows", mesh) if num_rows % num_row_shards(mesh) == 0 else ()
        vocab_axes = (*mesh_axes("vocab", mesh), *mesh_axes("embed", mesh))
        used = [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in (row_axes, vocab_axes)]
        return cls(vocabulary, mesh, partition_spec("head.embedding", weight.shape, mesh), *used)

    @property
    def part_size(self) -> int:
        """Number of vocabulary entries of a device's part, padding included."""
        splits = self._splits()
        return splits[-1].step if splits else self.vocabulary

    def run(self, fn: Callable[..., Any], weight: Array, rows: Any, scored: Array, *, with_weight: bool = False) -> Any:
        """Call `fn(weight, rows, scored)` on each device with its pieces of the head and of the arrays of `rows`.

        Args:
            with_weight: `fn` returns an array like the head and arrays of rows, instead of arrays of rows alone.
        """
        if self.mesh is None:
            return fn(weight, rows, scored)
        of_rows = PartitionSpec(self.row_axes or None)
        in_specs = (self.weight_spec, of_rows, PartitionSpec())
        out_specs = (self.weight_spec, of_rows) if with_weight else of_rows
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
            weight, rows, scored
        )

    def take_part(self, weight: Float[Array, "V_piece D_piece"]) -> VocabPart:
        """Exchange a device's piece of the stored head for its part of the vocabulary."""
        first, end = jnp.zeros((), jnp.int32), jnp.asarray(self.vocabulary, jnp.int32)
        splits = self._splits()
        for split in splits:
            weight = split.split(weight)
            first = first + jax.lax.axis_index(split.axis) * split.step
            end = jnp.minimum(end, first + split.step)
        is_padded = any(split.step * split.num_parts > split.size for split in splits)
        return VocabPart(weight, first, end, not splits, is_padded)

    def return_part(self, grad: Float[Array, "S D"], dtype: DTypeLike) -> Float[Array, "V_piece D_piece"]:
        """Sum the gradients of a part over all rows, and exchange them for the gradient of a piece of the head."""
        if axes := tuple(axis for axis in self.row_axes if axis not in self.vocab_axes):
            grad = jax.lax.psum(grad, axes)
        grad = grad.astype(dtype)
        for split in reversed(self._splits()):
            grad = split.join(grad)
        return grad

    def gather_rows(self, x: Array) -> Array:
        """Return the rows [W, ...] of all devices that have parts of one vocabulary, from a device's own [R, ...]."""
        axes = self._gathered_axes()
        gathered: Array = jax.lax.all_gather(x, axes, tiled=True) if axes else x
        return gathered

    def own_rows(self, x: Array) -> Array:
        """Return a device's own rows [R, ...] from the result of `gather_rows`."""
        axes = self._gathered_axes()
        if not axes:
            return x
        size = x.shape[0] // math.prod(self.mesh.shape[axis] for axis in axes)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size)

    def sum_rows(self, x: Array) -> Array:
        """Sum `x` over the parts of the vocabulary and return a device's own rows of it."""
        axes = self._gathered_axes()
        x = jax.lax.psum_scatter(x, axes, tiled=True) if axes else x
        total: Array = self.sum(x, tuple(axis for axis in self.vocab_axes if axis not in axes))
        return total

    def sum(self, x: Any, axes: tuple[str, ...] | None = None) -> Any:
        """Sum `x` over the parts of the vocabulary, or over `axes`."""
        axes = self.vocab_axes if axes is None else axes
        return jax.lax.psum(x, axes) if axes else x

    def max(self, x: Array) -> Array:
        """Return the maximum of `x` over the parts of the vocabulary."""
        return jax.lax.pmax(x, self.vocab_axes) if self.vocab_axes else x

    def whole_rows(self, logits: Float[Array, "N S"], part: VocabPart) -> Float[Array, "N V"]:
        """Return logits of the whole vocabulary, given the logits of a device's part."""
        if part.is_whole:
            return logits
        lowest = jnp.finfo(logits.dtype).min
        count, size = logits.shape
        own = jnp.where(part.first + jnp.arange(size) < part.end, logits, lowest)
        padded = jnp.full((count, self.vocabulary + size), lowest)
        whole: Array = self.max(jax.lax.dynamic_update_slice_in_dim(padded, own, part.first, axis=1))
        return whole[:, : self.vocabulary]

    def _gathered_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.row_axes if axis in self.vocab_axes)

    def _splits(self) -> list[_Split]:
        """Return the splits that lead from the whole vocabulary to a part, in order."""
        splits, size = [], self.vocabulary
        for axis in self.vocab_axes:
            splits.append(_Split(axis, self.mesh.shape[axis], _dimension(self.weight_spec, axis), size))
            size = splits[-1].step
        return splits


def _dimension(spec: PartitionSpec, axis: str) -> int | None:
    """Return the dimension that a mesh axis splits."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return next((dimension for dimension, axes in enumerate(entries) if axis in axes), None)


class Targets(NamedTuple):
    """Tokens that are scored.

    Attributes:
        token: their ids.
        keys: random keys of `sampling.logits.token_keys` that drew them; None where no race is run.
    """

    token: Int[Array, "R M"]
    keys: UInt32[Array, "R M 2"] | None = None


class TargetRace(NamedTuple):
    """State of a race, after a part of the vocabulary: would the trainer's logits draw the sampled token too, under the
    same noise? Masses are relative to exp(max logit so far).

    `sampling.logits.race` draws from whole rows of logits. Whether a given token wins follows from less: the mass of
    each block, and the largest mass / F in the token's own block.

    Attributes:
        masses: mass of each block of the race.
        best: largest mass / F in the block of the target.
        own: mass / F of the target; 0 before it was met.
    """

    masses: Float[Array, "R M blocks"]
    best: Float[Array, "R M"]
    own: Float[Array, "R M"]

    @classmethod
    def start(cls, targets: Targets) -> "TargetRace | None":
        """Return the race before any of the vocabulary; None where none is run."""
        if targets.keys is None:
            return None
        zeros = jnp.zeros(targets.token.shape, jnp.float32)
        return cls(jnp.zeros((*zeros.shape, BLOCKS), jnp.float32), zeros, zeros)

    def add(
        self, mass: Float[Array, "R M n"], first: Int[Array, ""], rescale: Float[Array, "R M"], targets: Targets
    ) -> "TargetRace":
        """Return the race with the next n tokens of the vocabulary, from id `first` on.

        Args:
            mass: their masses; 0 for tokens that do not count.
            first: id of the first one.
            rescale: factor of the masses so far, whose maximum was another.
            targets: the targets with their keys.
        """
        assert targets.keys is not None, "a race has keys"
        table = split_blocks(mass, 0.0)  # a column is a block of the race, but for `first`
        masses = jnp.roll(table.sum(-2), first, axis=-1)
        column = (targets.token - first) % BLOCKS
        inner = jnp.take_along_axis(table, column[..., None, None], axis=-1)[..., 0]
        ids = first + column[..., None] + BLOCKS * jnp.arange(inner.shape[-1])
        scores = inner / place_noise(targets.keys, ids // BLOCKS)
        own = jnp.where(ids == targets.token[..., None], scores, 0.0).sum(-1)
        return TargetRace(
            self.masses * rescale[..., None] + masses,
            jnp.maximum(self.best * rescale, scores.max(-1)),
            self.own * rescale + own,
        )

    def won(self, layout: VocabLayout, rescale: Float[Array, "R M"], targets: Targets) -> Bool[Array, "R M"]:
        """Return whether the targets win over all tokens. A tie is won.

        Args:
            layout: parts of the vocabulary that devices have.
            rescale: factor of the masses of this part, for one maximum over all parts.
            targets: the targets with their keys.
        """
        assert targets.keys is not None, "a race has keys"
        masses, own = layout.sum((self.masses * rescale[..., None], self.own * rescale))
        best = layout.max(self.best * rescale)
        of_block, _ = exponential_noise(targets.keys, BLOCKS, 0)
        scores = masses / of_block
        of_target = jnp.take_along_axis(scores, (targets.token % BLOCKS)[..., None], axis=-1)[..., 0]
        won: Array = (of_target >= scores.max(-1)) & (own >= best)
        return won
