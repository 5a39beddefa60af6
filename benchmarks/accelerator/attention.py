"""Attention of this machine's kernels against plain implementations on the host, in float32.

On a CPU, which computes attention by those plain implementations, the kernels run as ordinary programs.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from benchmarks.accelerator.checks import Context
from benchmarks.accelerator.machine import is_cpu
from benchmarks.accelerator.results import Row
from benchmarks.common import relative_difference, short
from covey.models.config import ModelConfig
from covey.models.span_attention import span_attention
from covey.packing.rows import Rows, attention_spans, pack
from covey.parallel.mesh import platform_of
from covey.sampling.cache import Block, CacheLayout, decode_attention
from covey.train.programs import on_host
from covey.types import Completion, FinishReason, Group


class Case(NamedTuple):
    """Heads as in a family of models: numbers of heads of queries and of keys, their width, and what scores go
    through.
    """

    name: str
    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    softcap: float | None = None


CASES = (
    Case("14/2 heads of 64", 14, 2, 64),
    Case("8/4 heads of 256, window, soft-cap", 8, 4, 256, 200, 50.0),
    Case("32/8 heads of 128", 32, 8, 128),
)
TINY = (Case("4/2 heads of 16, window, soft-cap", 4, 2, 16, 40, 50.0),)
"""Cases on a CPU."""
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest difference in units of the largest number. In float32 sums over a row of 1,024 tokens round by 2 · 1024 ·
2⁻²⁴; in bfloat16 scores, weights and results round by 2⁻⁹ each, and a score's rounding grows by its exponential.
"""


def compare(context: Context) -> Iterator[Row]:
    """Compare attention within rows of packed groups, and its three gradients, with blockwise attention."""
    samples, prompt, completion = (3, 20, 36) if is_cpu() else (4, 128, 225)
    for platform, interpret in _platforms():
        for case in TINY if is_cpu() else CASES:
            for dtype in _dtypes():
                context.tell(f"{case.name}, {dtype}, kernels for {platform}")
                rows = pack([_group(prompt, completion, samples, seed) for seed in range(2)], row_length=1024)
                arrays = _draw(case, rows.tokens.shape, dtype)
                got = _attend(platform, interpret, case, dtype, rows, arrays)
                with on_host():
                    want = _attend("cpu", False, case, "float32", rows, arrays)
                worst = max(relative_difference(a, b) for a, b in zip(got, want, strict=True))
                yield Row(f"{case.name}, {dtype}, {platform}", short(worst), BOUNDS[dtype], "", bound=True)


def compare_decoding(context: Context) -> Iterator[Row]:
    """Compare attention of a new token of each slot over the cache with that over blocks, as on a CPU."""
    slots, time = (4, 256) if is_cpu() else (64, 1024)
    for platform, interpret in _platforms():
        for case in TINY if is_cpu() else CASES:
            for dtype in _dtypes():
                context.tell(f"{case.name}, {dtype}, kernels for {platform}")
                cache = [_normal(seed, (slots, case.kv_heads, time, case.width), dtype) for seed in (1, 2)]
                got = _decode(platform, interpret, case, dtype, cache)
                with on_host():
                    want = _decode("cpu", False, case, "float32", cache)
                difference = relative_difference(got, want)
                yield Row(f"{case.name}, {dtype}, {platform}", difference, BOUNDS[dtype], "", bound=True)


def _platforms() -> list[tuple[str, bool]]:
    """Return the platforms whose kernels are run, and whether they are run as ordinary programs."""
    if is_cpu():
        return [("tpu", True), ("cuda", True)]
    return [(platform_of(jnp.zeros(()).sharding), False)]


def _dtypes() -> list[str]:
    """Return the types of queries, keys and values; on a CPU one, which saves half of the compiling."""
    return ["float32"] if is_cpu() else list(BOUNDS)


def _group(prompt: int, completion: int, samples: int, seed: int) -> Group:
    """Return a prompt with completions of `completion` tokens or fewer."""
    draw, none = np.random.default_rng(seed), np.zeros
    lengths = draw.integers(completion // 2, completion + 1, samples)
    make = lambda n: Completion(none(n, np.int32), none(n), none(n), FinishReason.STOP)  # noqa: E731
    return Group("", none(prompt, np.int32), tuple(map(make, lengths)))


def _normal(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Return normal numbers of the host that `dtype` holds without rounding."""
    drawn = np.random.default_rng(seed).normal(size=shape, scale=scale)
    return np.asarray(jnp.asarray(drawn, dtype).astype(jnp.float32))


def _draw(case: Case, shape: tuple[int, int], dtype: str) -> list[np.ndarray]:
    """Return queries, already scaled, keys, values, and the gradient of the output."""
    numbers = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    scales = (2 * case.width**-0.5, 1.0, 1.0, 1.0)
    return [
        _normal(seed, (*shape, heads, case.width), dtype, scale)
        for seed, (heads, scale) in enumerate(zip(numbers, scales, strict=True))
    ]


def _model(platform: str, case: Case) -> Any:
    """Return a stand-in for a model, with the attributes that attention reads."""
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=case.heads,
        num_kv_heads=case.kv_heads, head_dim=case.width, windows=(case.window,),
    )  # fmt: skip
    return SimpleNamespace(config=config, platform=platform, mesh=AbstractMesh((), ()))


def _attend(
    platform: str, interpret: bool, case: Case, dtype: str, rows: Rows, arrays: list[np.ndarray]
) -> list[np.ndarray]:
    """Return the output of attention within rows, and the gradients of queries, keys and values."""

    @jax.jit
    def run(rows: Rows, *arrays: jax.Array) -> Any:
        model = _model(platform, case)
        attend = span_attention(model, attention_spans(rows), rows.positions, interpret=interpret)
        scores = {"window": case.window, "softcap": case.softcap}
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, None, **scores)[0], *arrays[:3])
        return out, *pull(arrays[3])

    results = run(rows, *(jnp.asarray(x, dtype) for x in arrays))
    return [np.asarray(x.astype(jnp.float32)) for x in results]


def _decode(platform: str, interpret: bool, case: Case, dtype: str, cache: list[np.ndarray]) -> np.ndarray:
    """Return the attention of a new token of each slot; slots hold from one token to all but one."""
    model, (slots, _, time, _) = _model(platform, case), cache[0].shape
    layout = CacheLayout.of(model)
    ends = np.cumsum(layout.block_lengths(time))[:-1]

    def split(x: np.ndarray, axis: int) -> list[jax.Array]:
        ordered = jnp.asarray(x if axis == 2 else x.swapaxes(2, 3), dtype)
        return jnp.split(ordered, ends, axis=axis)

    parts = zip(split(cache[0], layout.keys), split(cache[1], layout.values), strict=True)
    blocks = [Block(keys, values, layout) for keys, values in parts]
    length = np.linspace(1, time - 1, slots).astype(np.int32)
    scales = (2 * case.width**-0.5, 1.0, 1.0)
    new = [
        jnp.asarray(_normal(seed, (slots, 1, heads, case.width), dtype, scale), dtype)
        for seed, (heads, scale) in enumerate(zip((case.heads, case.kv_heads, case.kv_heads), scales, strict=True), 3)
    ]

    @jax.jit
    def step(blocks: list[Block], length: jax.Array, *new: jax.Array) -> jax.Array:
        attend = decode_attention(model, length, jnp.ones(slots, bool), interpret=interpret)
        q, k, v = new
        return attend(q, k, v, blocks, window=case.window, softcap=case.softcap)[0]

    return np.asarray(step(blocks, length, *new).astype(jnp.float32))
