"""The decoder: one function however it is run, and padding and windows that mean what they say."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig, RopeScaling
from covey.models.decoder import Decoder, abstract_decoder, compiler_options
from covey.models.lora import projections, split_trainable, with_lora
from covey.parallel import make_mesh, row_sharding, shardings

PLAIN = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
EVERYTHING = dataclasses.replace(
    PLAIN, tie_embeddings=True, activation="gelu_tanh", attention_bias=True, qk_norm=True, post_norms=True,
    norm_offset=1.0, embed_scale=32**0.5, query_scale=0.3, attn_softcap=5.0, final_softcap=4.0, windows=(3, None),
    local_rope_theta=1000.0, rope_theta=50_000.0, rope_scaling=RopeScaling("linear", 4.0),
)  # fmt: skip
OTHERWISE = dataclasses.replace(
    PLAIN, activation="relu2", gated_mlp=False, qk_norm=True, qk_norm_whole=True, norm_scales=False, embed_norm=True,
    pre_norms=False, post_norms=True, rope_backwards=True, rope_layers=(True, False), final_softcap=4.0,
    rope_scaling=RopeScaling("yarn", 4.0, original_max_positions=64, attention_factor=1.1),
)  # fmt: skip
"""The switches that are not on in `EVERYTHING`: those of nanochat, OLMo 2 and SmolLM3."""
TIME = 16
TOKENS = np.random.default_rng(0).integers(0, 50, (2, TIME))
POSITIONS = np.broadcast_to(np.arange(TIME), (2, TIME))


def shapes_of(config: ModelConfig, lora: bool = False, **switches: Any) -> Decoder:
    """A model without numbers, for what is asked of its program alone."""
    base = abstract_decoder(config, **switches)
    return nnx.eval_shape(lambda: with_lora(base, LoRAConfig(rank=3))) if lora else base


def build(config: ModelConfig, lora: bool = False, **switches: Any) -> Decoder:
    """Always the same weights, with biases, scales and adapters that are not what they start as."""
    model = Decoder(config, rngs=nnx.Rngs(0), **switches)
    if lora:
        model = with_lora(model, LoRAConfig(rank=3))
    graph, state = nnx.split(model)
    rng = np.random.default_rng(1)
    shift = lambda x: (x + rng.normal(size=x.shape, scale=0.1)).astype(x.dtype)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(shift, state))


def forward(model: Decoder, looped: bool = True) -> Callable[..., jax.Array]:
    """The jitted forward: (state, tokens, positions, valid) → hidden states. A cache has the layers spelt out."""
    graph = nnx.split(model)[0]

    def run(state: Any, tokens: Any, positions: Any, valid: Any) -> jax.Array:
        cache = None if looped else [None] * model.config.num_layers
        return nnx.merge(graph, state)(tokens, positions, causal_attention(valid, positions), cache)[0]

    return jax.jit(run)


@cache
def compiled(config: ModelConfig, looped: bool = True) -> tuple[Callable[..., jax.Array], Any]:
    model = build(config)
    return forward(model, looped), nnx.split(model)[1]


def hidden(config: ModelConfig, tokens: np.ndarray, *, looped: bool = True) -> np.ndarray:
    run, state = compiled(config, looped)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(run(state, tokens, positions, np.ones(tokens.shape, bool)))


def values_and_gradients(model: Decoder, looped: bool = True) -> tuple[jax.Array, Any]:
    """Hidden states, and the gradient of a random combination of them for every array, adapters and base."""
    state, run = nnx.split(model)[1], forward(model, looped)
    pull = np.random.default_rng(2).normal(size=(2, TIME, model.config.hidden_size)).astype(np.float32)

    def total(state: Any) -> tuple[jax.Array, jax.Array]:
        out = run(state, TOKENS, jnp.asarray(POSITIONS), jnp.ones((2, TIME), bool))
        return jnp.sum(out * pull), out

    grads, out = jax.jit(jax.grad(total, has_aux=True))(state)
    return out, grads


def summed(model: Decoder, tokens: np.ndarray = TOKENS) -> tuple[Callable[..., jax.Array], Any, Any]:
    """The sum of all hidden states as a function of (trained, rest), and these two."""
    graph, trained, rest = split_trainable(model)
    valid, positions = jnp.ones(tokens.shape, bool), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def total(trained: Any, rest: Any) -> jax.Array:
        return nnx.merge(graph, trained, rest)(tokens, positions, causal_attention(valid, positions))[0].sum()

    return total, trained, rest


def same(one: tuple[jax.Array, Any], other: tuple[jax.Array, Any]) -> None:
    np.testing.assert_allclose(one[0], other[0], atol=1e-5 * float(jnp.abs(other[0]).max()))
    theirs = jax.tree_util.tree_leaves_with_path(other[1])
    scale = max(float(jnp.abs(g).max()) for _, g in theirs)
    assert scale > 0.1
    for got, (path, want) in zip(jax.tree.leaves(one[1]), theirs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("config", "remat"), [(EVERYTHING, False), (OTHERWISE, True)], ids=["every switch, kept", "otherwise, again"]
)
@pytest.mark.slow
def test_neither_the_loop_nor_recomputation_changes_values_or_gradients(config: ModelConfig, remat: bool) -> None:
    """With every switch of the families on, and adapters. What is spelt out is computed again in its backward."""
    spelt_out = values_and_gradients(build(config, True), looped=False)
    same(values_and_gradients(build(config, True, remat=remat)), spelt_out)


@pytest.mark.slow
def test_with_a_cache_layers_that_are_alike_are_traced_once() -> None:
    model = shapes_of(dataclasses.replace(PLAIN, num_layers=4, windows=(3, None, 3, None)), True)
    traced: list[Any] = []

    def attend(q: Any, k: Any, v: Any, cache: Any, *, window: Any, softcap: float | None) -> tuple[Any, Any]:
        traced.append(window)
        return q, cache

    graph, state = nnx.split(model)
    jax.eval_shape(lambda state: nnx.merge(graph, state)(TOKENS, jnp.asarray(POSITIONS), attend, [None] * 4), state)
    assert traced == [3, None]


@pytest.mark.slow
def test_layers_of_different_parts_are_different_loops() -> None:
    """Adapters on the two layers in the middle of four: 1, 2 and 1 layers in a loop."""
    base = build(dataclasses.replace(PLAIN, num_layers=4, windows=(3, None, 3, None)))
    model = with_lora(base, LoRAConfig(rank=3, targets=(r"layers\.[12]\..*",)))
    same(values_and_gradients(model), values_and_gradients(model, looped=False))
    loops = scans(jax.make_jaxpr(forward(model))(nnx.split(model)[1], TOKENS, POSITIONS, np.ones((2, TIME), bool)))
    assert [loop.params["length"] for loop in loops] == [1, 2, 1]


def scans(program: Any) -> list[Any]:
    """The scans of a program that are in no other, in order."""
    found = []
    for equation in getattr(program, "jaxpr", program).eqns:
        inner = [value for value in equation.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        found += [equation] if equation.primitive.name == "scan" else [scan for one in inner for scan in scans(one)]
    return found


@pytest.mark.slow
def test_layers_whose_adapters_weigh_differently_are_different_loops() -> None:
    """The scale of an adapter is no array, and a loop has one for all of its turns."""
    model = build(PLAIN, True)
    model.layers[1].mlp.up_proj.lora.scale = 5.0
    assert [list(loop) for loop in model.layer_runs()] == [[0], [1]]
    inputs = nnx.split(model)[1], TOKENS, POSITIONS, np.ones((2, TIME), bool)
    np.testing.assert_allclose(*(forward(model, looped)(*inputs) for looped in (True, False)), atol=1e-5)


@pytest.mark.slow
def test_layers_alone_are_recomputed_too() -> None:
    """Trap: XLA spells out a loop of one turn, and undoes the recomputation then."""
    wide = dataclasses.replace(PLAIN, hidden_size=64, intermediate_size=256, num_layers=4)
    base, tokens = shapes_of(wide, remat_keeps="nothing"), np.zeros((4, 128), np.int32)

    def memory(target: str) -> int:
        model = nnx.eval_shape(lambda: with_lora(base, LoRAConfig(rank=1, targets=(target,))))
        total, trained, rest = summed(model, tokens)
        program = jax.jit(jax.grad(total), compiler_options=compiler_options(model)).lower(trained, rest).compile()
        return int(program.memory_analysis().temp_size_in_bytes)

    assert memory(r"layers\.[02]\..*") < 1.5 * memory("all-linear")


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "remat"), [(True, True), (True, False), (False, True)])
def test_a_loop_copies_no_weights(lora: bool, remat: bool) -> None:
    """Trap: what a loop keeps for its backward holds copies of the kernels. Only their gradients are gathered."""
    model = shapes_of(dataclasses.replace(PLAIN, num_layers=3), lora, remat=remat)
    total, trained, rest = summed(model)
    kernels = {linear.kernel.shape for linear in projections(model).values()}
    loops = scans(jax.make_jaxpr(jax.grad(total))(trained, rest))
    ahead, back = ({v.aval.shape[1:] for v in loop.outvars if v.aval.shape[:1] == (3,)} for loop in loops)
    assert (48,) in {shape[-1:] for shape in ahead}  # the projections are kept
    assert kernels.isdisjoint(ahead)
    assert kernels.isdisjoint(back) == lora


@pytest.mark.slow
def test_a_loop_stacks_no_weights() -> None:
    """Trap: layers that lie apart are put into one array first, to be looped over."""
    wide = dataclasses.replace(PLAIN, hidden_size=256, intermediate_size=512, num_layers=8, head_dim=64)
    model = shapes_of(wide, True)
    total, trained, rest = summed(model)
    whole = 4 * sum(linear.kernel.size for linear in projections(model).values())
    for program in (total, jax.grad(total)):
        memory = jax.jit(program).lower(trained, rest).compile().memory_analysis()
        assert memory.temp_size_in_bytes < whole / 3


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_a_loop_keeps_no_floats_of_16_bits(lora: bool) -> None:
    """Trap: XLA's CPU has none, and would convert all that a loop has kept, in each of its turns (1.6 × the time)."""
    model = shapes_of(dataclasses.replace(PLAIN, num_layers=3), lora, param_dtype="bfloat16", compute_dtype="bfloat16")
    total, trained, rest = summed(model)
    kept = [v.aval for loop in scans(jax.make_jaxpr(jax.grad(total))(trained, rest)) for v in loop.outvars]
    assert any(aval.dtype == jnp.uint16 and aval.shape == (3, 2, TIME, 48) for aval in kept)
    assert not [aval for aval in kept if aval.dtype == jnp.bfloat16 and aval.shape[0] == 3]


@pytest.mark.parametrize("looped", [False, True])
def test_windows_shorter_than_the_sequence_bound_the_reach(looped: bool) -> None:
    """Two layers with a window of 4 reach 2·3 tokens back, exactly."""
    config = dataclasses.replace(PLAIN, windows=(4, 4))
    changed = TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 50
    moved = np.abs(hidden(config, changed, looped=looped) - hidden(config, TOKENS, looped=looped))
    touched = moved.max(axis=(0, 2)) > 1e-6
    assert np.flatnonzero(touched).tolist() == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("config", [PLAIN, EVERYTHING, OTHERWISE], ids=["plain", "every switch", "otherwise"])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.slow
def test_real_tokens_do_not_depend_on_padding(config: ModelConfig, looped: bool) -> None:
    """Left, right, both and none, with rubbish for padding; a row of nothing but padding is finite."""
    run, state = compiled(config, looped)
    size, places = 7, [0, 4, TIME - 7]
    tokens = np.random.default_rng(3).integers(0, 50, (4, TIME))
    valid = np.zeros((4, TIME), bool)
    for row, start in enumerate(places):
        tokens[row, start : start + size], valid[row, start : start + size] = TOKENS[0, :size], True
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    out = np.asarray(run(state, tokens, positions, valid))
    assert np.isfinite(out).all()
    want = hidden(config, TOKENS, looped=looped)[0, :size]
    for row, start in enumerate(places):
        np.testing.assert_allclose(out[row, start : start + size], want, atol=1e-5)


@pytest.mark.parametrize(("held", "stream"), [("float32", jnp.float32), ("bfloat16", jnp.bfloat16)])
@pytest.mark.slow
def test_the_residual_stream_has_the_type_of_the_weights(held: str, stream: Any) -> None:
    model = build(PLAIN, param_dtype=held, compute_dtype="bfloat16")
    out = forward(model)(nnx.split(model)[1], TOKENS, POSITIONS, np.ones((2, TIME), bool))
    assert out.dtype == stream
    assert model.logits(out).dtype == jnp.float32
    difference = np.abs(np.asarray(out, np.float32) - hidden(PLAIN, TOKENS))
    assert 0 < difference.mean() < 0.05


@pytest.mark.parametrize("looped", [True, False])
@pytest.mark.parametrize(("rows", "divided"), [(4, True), (3, False)])
def test_the_residual_stream_is_divided_by_rows_on_a_mesh(rows: int, divided: bool, looped: bool) -> None:
    """Where the number of rows allows it; weights alone decide, nothing is told to the model. The program asks for it
    after the embedding and in the one layer that is traced.
    """
    graph, state = nnx.split(Decoder(PLAIN, rngs=nnx.Rngs(0), remat=False))
    mesh = make_mesh((2, 2))
    state = jax.device_put(state, shardings(state, mesh))
    tokens = np.zeros((rows, TIME), np.int32)
    positions = np.broadcast_to(np.arange(TIME), tokens.shape)
    valid, cache = jnp.ones(tokens.shape, bool), None if looped else [None] * PLAIN.num_layers
    run = jax.jit(lambda s: nnx.merge(graph, s)(tokens, positions, causal_attention(valid, positions), cache)[0])
    asked = str(run.trace(state).jaxpr).count("sharding_constraint")
    assert asked == (2 if divided else 0)
    assert not divided or run(state).sharding.is_equivalent_to(row_sharding(mesh), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("time", "divided"), [(4, True), (3, False)])
def test_accelerators_divide_the_tokens_of_a_row_too(time: int, divided: bool) -> None:
    """Over the devices that divide the heads, where the number of tokens allows it; values are those of one device."""
    graph, state = nnx.split(Decoder(PLAIN, rngs=nnx.Rngs(0)))
    tokens = np.arange(2 * time, dtype=np.int32).reshape(2, time)
    positions = np.broadcast_to(np.arange(time), tokens.shape)

    def run(state: object, platform: str) -> jax.Array:
        model = nnx.merge(graph, state)
        model.platform = platform
        return model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))[0]

    mesh = make_mesh((2, 2))
    placed = jax.device_put(state, shardings(state, mesh))
    traced = jax.jit(run, static_argnums=1).trace(placed, "tpu")
    assert ("spec=P('fsdp', 'tp', None)" in str(traced.jaxpr)) == divided
    np.testing.assert_allclose(
        traced.lower().compile()(placed), jax.jit(run, static_argnums=1)(state, "cpu"), atol=2e-5
    )
