"""Benchmark of decoding alone: the sampler's decode program with every slot busy, against what reading the weights
allows.

All slots are as far as the middle of a completion, and begin there again at each chunk, so every step is the same work.
A step must read all weights and what its tokens may see of the cache, and must make their products; the longer of the
two is the limit. Reading is measured by streaming an array, products by as many vectors times weights that no cache
holds (`machine_peaks`). A model that fits into the processor's cache can be faster than that.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.common import Result, Settings, interleaved, short
from covey.sampling.logits import SamplingParams, TracedSamplingParams
from covey.sampling.model_runner import Programs
from covey.sampling.programs import Slots
from covey.sampling.scheduler import length_bucket
from covey_plan import roofline
from covey_plan.work import Span, decoding

BATCHES = (8, 32)
"""Batch sizes that are decoded besides the number of slots of the size."""
CHUNKS = 4
"""Number of chunks of the largest batch; smaller ones make more, so that all decode as many tokens."""

MOST_KERNELS = 96
"""Maximum number of kernels in the measurement of products."""


class Limits(NamedTuple):
    """Lower bounds of the seconds that decoding takes."""

    reading: float
    products: float


def measure(settings: Settings) -> Result:
    """Decode some chunks at each batch size."""
    shape = settings.shape
    batches = sorted({*BATCHES, shape.slots})
    tokens, place = CHUNKS * shape.decode_chunk * max(batches), shape.prompt_length + shape.max_new_tokens // 2
    graph, params = nnx.split(settings.model())
    programs = Programs(graph, (shape.model.vocab_size,))
    works = {f"batch {batch}": FullSlots(programs, params, batch, shape.decode_chunk, place) for batch in batches}
    runs = {name: partial(work, tokens) for name, work in works.items()}
    checks = {f"{name}: slots busy to the end": run() for name, run in runs.items()}
    seconds = interleaved(runs, settings.repeat)
    facts, least = {}, {}
    for name, work in works.items():
        fed, count = [(place, shape.decode_chunk)] * work.batch, tokens // (work.batch * shape.decode_chunk)
        found = limits(settings, fed, work.batch)
        facts[name] = _facts(found, float(np.median(seconds[name])), count, shape.decode_chunk)
        least[name] = count * max(found)
    return Result(seconds, tokens, facts, checks, least)


def limits(settings: Settings, fed: list[Span], batch: int) -> Limits:
    """Return the least time to decode `fed`, `batch` tokens at a time."""
    model, dtype = settings.shape.model, settings.dtype
    flops, read = decoding(model, fed, batch, settings.lora, jnp.dtype(dtype).itemsize)
    rate = product_rate(batch, model.hidden_size, model.intermediate_size, dtype)
    return Limits(read / roofline.machine_peaks(dtype).bandwidth, flops / rate)


@cache
def product_rate(batch: int, width: int, inner: int, dtype: str = "float32") -> float:
    """Measure the flops/s of `batch` vectors of `width` numbers times weights that no cache holds: one kernel that
    wide, or many with `inner` columns, whichever is faster.
    """
    vectors, columns = jnp.ones((batch, width), dtype), roofline.STREAMED // jnp.dtype(dtype).itemsize // width
    count = max(1, min(columns // inner, MOST_KERNELS))
    wide = roofline.best_seconds(roofline.product, vectors, jnp.ones((width, columns), dtype)) / columns
    kernels = [jnp.full((width, inner), float(n), dtype) for n in range(count)]
    several = roofline.best_seconds(_products, vectors, kernels) / (count * inner)
    return 2 * batch * width / min(wide, several)


@jax.jit
def _products(vectors: Any, matrices: list[Any]) -> list[Any]:
    return [roofline.product(vectors, matrix) for matrix in matrices]


def _facts(found: Limits, seconds: float, chunks: int, size: int) -> dict[str, Any]:
    return {
        "step_ms": short(1e3 * seconds / (chunks * size)),
        "reading_ms": short(1e3 * found.reading / size),
        "products_ms": short(1e3 * found.products / size),
        "binds": max(zip(found, Limits._fields, strict=True))[1],
    }


class FullSlots:
    """Decode program of the sampler at one batch size, and the slots it runs on, which are never finished.

    Args:
        programs: those of the sampler.
        params: weights that it samples with.
        batch: number of slots.
        chunk: number of decode steps in a call.
        place: number of tokens in each slot's cache when a call begins.
    """

    def __init__(self, programs: Programs, params: Any, batch: int, chunk: int, place: int):
        self.programs, self.params, self.batch, self.chunk = programs, params, batch, chunk
        self.cache = self.programs.empty_cache(self.params, batch, 0, length_bucket(place + self.chunk))
        length, ones = np.full(batch, place, np.int32), np.ones(batch, np.int32)
        keys = np.random.default_rng(0).integers(0, 2**32, (batch, 2), np.uint32)
        self.slots = Slots(keys, length, token=ones, num_tokens=ones, active=ones > 0, limit=ones << 30)

    def __call__(self, tokens: int) -> bool:
        """Decodes `tokens` in all; whether every slot was busy in every step."""
        made, numbers = 0, TracedSamplingParams.stack([SamplingParams()] * self.batch)
        for _ in range(tokens // (self.batch * self.chunk)):
            self.cache, _, drawn = self.programs.decode(self.params, self.cache, self.slots, numbers, steps=self.chunk)
            made += int(drawn.counts.sum())
        return made == tokens
