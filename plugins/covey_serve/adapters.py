"""Adapters of several clients side by side in one model: each row of a batch has its own.

Their A are columns of one product, their B rows of another, in blocks. Between the two products a row keeps the numbers
of its adapter, and those of the others become 0. An adapter has whole blocks, and the products of blocks are added one
after the other, so that no bit of a row depends on the place of its adapter, or on the others.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from covey.config.schema import LoRAConfig
from covey.models.decoder import Decoder
from covey.models.layers import Axes, LoRA, project
from covey.models.lora import find_targets
from covey.sampling.engine import Engine
from covey.sampling.model_runner import ModelRunner
from covey.sampling.programs import Drawn
from covey.sampling.sequence import Sequence

BLOCK = 16
"""Number of columns of a block."""

Place = tuple[slice, float]
"""Columns of an adapter, and its scale alpha / rank."""


class RowScales(nnx.Variable[Any]):
    """Scales [rows, 1, columns]: of a row its adapter's in the columns of this adapter, and 0 in all others."""


class SideBySide(LoRA):
    """Adapters of a projection; `scales` are of all projections."""

    def __init__(self, n_in: int, n_out: int, scales: RowScales):
        super().__init__(n_in, n_out, columns := scales.shape[-1], columns, rngs=nnx.Rngs(0))
        self.scales = scales

    def widen(self, narrow: Float[Array, "... C"], dtype: DTypeLike, n_out: Axes, sum_dtype: DTypeLike) -> Array:
        """Return the addition whose product with A is `narrow`. With `join_adapters` A has those of other projections
        beside it, and B rows of zeros for them.
        """
        scales = jnp.tile(self.scales[...], narrow.shape[-1] // self.scales.shape[-1]).astype(narrow.dtype)
        own, b = jnp.where(scales == 0, 0, narrow * scales), self.b[...].reshape(-1, *n_out)
        blocks = [slice(start, start + BLOCK) for start in range(0, len(b), BLOCK)]
        first, *parts = (project(own[..., block], b[block], dtype, 1, sum_dtype) for block in blocks)
        return sum(parts, first)


def with_columns(base: Decoder, columns: int) -> Decoder:
    """Return a model that shares every array of `base` and has room for adapters of `columns` in all."""
    model, scales = nnx.merge(*nnx.split(base)), RowScales(jnp.zeros((1, 1, columns)))
    for linear in find_targets(model, LoRAConfig().targets).values():
        linear.lora = SideBySide(*linear.shape, scales)
    return model


def write(params: Any, adapters: Any, start: int) -> Any:
    """Return the state of a model `with_columns` in which these adapters are at the columns from `start` on."""
    return nnx.merge_state(params, _write(nnx.filter_state(params, nnx.LoRAParam), adapters, start))


@jax.jit
def _write(whole: Any, adapters: Any, start: Any) -> Any:
    def put(x: Array, new: Array) -> Array:
        place = [0 if size == most else start for size, most in zip(new.shape, x.shape, strict=True)]
        return jax.lax.dynamic_update_slice(x, new.astype(x.dtype), place)

    return jax.tree.map(put, whole, adapters)


class RowRunner(ModelRunner):
    """Runner of a model `with_columns`: each row of a program has the adapter of its request.

    Args:
        engine: engine of the model, whose runner it replaces.
        place_of: function from the id of a request to the place of its adapter.
    """

    def __init__(self, engine: Engine, place_of: Callable[[int], Place]):
        super().__init__(engine.programs, engine.runner.params)
        self._scheduler, self._place_of = engine.scheduler, place_of
        self._scales, self._places = nnx.filter_state(self.params, RowScales), list[Place]()

    def prefill(self, prompts: Collection[np.ndarray], shape: tuple[int, int]) -> None:
        """Prefill as `ModelRunner` does, unless the prompts were prefilled last with the same adapters."""
        requests = self._scheduler.prefilled
        if (places := [*map(self._place_of, requests)]) != self._places:
            self.prefix_lengths, self._places = np.zeros(0, np.int32), places
        with self._scaled(dict(enumerate(requests)), shape[0]):
            super().prefill(prompts, shape)

    def decode(self, sequences: Mapping[int, Sequence], steps: int, pause_id: int | None = None) -> Drawn:
        """Launch a chunk of decode steps."""
        requests = {slot: sample.request for slot, sample in self._scheduler.running.items()}
        with self._scaled(requests, len(self.slots.token)):
            return super().decode(sequences, steps, pause_id)

    def _append_pieces(self, pieces: Mapping[int, tuple[int, np.ndarray]], size: int) -> None:
        for slot, piece in pieces.items():  # the program appends slot after slot, each as a batch of its own
            with self._scaled({0: self._scheduler.running[slot].request}, 1):
                super()._append_pieces({slot: piece}, size)

    @contextmanager
    def _scaled(self, requests: Mapping[int, int], rows: int) -> Iterator[None]:
        """Let programs have the scales of the adapters of these requests, by row."""
        params, (like,) = self.params, jax.tree.leaves(self._scales)
        scales = np.zeros((rows, *like.shape[1:]), np.float32)
        for row, request in requests.items():
            columns, scale = self._place_of(request)
            scales[row, :, columns] = scale
        self.params = nnx.merge_state(params, jax.tree.map(lambda _: scales, self._scales))
        try:
            yield
        finally:
            self.params = params
