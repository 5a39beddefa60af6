"""The table of layer kinds: it has every parameter of a model, and takes kinds of packages that are installed."""

import dataclasses
from importlib.metadata import EntryPoint, EntryPoints

import jax
import pytest
from flax import nnx

from covey import registry
from covey.errors import CoveyError
from covey.models import families
from covey.models.config import ModelConfig
from covey.models.decoder import Attention, Decoder
from covey.models.layer_kinds import LayerKind, find_kind, layer_shapes
from covey.models.lora import projections
from covey.parallel import flatten

PLAIN = ModelConfig(
    vocab_size=20, hidden_size=12, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
)
GATED = dataclasses.replace(PLAIN, attention_gate=True, attention_bias=True, rotary_dim=2, qk_norm=True)
WHOLE = dataclasses.replace(
    PLAIN, qk_norm=True, qk_norm_whole=True, gated_mlp=False, post_norms=True, tie_embeddings=True
)
OTHER = LayerKind("other", "covey.models.decoder:Attention", find_kind("attention").shapes)


def shapes(config: ModelConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("config", [PLAIN, GATED, WHOLE, dataclasses.replace(WHOLE, norm_scales=False)])
def test_the_table_has_every_parameter_with_its_shape(config: ModelConfig) -> None:
    model = shapes(config)
    there = {path: x.shape for path, x in flatten(nnx.state(model)).items()}
    assert {path: families.parameter_shape(config, path) for path in families.parameter_paths(config)} == there
    linears = {path: linear.shape for path, linear in projections(model).items()}
    kernels = {path: shape for path, shape in layer_shapes(config, 0).items() if path.endswith(".kernel")}
    assert {f"{path.split('.', 2)[2]}.kernel": x for path, x in linears.items() if "s.0." in path} == kernels


def test_a_package_adds_a_kind_which_is_found_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = EntryPoint("layer:other", f"{__name__}:OTHER", "covey.models")
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: EntryPoints([offer]).select(**wanted))
    monkeypatch.setattr(EntryPoint, "load", lambda _: OTHER)
    monkeypatch.setattr(registry, "import_package", lambda *_, **__: None)
    model = shapes(dataclasses.replace(PLAIN, mixers=("other", "attention")))
    assert isinstance(model.layers[0].other, Attention)
    assert [len(run) for run in model.layer_runs()] == [1, 1]
    assert "layers.0.other.q_proj.kernel" in families.parameter_paths(model.config)
    find_kind.cache_clear()


def test_a_kind_that_no_package_offers_is_refused_by_name() -> None:
    with pytest.raises(CoveyError, match="layer:nothing needs a package"):
        shapes(dataclasses.replace(PLAIN, mixers=("nothing", "nothing")))


def test_a_gate_multiplies_the_output_of_attention_and_the_rest_of_a_head_is_not_rotated() -> None:
    """With gates of 0 half of the output is left; positions change nothing where no pair is rotated."""
    layer = Attention(GATED, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 3, 12))
    seen = []

    def attend(q, k, v, cache, *, window, softcap):  # type: ignore[no-untyped-def]
        seen.append((q, k))
        return q, cache

    kernel = layer.q_proj.kernel[...].reshape(12, 2, 2, 4).at[:, :, 1].set(0.0)
    layer.q_proj.kernel[...] = kernel.reshape(12, -1)
    turned = jax.numpy.full((1, 3, 1, 1), 0.6), jax.numpy.full((1, 3, 1, 1), 0.8)
    still = jax.numpy.ones((1, 3, 1, 1)), jax.numpy.zeros((1, 3, 1, 1))
    out, _ = layer(x, turned, attend, None, None)
    layer(x, still, attend, None, None)
    (q, k), (still_q, still_k) = seen
    assert jax.numpy.allclose(out, layer.o_proj.from_heads(q / 2), atol=1e-6)
    for one, other in ((q, still_q), (k, still_k)):
        assert jax.numpy.array_equal(one[..., 2:], other[..., 2:])
        assert not jax.numpy.allclose(one[..., :2], other[..., :2])
