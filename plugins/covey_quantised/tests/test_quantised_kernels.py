"""Quantised bases: the numbers of each format, the bytes they take, and what goes on working above them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.errors import RecipeError
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.layers import project
from covey.models.loading import weights
from covey.models.lora import merge_as_base, merge_lora, projections, split_trainable, with_lora, without_lora
from covey.models.stored_kernel import FrozenParam
from covey.parallel import flatten, make_mesh, reshard, shardings
from covey_formats.files import causal_logits
from covey_formats.hf import write_hf
from covey_formats.peft import write_peft
from covey_formats.peft_reader import load_adapter
from covey_quantised.kernels import QuantisationFormat, QuantisedKernel, project_quantised, quantise

TINY = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"
TOKENS = np.random.RandomState(0).randint(0, 300, (2, 32))
"""As many as an export compares, which has the same programs then."""
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
KINDS = [QuantisationFormat("int8", 64), QuantisationFormat("nf4", 16)]
every_kind = pytest.mark.parametrize("how", KINDS, ids=lambda how: how.kind)
KERNELS = {(64, 64), (64, 32), (64, 96), (96, 64)}
"""Shapes of the projections of `TINY`."""

# Dettmers et al. (2023), appendix E.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def assert_nearest(found: np.ndarray, exact: np.ndarray, how: QuantisationFormat) -> None:
    """Every number of `found` is a level of the format, and none is nearer to that of `exact`; worked in float64."""
    levels = np.arange(-128, 128) / 127.5 if how.kind == "int8" else NF4
    size = len(exact) if how.kind == "int8" else how.block
    found, exact = (x.astype(np.float64).reshape(-1, size, x.shape[1]) for x in (found, exact))
    scale = np.abs(exact).max(1, keepdims=True)
    choice = scale[..., None] * levels
    assert (np.abs(found[..., None] - choice).min(-1) <= 1e-6 * scale).all()
    assert (np.abs(found - exact) <= np.abs(exact[..., None] - choice).min(-1) + 1e-6 * scale).all()
    assert (np.abs(found - exact) <= np.diff(levels).max() / 2 * scale * (1 + 1e-4)).all()


def kernel(n_in: int = 64, n_out: int = 24) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(n_in, n_out)).astype(np.float32)


def stirred(model: Decoder, rank: int = 4) -> Decoder:
    """`model` with adapters, every B away from zero."""
    model, rng = with_lora(model, LoRAConfig(rank=rank, alpha=6.0)), np.random.default_rng(1)
    for linear in projections(model).values():
        assert linear.lora is not None
        linear.lora.b[...] = rng.normal(size=linear.lora.b.shape, scale=0.1).astype(np.float32)
    return model


def load(how: QuantisationFormat, **switches: Any) -> Decoder:
    return weights.load(TINY, quantize=how.kind, quantize_block=how.block, **switches).model


# --- numbers


@every_kind
def test_a_kernel_is_what_the_format_makes_of_it(how: QuantisationFormat) -> None:
    """Worked by hand; so it is never farther off than half the widest step of its scale."""
    exact = kernel()
    found = np.asarray(how.store(exact, "float32")[...])
    assert_nearest(found, exact, how)
    assert np.abs(found - exact).max() > 1e-3


def test_scales_are_those_of_columns_and_not_of_rows() -> None:
    """Trap: the kernel is [in, out], and a scale a row would be as many numbers in a square one."""
    exact = np.ones((16, 16), np.float32) * 10.0 ** np.arange(-8, 8)
    for how in KINDS:
        np.testing.assert_allclose(how.store(exact, "float32")[...], exact, rtol=0.5 / 127)


def test_a_column_of_zeros_stays_zero() -> None:
    exact = kernel()
    exact[:, 3] = 0
    for how in KINDS:
        found = np.asarray(how.store(exact, "float32")[...])
        assert np.isfinite(found).all()
        assert not found[:, 3].any()


@pytest.mark.parametrize(("how", "share"), [(KINDS[0], 4.0), (QuantisationFormat("nf4", 64), 7.1)], ids=["int8", "nf4"])
def test_what_a_kernel_takes_at_rest(how: QuantisationFormat, share: float) -> None:
    exact = jnp.asarray(np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32))
    taken = sum(x.on_device_size_in_bytes() for x in quantise(exact, how))
    assert exact.nbytes / taken == pytest.approx(share, rel=0.01)


# --- products


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_and_its_gradient_are_those_of_the_float_kernel(how: QuantisationFormat, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 5, 64)).astype(np.float32)).astype(dtype)
    quantised = how.store(kernel(), "float32")
    arrays = quantised.values[...], quantised.scales[...]
    ours = jax.jit(
        jax.value_and_grad(lambda x: project_quantised(x, *arrays, dtype, how.kind, "cpu").astype(jnp.float32).var())
    )
    theirs = jax.jit(jax.value_and_grad(lambda x: project(x, quantised[...], dtype).astype(jnp.float32).var()))
    (ours_out, ours_grad), (out, grad) = ours(x), theirs(x)
    np.testing.assert_array_equal(ours_out, out)
    assert ours_grad.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(ours_grad, np.float32), np.asarray(grad, np.float32))


def forward(graph: Any, tokens: np.ndarray = TOKENS[:, :12] % 50) -> Callable[[Any, Any], jax.Array]:
    """Hidden states of `tokens` as a function of what is trained and of the rest."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def run(trained: Any, rest: Any) -> jax.Array:
        seen = causal_attention(jnp.ones(tokens.shape, bool), positions)
        return nnx.merge(graph, nnx.merge_state(trained, rest))(jnp.asarray(tokens), positions, seen)[0]

    return run


def as_floats(model: Decoder) -> Decoder:
    """`model` with float kernels of the same numbers, and its adapters."""
    model = nnx.merge(*nnx.split(model))
    for linear in projections(model).values():
        linear.kernel = nnx.Param(linear.kernel[...])
    return model


@pytest.mark.slow
def test_adapters_have_the_gradient_they_have_over_the_same_numbers_in_float() -> None:
    model = stirred(merge_as_base(Decoder(CONFIG, rngs=nnx.Rngs(0)), "float32", KINDS[1]))

    def value_and_gradient(model: Decoder) -> tuple[Any, Any]:
        graph, trained, rest = split_trainable(model)
        run = forward(graph)
        return jax.jit(jax.value_and_grad(lambda t, r: jnp.sum(jnp.sin(3 * run(t, r)))))(trained, rest)

    (value, found), (same, wanted) = value_and_gradient(model), value_and_gradient(as_floats(model))
    assert abs(value - same) < 1e-4
    assert {name.rsplit(".", 2)[-2] for name in flatten(found)} == {"lora"}
    for name, gradient in flatten(wanted).items():
        assert np.abs(gradient).max() > 1e-3
        np.testing.assert_allclose(flatten(found)[name], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize(("how", "remat"), [(KINDS[0], True), (KINDS[1], False)], ids=["int8", "nf4 kept"])
@pytest.mark.slow
def test_no_program_keeps_the_base_in_float(how: QuantisationFormat, remat: bool) -> None:
    """Trap: the backward reuses the kernels that the forward has dequantised, so that all of them are kept; and a loop
    of decoding dequantises all of them before it begins.
    """
    wide = replace(CONFIG, hidden_size=512, intermediate_size=1024, num_layers=8, head_dim=64)
    base = abstract_decoder(wide, how, remat=remat)
    model = nnx.eval_shape(lambda: with_lora(base, LoRAConfig(rank=1)))
    whole = 4 * sum(linear.kernel.size for linear in projections(model).values())
    graph, trained, rest = split_trainable(model)
    run = forward(graph)

    def loop(trained: Any, rest: Any) -> jax.Array:
        def again(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return run(jax.tree.map(lambda t: t + x, trained), rest).mean(), None

        return jax.lax.scan(again, jnp.zeros(()), length=9)[0]

    for program in (jax.grad(lambda t, r: jnp.sum(jnp.sin(run(t, r)))), loop):
        compiled = jax.jit(program).lower(trained, rest).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < whole / 3


# --- models


@pytest.mark.slow
@pytest.mark.parametrize(("how", "bound"), list(zip(KINDS, (0.05, 0.5), strict=True)), ids=["int8", "nf4"])
def test_logits_of_a_quantised_base_are_near_the_float_ones(how: QuantisationFormat, bound: float) -> None:
    """Mean difference as a share of their spread; SmolLM2-135M's is much the same, 0.04 and 0.45."""
    exact, found = (causal_logits(model, TOKENS) for model in (weights.load(TINY).model, load(how)))
    assert 0 < np.abs(found - exact).mean() < bound * exact.std()


@every_kind
def test_loading_quantises_the_projections_and_nothing_else(how: QuantisationFormat) -> None:
    exact, found = weights.load(TINY, param_dtype="bfloat16").model, load(how, param_dtype="bfloat16")
    assert all(isinstance(linear.kernel, QuantisedKernel) for linear in projections(found).values())
    before, after = flatten(nnx.state(exact)), flatten(nnx.state(found))
    others = {name for name in before if not name.endswith(".kernel")}
    assert others == {name for name in after if ".kernel." not in name}
    assert all(np.array_equal(before[name], after[name]) for name in others)
    path = "layers.1.mlp.down_proj"  # from the file's numbers, not from those that bfloat16 leaves
    wanted = projections(weights.load(TINY).model)[path].kernel[...]
    assert_nearest(np.asarray(projections(found)[path].kernel[...]), np.asarray(wanted), how)


def test_one_tensor_is_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next tensor is read nothing is left of the last but its values and scales, on the host or beside it."""
    original, placed = weights.FolderCheckpoint.tensors, []
    before = {id(array) for array in jax.live_arrays()}

    def watched(self: weights.FolderCheckpoint) -> Iterator[tuple[str, np.ndarray]]:
        for path, tensor in original(self):
            left = [x for x in jax.live_arrays() if id(x) not in before and x.shape in KERNELS and x.dtype == "float32"]
            assert left == []
            yield path, tensor
            del tensor

    def place(path: str, tensor: np.ndarray) -> jax.Array:
        placed.append((path, tensor.dtype.name))
        return jnp.array(tensor)

    monkeypatch.setattr(weights.FolderCheckpoint, "tensors", watched)
    monkeypatch.setattr(weights, "make_put", lambda model, mesh: place)
    weights.load(TINY, quantize="int8")
    assert not [
        path for path, dtype in placed if path.endswith("kernel") or (path.endswith("values") and dtype != "int8")
    ]
    assert len([path for path, _ in placed if path.endswith("kernel.values")]) == 14


def test_adapters_go_on_and_off_over_the_same_arrays() -> None:
    base = load(KINDS[1])
    model = with_lora(base, LoRAConfig(rank=2))
    own, theirs, again = (
        {name: x.unsafe_buffer_pointer() for name, x in flatten(nnx.state(m)).items()}
        for m in (base, model, without_lora(model))
    )
    assert own == again == {name: theirs[name] for name in own}
    _, trained, rest = split_trainable(model)
    assert len(flatten(trained)) == 2 * 14
    assert len(nnx.state(nnx.merge(nnx.split(model)[0], nnx.merge_state(trained, rest)), FrozenParam)) > 0


@pytest.mark.slow
def test_merged_and_rebased_compute_the_same() -> None:
    model = stirred(load(KINDS[1]))
    wanted, plain = causal_logits(model, TOKENS), merge_lora(model)
    assert nnx.state(plain).keys() == nnx.state(weights.load(TINY).model).keys()
    assert {x.dtype for x in jax.tree.leaves(nnx.state(plain))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(causal_logits(plain, TOKENS), wanted, atol=1e-4)
    np.testing.assert_allclose(causal_logits(merge_as_base(model, "float32"), TOKENS), wanted, atol=1e-4)
    anew = merge_as_base(model, "bfloat16", QuantisationFormat("int8", 64))
    assert np.abs(causal_logits(anew, TOKENS) - wanted).mean() < 0.05 * wanted.std()
    assert anew.embed.embedding.dtype == "bfloat16"


@pytest.mark.slow
def test_a_mesh_holds_it_in_pieces_and_computes_the_same(tmp_path: Path) -> None:
    for how in KINDS:
        alone, mesh = load(how), make_mesh((2, 2))
        parts = load(how, mesh=mesh)
        state = flatten(nnx.state(parts))
        assert {name: x.sharding for name, x in state.items()} == flatten(shardings(nnx.state(alone), mesh))
        for name in ("layers.1.mlp.up_proj.kernel.values", "layers.0.attn.o_proj.kernel.values"):
            assert state[name].addressable_shards[0].data.size * 4 == state[name].size
        wanted = causal_logits(alone, TOKENS)
        np.testing.assert_allclose(causal_logits(parts, TOKENS), wanted, atol=1e-5 * np.abs(wanted).max())
    graph, params = nnx.split(parts)
    moved = nnx.merge(graph, reshard(params, shardings(params, make_mesh((1, 4)))))
    np.testing.assert_allclose(causal_logits(moved, TOKENS), wanted, atol=1e-5 * np.abs(wanted).max())


@every_kind
@pytest.mark.slow
def test_it_goes_out_whole_and_its_adapter_alone(how: QuantisationFormat, tmp_path: Path) -> None:
    loaded = weights.load(TINY)
    model = stirred(load(how))
    wanted = causal_logits(model, TOKENS)
    write_hf(model, loaded.tokenizer, tmp_path / "hf", source=TINY)
    np.testing.assert_allclose(causal_logits(weights.load(tmp_path / "hf").model, TOKENS), wanted, atol=1e-4)
    write_peft(model, 300, tmp_path / "peft", base="somewhere")
    adapted = load_adapter(load(how), tmp_path / "peft")
    np.testing.assert_allclose(causal_logits(adapted, TOKENS), wanted, atol=1e-5)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 4


# --- mistakes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantize": "int9"}, "no kernel format 'int9'.*\n.*did you mean 'int8'"),
        ({"quantize": "nf4", "quantize_block": 64}, r"blocks of 64 do not divide the 96 inputs(.|\n)*such as 32"),
        ({"quantize": "nf4", "quantize_block": 3}, "blocks of 3 (.|\n)*an even divisor of 64, such as 2"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        weights.load(TINY, **settings)


def test_a_quantised_base_is_not_trained() -> None:
    with pytest.raises(RecipeError, match=r"a quantised base cannot be trained(.|\n)*lora\.rank"):
        split_trainable(load(KINDS[0]))
