"""Blockwise attention, which never holds all scores: each block of queries reads only the keys up to its own end.

Rows and prompts are causal, so a run of queries needs only the keys up to its own end: half of the T × T scores, of
which one block exists at a time. The backward pass recomputes them from the logsumexp (Dao et al., 2022,
"FlashAttention"). Three numbers per query (`Spans`) replace the mask.

`spanned` is the one place where an implementation is chosen; `attention.attention` is the oracle for all of them. An
accelerator's own kernel takes a whole T × T mask, and runs again when a layer is rematerialised.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from covey.models.attention import Attend, within_window
from covey.models.layers import kept

BLOCK = 64
"""Number of queries in the smallest block (64 was the fastest of 32, 64 and 128 on CPU)."""
RUNS = 8
"""Number of runs of queries that a program unrolls; each run loops over blocks of twice `BLOCK` queries."""
HIDDEN = -1e30
"""Score of a masked key: finite, so that a fully masked query has a finite output."""


class Spans(NamedTuple):
    """Indices of the keys in its row that each query attends to: `first` to `until` (exclusive), and `own` to its own
    index.

    In a group's row these are the prompt and the completion's past. For padding, `own` is past the end of the row.
    """

    first: Int[Array, "B T"]
    until: Int[Array, "B T"]
    own: Int[Array, "B T"]


def seen(spans: Spans, place: Int[Array, "n"], keys: int) -> Bool[Array, "B n keys"]:
    """Return the mask over the first `keys` keys; `place` holds the row indices of the queries of `spans`."""
    first, until, own = (x[..., None] for x in spans)
    key = jnp.arange(keys)
    return ((key >= first) & (key < until)) | ((key >= own) & (key <= place[:, None]))


def causal_spans(length: Int[Array, "B"], time: int) -> Spans:
    """Return the spans of plain causal attention over rows whose first `length` positions hold tokens."""
    here = jnp.broadcast_to(jnp.arange(time), (length.shape[0], time))
    nothing = jnp.zeros_like(here)
    return Spans(nothing, nothing, jnp.where(here < length[:, None], 0, time))


def spanned(spans: Spans, positions: Int[Array, "B T"]) -> Attend:
    """Return the `Attend` that attends within rows as `spans` define; a layer's window is measured in `positions`."""

    def attend(
        q: Array, k: Array, v: Array, cache: Any, *, window: Any = None, softcap: float | None = None
    ) -> tuple[Array, Any]:
        name = implementation(_backend(), q, softcap)
        return IMPLEMENTATIONS[name](q, k, v, spans, positions, window, softcap), cache

    return attend


def implementation(backend: str, q: Float[Array, "B T H W"], softcap: float | None) -> str:
    """Return the name in IMPLEMENTATIONS of the best implementation for these queries on `backend` (see `_backend`).

    cuDNN's attention needs 16-bit operands, a head size that is a multiple of 8 and at most 128, and no soft-cap. On a
    mesh JAX needs all operands sharded alike, which fails with few key heads. TPU's splash kernel needs masks known at
    compile time, which ragged rows do not have.
    """
    halves = q.dtype in (jnp.bfloat16, jnp.float16)
    fits = halves and softcap is None and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0
    return "cudnn" if backend == "cuda" and fits and jax.typeof(q).sharding.mesh.empty else "blocks"


def _backend() -> str:
    """Return JAX's backend, or `cuda` where cuDNN has attention: on devices of compute capability 8.0 or more."""
    device = jax.devices()[0]
    major = str(getattr(device, "compute_capability", "")).split(".")[0]  # ROCm gives a name
    return "cuda" if device.platform == "gpu" and major.isdigit() and int(major) >= 8 else jax.default_backend()


def blockwise(
    q: Float[Array, "B T H W"],
    k: Float[Array, "B T K W"],
    v: Float[Array, "B T K W"],
    spans: Spans,
    positions: Int[Array, "B T"],
    window: Any = None,
    softcap: float | None = None,
) -> Float[Array, "B T H W"]:
    """Compute grouped-query attention, with the softmax in float32 and memory linear in T.

    Args:
        q: already scaled queries.
        window: keys `window` positions or more behind the query are masked; None masks only what `spans` exclude.
        softcap: scores become softcap · tanh(scores / softcap).
    """
    time = q.shape[1]
    short = -time % (2 * BLOCK if time > RUNS * 2 * BLOCK else 1)

    def fill(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    whose = Spans(fill(spans.first), fill(spans.until), fill(spans.own, time + short))
    out = _attention(softcap, fill(q), fill(k), fill(v), whose, fill(positions), window)
    return out[:, :time]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    softcap: float | None, q: Array, k: Array, v: Array, spans: Spans, positions: Array, window: Any
) -> Array:
    return _forward(softcap, q, k, v, spans, positions, window)[0]


def _forward(
    softcap: float | None, q: Array, k: Array, v: Array, spans: Spans, positions: Array, window: Any
) -> tuple[Array, Any]:
    heads, mask = _Heads.of(q, k, v), partial(_mask, spans, positions, window)

    def block(carry: None, at: Array, size: int, end: int) -> tuple[None, Any]:
        scores = _scores(heads, at, size, end, softcap)[0]
        scores = jnp.where(mask(at, size, end)[:, None, None], scores, HIDDEN)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        mass = weights.sum(axis=-1, keepdims=True)
        mixed = _product("bkgnu,bkuw->bkgnw", weights.astype(v.dtype), heads.v[:, :, :end])
        return None, (mixed / mass, top + jnp.log(mass))

    parts = [_in_blocks(block, None, run)[1] for run in _runs(q.shape[1])]
    mixed, total = (jnp.concatenate(x, axis=3) for x in zip(*parts, strict=True))
    # Saved like the projections' results, so that rematerialising a layer does not run attention again.
    out = kept(_heads_last(mixed).astype(q.dtype))
    return out, (q, k, v, spans, positions, window, out, kept(total))


def _backward(softcap: float | None, saved: Any, grad: Array) -> tuple[Any, ...]:
    q, k, v, spans, positions, window, out, total = saved
    heads, mask = _Heads.of(q, k, v), partial(_mask, spans, positions, window)
    pulled = _heads_first(grad, k.shape[2])
    along = _heads_first((grad.astype(jnp.float32) * out).sum(-1, keepdims=True), k.shape[2])

    def block(carry: tuple[Array, Array], at: Array, size: int, end: int) -> tuple[tuple[Array, Array], Array]:
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=size, axis=3)
        scores, bend = _scores(heads, at, size, end, softcap)
        weights = jnp.where(mask(at, size, end)[:, None, None], jnp.exp(scores - cut(total)), 0.0)
        slope = _product("bkgnw,bkuw->bkgnu", cut(pulled), heads.v[:, :, :end]) - cut(along)
        slope = (weights * slope * bend).astype(q.dtype)
        grad_q = _product("bkgnu,bkuw->bkgnw", slope, heads.k[:, :, :end])
        new_k = _product("bkgnu,bkgnw->bkuw", slope, cut(heads.q))
        new_v = _product("bkgnu,bkgnw->bkuw", weights.astype(v.dtype), cut(pulled))
        return tuple(x.at[:, :, :end].add(new) for x, new in zip(carry, (new_k, new_v), strict=True)), grad_q  # type: ignore[return-value]

    carry, parts = (jnp.zeros(heads.k.shape, jnp.float32),) * 2, []
    for run in _runs(q.shape[1]):
        carry, grad_q = _in_blocks(block, carry, run)
        parts.append(grad_q)
    grad_q = _heads_last(jnp.concatenate(parts, axis=3)).astype(q.dtype)
    grad_k, grad_v = (x.transpose(0, 2, 1, 3).astype(k.dtype) for x in carry)
    return grad_q, grad_k, grad_v, None, None, None


_attention.defvjp(_forward, _backward)


class _Heads(NamedTuple):
    """Queries [B K G T W], keys and values [B K T W], with the heads of a group adjacent."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def of(cls, q: Array, k: Array, v: Array) -> "_Heads":
        return cls(_heads_first(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))


def _heads_first(x: Float[Array, "B T H W"], kv_heads: int) -> Float[Array, "B K G T W"]:
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)


def _heads_last(x: Float[Array, "B K G T W"]) -> Float[Array, "B T H W"]:
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[-1])


def _product(what: str, a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(what, a, b.astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)


def _scores(heads: _Heads, at: Array, size: int, end: int, softcap: float | None) -> tuple[Array, Array | float]:
    """Return the scores of `size` queries from index `at` with the first `end` keys, and their derivative by q · k."""
    q = jax.lax.dynamic_slice_in_dim(heads.q, at, size, axis=3)
    scores = _product("bkgnw,bkuw->bkgnu", q, heads.k[:, :, :end])
    if softcap is None:
        return scores, 1.0
    bent = jnp.tanh(scores / softcap)
    return softcap * bent, 1.0 - jnp.square(bent)


def _mask(spans: Spans, positions: Array, window: Any, at: Array, size: int, end: int) -> Bool[Array, "B n U"]:
    cut = partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=size, axis=1)
    allowed = seen(Spans(*map(cut, spans)), at + jnp.arange(size), end)
    return allowed if window is None else allowed & within_window(cut(positions), positions[:, :end], window)


def _runs(time: int) -> list[tuple[int, int]]:
    """Return start and end of each run of queries: few runs, all of one size but the last."""
    size = BLOCK * max(1, -(-time // (RUNS * BLOCK)))
    size = size if size <= 2 * BLOCK else 2 * BLOCK * -(-size // (2 * BLOCK))
    return [(start, min(start + size, time)) for start in range(0, time, size)]


def _in_blocks(block: Any, carry: Any, run: tuple[int, int]) -> tuple[Any, Any]:
    """Call `block(carry, at, size, end)` for each block of the run; return the carry and the results joined along T."""
    start, end = run
    size = min(end - start, 2 * BLOCK)
    if size == end - start:
        carry, part = block(carry, start, size, end)
        return carry, part
    carry, parts = jax.lax.scan(lambda carry, at: block(carry, at, size, end), carry, jnp.arange(start, end, size))
    join = lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, x.shape[-1])  # noqa: E731
    return carry, jax.tree.map(join, parts)


def _fused(
    q: Array, k: Array, v: Array, spans: Spans, positions: Array, window: Any, softcap: None, how: Any = "cudnn"
) -> Array:
    allowed = _mask(spans, positions, window, jnp.int32(0), q.shape[1], q.shape[1])
    allowed |= jnp.eye(
        q.shape[1], dtype=bool
    )  # padding attends to itself: cuDNN's gradient may be NaN in a fully masked row
    return jax.nn.dot_product_attention(q, k, v, mask=allowed[:, None], scale=1.0, implementation=how)


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {"blocks": blockwise, "cudnn": _fused}
