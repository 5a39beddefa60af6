"""Programs of the sampler in given sizes, without arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from covey.config.schema import RolloutConfig
from covey.parallel.shapes import abstract
from covey.sampling.cache import LayerCache, Prefix
from covey.sampling.logits import SamplingParams, TracedSamplingParams
from covey.sampling.model_runner import Programs, empty_slots, front, sharding_for
from covey.sampling.programs import Slots
from covey_plan.program import Program


class SamplerPrograms:
    """Programs of an engine.

    Args:
        programs: the engine's.
        params: the decoder's state, of arrays or of shapes.
    """

    def __init__(self, programs: Programs, params: Any):
        self._programs, self._params = programs, params

    def prefill(self, prompts: int, length: int) -> Program:
        """Return the program that prefills this number of prompts of `length` tokens."""
        tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((prompts, length), (prompts,)))
        return Program("prefill", self._programs.prefill, (abstract(self._params), tokens, lengths))

    def admit(self, slots: int, cache_length: int, prompts: int, prompt_length: int, config: RolloutConfig) -> Program:
        """Return the program that inserts prefilled prompts into slots and draws their first tokens."""
        prefill = self.prefill(prompts, prompt_length)
        prefilled = jax.eval_shape(prefill.function, *prefill.args)
        prefix, cache = self._placed(prefilled.cache), self._cache(slots, cache_length)
        logits = abstract(prefilled.logits, sharding_for(self._params, prefilled.logits.shape, ("rows", "vocab")))
        number, inserted = (jax.ShapeDtypeStruct((slots,), dtype) for dtype in (jnp.int32, jnp.bool))
        samples = inserted, number, abstract(empty_slots(slots)), _numbers(config, slots)
        args = front(cache, prefix), self._slots(slots), Prefix(prefix, logits), *samples
        return Program("admit", self._programs.admit, args)

    def decode(self, slots: int, cache_length: int, config: RolloutConfig, pause_id: int | None = None) -> Program:
        """Return the program of a chunk of decode steps, in which slots halt at the token `pause_id` too."""
        cache = self._cache(slots, cache_length)
        args = abstract(self._params), cache, self._slots(slots), _numbers(config, slots)
        return Program("decode", self._programs.decode, args, {"steps": config.decode_chunk, "pause_id": pause_id})

    def _cache(self, slots: int, cache_length: int) -> list[LayerCache]:
        make = self._programs.empty_cache
        return self._placed(jax.eval_shape(lambda params: make(params, slots, 0, cache_length), self._params))

    def _placed(self, cache: list[LayerCache]) -> list[LayerCache]:
        """Return the shapes of a cache with its shardings."""
        placed: list[LayerCache] = jax.tree.map(lambda x: abstract(x, sharding_for(self._params, x.shape)), cache)
        return placed

    def _slots(self, slots: int) -> Slots:
        return abstract(empty_slots(slots), sharding_for(self._params, (), ()))


def _numbers(config: RolloutConfig, slots: int) -> TracedSamplingParams:
    numbers: TracedSamplingParams = abstract(SamplingParams.from_config(config).of_rows(slots))
    return numbers
