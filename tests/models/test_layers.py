"""Products, norms, rotations and attention against float64 formulas written out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.schema import LoRAConfig
from covey.models.attention import causal_attention, dot_product_attention, masked_attention
from covey.models.config import ModelConfig, RopeScaling
from covey.models.decoder import Decoder
from covey.models.layers import (
    MLP,
    Linear,
    LoRA,
    RMSNorm,
    apply_together,
    project,
    project_shared,
    rope_frequencies,
    rope_tables,
    rotate,
)
from covey.models.lora import with_lora

TYPES = ["float32", "bfloat16"]
ROUNDING = 2.0**-24
"""Largest relative error of one rounding to float32. A sum of n terms makes n, of the size of all without signs."""


def wide(x: object) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def rounded(x: np.ndarray | jax.Array, dtype: str) -> np.ndarray:
    """`x` as an operand of `dtype` sees it, in float64."""
    return wide(jnp.asarray(x, jnp.float32).astype(dtype))


# --- products


@jax.jit
def products(x: jax.Array, kernel: jax.Array, grad: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
    """The product and both its gradients, computed in each type."""

    def one(dtype: str) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda x, kernel: project(x, kernel, jnp.dtype(dtype)), x, kernel)
        return out, *pull(grad.astype(out.dtype))

    return {dtype: one(dtype) for dtype in TYPES}


def operands(stored: str, depth: int = 700) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(3, 50, depth), (depth, 9), (3, 50, 9)]
    return [jnp.asarray(rng.normal(size=shape), jnp.dtype(stored)) for shape in shapes]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("stored", "rtol", "atol"), [("float32", 1e-6, 3e-6), ("bfloat16", 2**-8, 1e-5)])
def test_products_and_both_gradients_round_operands_once_and_add_in_float32(
    stored: str, rtol: float, atol: float, dtype: str
) -> None:
    """The output follows x, each gradient its own argument; narrow ones are rounded once, at the end."""
    x, kernel, grad = operands(stored)
    a, w, g = (rounded(v, dtype) for v in (x, kernel, grad))
    want = a @ w, g @ w.T, np.einsum("bti,bto->io", a, g)
    for ours, theirs in zip(products(x, kernel, grad)[dtype], want, strict=True):
        assert ours.dtype == stored
        np.testing.assert_allclose(wide(ours), theirs, rtol=rtol, atol=atol * np.abs(theirs).max())


@pytest.mark.slow
def test_a_long_bfloat16_sum_does_not_stall() -> None:
    """Added up in bfloat16, ones get no further than 256."""
    x, kernel, grad = jnp.ones((3, 2000, 3000)), jnp.ones((3000, 1)), jnp.ones((3, 2000, 1))
    out, grad_x, grad_kernel = (np.asarray(v) for v in products(x, kernel, grad)["bfloat16"])
    assert (out == 3000).all()
    assert (grad_x == 1).all()
    assert (grad_kernel == 6000).all()


def test_linear_adds_bias_and_adapter() -> None:
    linear = Linear(5, 3, bias=True, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    linear.lora = LoRA(5, 3, 2, alpha=6.0, rngs=nnx.Rngs(1))
    rng = np.random.default_rng(2)
    linear.bias[...], linear.lora.b[...] = rng.normal(size=3), rng.normal(size=(2, 3))
    x = rng.normal(size=(4, 5)).astype(np.float32)
    w, b, lora_a, lora_b = (wide(v[...]) for v in (linear.kernel, linear.bias, linear.lora.a, linear.lora.b))
    np.testing.assert_allclose(linear(jnp.asarray(x)), x @ w + b + 3.0 * (x @ lora_a) @ lora_b, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "gated"), [("silu", True), ("gelu_tanh", True), ("relu2", True), ("relu2", False)]
)
def test_the_mlp(activation: str, gated: bool) -> None:
    config = ModelConfig(10, 6, 7, 1, 1, 1, 6, activation=activation, gated_mlp=gated)  # type: ignore[arg-type]
    mlp = MLP(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert len(jax.tree.leaves(nnx.state(mlp))) == 2 + gated
    x = np.random.default_rng(0).normal(size=(2, 3, 6)) * 2
    gate, up, down = (wide(p.kernel[...]) for p in (mlp.gate_proj or mlp.up_proj, mlp.up_proj, mlp.down_proj))
    z, factor, size = x @ gate, x @ up if gated else 1.0, np.abs(x) @ np.abs(up)
    by_hand = {
        "silu": z / (1 + np.exp(-z)),
        "gelu_tanh": 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
        "relu2": np.maximum(z, 0) ** 2,
    }
    size = size * (np.abs(x) @ np.abs(gate)) @ np.abs(down)
    off = np.abs(mlp(jnp.asarray(x, jnp.float32)) - (by_hand[activation] * factor) @ down)
    assert (off <= (6 + 6 + 7 + 8) * ROUNDING * size).all()  # three sums, and the activation


# --- norms


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 8])
def test_projections_together_are_those_one_by_one_on_every_platform(width: int | None) -> None:
    """Values and gradients of input, kernels, biases and adapters; heads of 8 if asked for."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 16)), jnp.float32)

    def build(platform: str) -> nnx.List[Linear]:
        rngs = nnx.Rngs(0)
        linears = [
            Linear(16, n_out, bias=True, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs) for n_out in (32, 24)
        ]
        for linear in linears:
            linear.bias[...] = jnp.arange(linear.shape[1]) / 10
            linear.lora = LoRA(*linear.shape, 2, 2.0, rngs=rngs)
            linear.lora.b[...] = jnp.ones_like(linear.lora.b[...])
            linear.platform = platform
        return nnx.List(linears)

    @partial(jax.jit, static_argnums=0)
    def run(graph: object, params: object, x: jax.Array) -> tuple[list[jax.Array], object]:
        out, pull = jax.vjp(lambda params, x: apply_together(nnx.merge(graph, params), x, width), params, x)
        return out, pull([jnp.sin(y) for y in out])

    want = [linear(x) if width is None else linear.to_heads(x, width) for linear in build("cpu")]
    one = apply_together(build("tpu"), x[:, :1], width)  # as in decoding
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[:, :1], rtol=1e-5, atol=1e-5), one, want)
    results = [run(*nnx.split(build(platform)), x) for platform in ("cpu", "tpu", "cuda")]
    for out, grads in results:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), out, want)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(results[0][1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_shared_input_are_added_before_they_are_rounded() -> None:
    x, kernels = jnp.ones((1, 2), jnp.bfloat16), (jnp.full((2, 1), 256.0), jnp.full((2, 1), 1.0), jnp.full((2, 1), 1.0))
    out, pull = jax.vjp(lambda x: project_shared(x, kernels, jnp.float32, jnp.float32), x)
    (grad,) = pull(tuple(jnp.ones_like(y) for y in out))
    assert grad.dtype == jnp.bfloat16
    assert grad.tolist() == [[258.0, 258.0]]  # 256 + 1 rounds to 256


def norm_of(width: int, dtype: object, eps: float, offset: float = 0.0, scales: bool = True) -> RMSNorm:
    config = ModelConfig(10, 6, 7, 1, 1, 1, 6, norm_eps=eps, norm_offset=offset, norm_scales=scales)
    return RMSNorm(config, width, dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_rms_norm(offset: float, eps: float) -> None:
    norm = norm_of(48, jnp.float32, eps, offset)
    rng = np.random.default_rng(0)
    norm.scale[...] = rng.normal(size=48)
    x = rng.normal(size=(2, 5, 48)) * np.array([1e-3, 1, 1e3, 1, 0])[:, None]
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (wide(norm.scale[...]) + offset)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), want, rtol=2e-6, atol=2e-6)


def test_a_fresh_norm_scales_by_one_and_computes_in_float32() -> None:
    for offset in (0.0, 1.0):
        norm = norm_of(64, jnp.bfloat16, 1e-6, offset)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 64)) * 300, jnp.bfloat16)
        want = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6)
        assert norm(x).dtype == jnp.bfloat16
        np.testing.assert_allclose(wide(norm(x)), want, rtol=2**-8)


def test_a_norm_without_scales_has_no_parameters() -> None:
    norm = norm_of(16, jnp.float32, 1e-2, scales=False)
    assert not jax.tree.leaves(nnx.state(norm))
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 16))
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), want, rtol=3e-6)


# --- rotary positions


def frequencies(width: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """By cases, as the Llama 3.1 release and Chen et al. (2023) write them."""
    out = []
    for i in range(0, width, 2):
        f = theta ** -(i / width)
        if scaling is not None and scaling.kind == "linear":
            f /= scaling.factor
        elif scaling is not None:
            wave, old = 2 * np.pi / f, scaling.original_max_positions
            if wave > old / scaling.low_freq_factor:
                f /= scaling.factor
            elif wave >= old / scaling.high_freq_factor:
                low, high = scaling.low_freq_factor, scaling.high_freq_factor
                smooth = (old / wave - low) / (high - low)
                f = (1 - smooth) * f / scaling.factor + smooth * f
        out.append(f)
    return np.array(out)


SCALINGS = [
    None,
    RopeScaling("linear", 8.0),
    RopeScaling("llama3", 8.0),
    RopeScaling("llama3", 32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=512),
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rope_frequencies(theta: float, scaling: RopeScaling | None) -> None:
    got = np.asarray(rope_frequencies(64, theta, scaling))
    np.testing.assert_allclose(got, frequencies(64, theta, scaling), rtol=3e-6)


def test_llama3_scaling_has_all_three_regions_in_the_test_above() -> None:
    plain, scaled = frequencies(64, 500_000.0, None), frequencies(64, 500_000.0, SCALINGS[2])
    ratio = plain / scaled
    assert np.isclose(ratio, 1).any()
    assert np.isclose(ratio, 8).any()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


@pytest.mark.parametrize("scaling", SCALINGS[:3])
def test_rotation_turns_pairs_half_a_head_apart(scaling: RopeScaling | None) -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, 3, 16))
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 7, 100, 3, 500, 0]])
    turned = jax.jit(lambda x, p: rotate(x, rope_tables(p, rope_frequencies(16, 1e4, scaling))))(
        jnp.asarray(x, jnp.float32), jnp.asarray(positions)
    )
    angle = positions[:, :, None, None] * frequencies(16, 1e4, scaling)
    pairs = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned, np.concatenate([pairs.real, pairs.imag], axis=-1), atol=1e-4)


# --- attention


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, softcap: float | None) -> np.ndarray:
    """One query, one head at a time, in float64. A query that may look at nothing is left NaN."""
    out = np.full(q.shape, np.nan)
    shared = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(allowed[b, t])
        if seen.size:
            scores = k[b, seen, h // shared] @ q[b, t, h]
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights / weights.sum() @ v[b, seen, h // shared]
    return out


def block(heads: int, kv_heads: int, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(heads * 10 + kv_heads)
    return [scale * rng.normal(size=(2, 9, n, 8)) for n in (heads, kv_heads, kv_heads)]


def single(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "softcap"), [(4, 4, None), (4, 2, 3.0), (6, 2, None), (6, 2, 3.0), (4, 1, None)]
)
def test_grouped_query_attention(heads: int, kv_heads: int, softcap: float | None) -> None:
    q, k, v = block(heads, kv_heads, 2.0)
    allowed = np.random.default_rng(0).random((2, 9, 9)) < 0.5
    allowed[..., 0] = True
    got = jax.jit(dot_product_attention, static_argnums=4)(*single(q, k, v), jnp.asarray(allowed), softcap)
    # A score is a sum of 8 products, and weights are off by twice the error of the largest.
    scores = np.einsum("btkgw,bukw->btkgu", np.abs(q).reshape(2, 9, kv_heads, -1, 8), np.abs(k))
    atol = 2 * 8 * ROUNDING * scores.max() * np.abs(v).max()
    np.testing.assert_allclose(got, oracle(q, k, v, allowed, softcap), rtol=9 * ROUNDING, atol=atol)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = block(4, 2, 1.0)
    allowed = np.ones((2, 9, 9), bool)
    got = dot_product_attention(*single(300 * q, k, v), jnp.asarray(allowed))
    np.testing.assert_allclose(got, oracle(300 * q, k, v, allowed, None), atol=1e-3)


def test_narrow_attention_keeps_its_softmax_in_float32() -> None:
    q, k, v = (rounded(x, "bfloat16") for x in block(4, 2))
    allowed = np.ones((2, 9, 9), bool)
    got = dot_product_attention(*(x.astype(jnp.bfloat16) for x in single(q, k, v)), jnp.asarray(allowed))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(got), oracle(q, k, v, allowed, None), atol=2e-2)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_query_that_sees_nothing_is_finite_and_so_are_gradients(softcap: float | None) -> None:
    q, k, v = single(*block(4, 2))
    allowed = np.tril(np.ones((2, 9, 9), bool))
    allowed[0, 3], allowed[1] = False, False  # one query, and a whole row of padding
    keep = jnp.asarray(allowed.any(-1), jnp.float32)[..., None, None]

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(keep * jnp.square(dot_product_attention(q, k, v, jnp.asarray(allowed), softcap)))

        return dot_product_attention(q, k, v, jnp.asarray(allowed), softcap), jax.grad(total, (0, 1, 2))(q, k, v)

    out, grads = run(q, k, v)
    assert jnp.isfinite(out).all()
    assert all(jnp.isfinite(g).all() for g in grads)
    assert not any(g[1].any() for g in grads)  # padding moves nothing
    assert not grads[0][0, 3].any()
    seen = allowed.any(-1)
    np.testing.assert_allclose(out[seen], oracle(*map(wide, (q, k, v)), allowed, softcap)[seen], atol=3e-6)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 9), st.integers(0, 9), st.one_of(st.none(), st.integers(1, 12)))
def test_windows_and_padding_follow_positions(left: int, right: int, window: int | None) -> None:
    """A window counts the query itself: `window` 1 sees nothing but it. Padding on either side is never looked at."""
    q, k, v = block(4, 2)
    valid = np.zeros((2, 9), bool)
    valid[0, left:], valid[1, : 9 - right] = True, True
    positions = np.maximum(np.cumsum(valid, 1) - 1, 0)
    behind = positions[:, :, None] - positions[:, None, :]
    allowed = (np.arange(9)[:, None] >= np.arange(9)) & valid[:, None, :] & (behind < (window or 99))
    got, cache = attend(valid, positions, *single(q, k, v), jnp.int32(window or 99))
    assert cache is None
    np.testing.assert_allclose(got[valid], oracle(q, k, v, allowed, None)[valid], atol=3e-6)


@jax.jit
def attend(valid: jax.Array, positions: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array):  # type: ignore[no-untyped-def]
    return causal_attention(valid, positions)(q, k, v, None, window=window, softcap=None)


def test_no_window_sees_everything_allowed_and_the_cache_is_handed_on() -> None:
    q, k, v = block(4, 2)
    allowed = np.tril(np.ones((2, 9, 9), bool))
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    got, cache = masked_attention(jnp.asarray(allowed), positions)(*single(q, k, v), "kept", window=None, softcap=None)
    assert cache == "kept"
    np.testing.assert_allclose(got, oracle(q, k, v, allowed, None), atol=3e-6)


@pytest.mark.slow
def test_heads_as_axes_of_products_give_the_same_values_and_gradients() -> None:
    """TPUs compute them so, with the exchange of halves in a rotation a product with a permutation."""
    shape = ModelConfig(
        vocab_size=40, hidden_size=32, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
        attention_bias=True,
    )  # fmt: skip
    model = with_lora(Decoder(shape, rngs=nnx.Rngs(0), remat=False), LoRAConfig(rank=4))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32) / 10, nnx.split(model)[1])
    tokens, positions = rng.integers(0, 40, (2, 7)), jnp.broadcast_to(jnp.arange(7), (2, 7))
    attend = causal_attention(jnp.ones((2, 7), bool), positions)

    def run(platform: str) -> list[jax.Array]:
        for _, node in nnx.iter_graph(model):
            if isinstance(node, Linear):
                node.platform = platform
        graph = nnx.split(model)[0]
        total = lambda s: jnp.sin(nnx.merge(graph, s)(tokens, positions, attend)[0]).sum()  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.value_and_grad(total))(state))

    for got, want in zip(run("tpu"), run("cpu"), strict=True):
        # Each of the two is rounded forward and back, in sums of up to 32 terms.
        np.testing.assert_allclose(got, want, atol=2 * 2 * 32 * ROUNDING * max(1, float(jnp.abs(want).max())))


@pytest.mark.slow
def test_a_rotation_by_a_permutation_is_exact() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 16)), jnp.bfloat16)
    rope = rope_tables(jnp.broadcast_to(jnp.arange(5), (2, 5)), rope_frequencies(16, 100.0, None))
    np.testing.assert_array_equal(rotate(x, rope, "tpu"), rotate(x, rope))
