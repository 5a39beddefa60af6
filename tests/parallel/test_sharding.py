"""Parameters on meshes, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.parallel import flatten, logical_axes, make_mesh, mesh_of, num_row_shards, row_sharding, shardings
from covey.parallel.arrays import fingerprint, weight_shardings

WIDE = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    attention_bias=True,
    qk_norm=True,
    post_norms=True,
)


@pytest.fixture
def params() -> nnx.State:
    return nnx.split(Decoder(WIDE, rngs=nnx.Rngs(0)))[1]


@pytest.mark.parametrize(
    ("path", "shape", "axes"),
    [
        ("embed.embedding", (64, 16), ("vocab", "embed")),
        ("head.embedding", (64, 16), ("vocab", "embed")),
        ("layers.0.attn.q_proj.kernel", (16, 16), ("embed", "heads")),
        ("layers.11.attn.k_proj.kernel", (16, 8), ("embed", "kv_heads")),
        ("layers.0.attn.v_proj.bias", (8,), ("kv_heads",)),
        ("layers.0.attn.o_proj.kernel", (16, 16), ("heads", "embed")),
        ("layers.0.mlp.gate_proj.kernel", (16, 32), ("embed", "mlp")),
        ("layers.0.mlp.down_proj.kernel", (32, 16), ("mlp", "embed")),
        ("layers.0.mlp.down_proj.lora_a", (32, 4), ("mlp", "lora")),
        ("layers.0.mlp.down_proj.lora.b", (4, 16), ("lora", "embed")),
        ("layers.0.attn_norm.scale", (16,), (None,)),
        ("layers.attn_norm.scale", (2, 16), ("layer", None)),
        ("layers.mlp.up_proj.kernel", (2, 16, 32), ("layer", "embed", "mlp")),
        ("opt_state.inner.1.0.mu.layers.0.attn.q_proj.kernel", (16, 16), ("embed", "heads")),
        ("opt_state.inner.1.0.count", (), ()),
        ("something.of.the.users", (3, 4), (None, None)),
        ("layers.0.attn.q_proj.kernel", (), ()),
    ],
)
def test_logical_axes(path: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
    assert logical_axes(path, shape) == axes


def test_every_matrix_of_the_decoder_is_known(params: nnx.State) -> None:
    for name, leaf in flatten(params).items():
        assert len(logical_axes(name, leaf.shape)) == leaf.ndim
        assert leaf.ndim < 2 or None not in logical_axes(name, leaf.shape), name


def test_specs_on_a_mesh(params: nnx.State) -> None:
    placed = flatten(shardings(params, make_mesh((2, 2))))
    assert placed["layers.0.attn.q_proj.kernel"].spec == P("fsdp", "tp")
    assert placed["layers.1.mlp.down_proj.kernel"].spec == P("tp", "fsdp")
    assert placed["embed.embedding"].spec == P("tp", "fsdp")
    assert placed["layers.0.attn_norm.scale"].spec == P(None)
    without = flatten(shardings(params, make_mesh((4,), ("tp",))))
    assert without["layers.0.attn.q_proj.kernel"].spec == P(None, "tp")


def test_what_does_not_divide_is_kept_whole_and_reported_once() -> None:
    tree = {"layers": [{"attn": {"k_proj": {"kernel": jax.ShapeDtypeStruct((16, 6), jnp.float32)}}}] * 3}
    said: list[str] = []
    placed = flatten(shardings(tree, make_mesh((1, 4)), report=said.append))
    assert placed["layers.0.attn.k_proj.kernel"].spec == P("fsdp", None)
    assert len(said) == 1
    assert "kv_heads of 6" in said[0]
    assert "tp=4" in said[0]
    assert "3 arrays" in said[0]


def test_two_dimensions_never_share_a_mesh_axis() -> None:
    rules = {"embed": ("tp",), "mlp": ("tp",)}
    tree = {"up_proj": {"kernel": jax.ShapeDtypeStruct((16, 32), jnp.float32)}}
    said: list[str] = []
    assert shardings(tree, make_mesh((4,), ("tp",)), rules, said.append)["up_proj"]["kernel"].spec == P("tp", None)
    assert len(said) == 1


def test_moments_lie_where_their_parameters_do(params: nnx.State) -> None:
    """`jit(opt.init)` alone puts them all on one device."""
    mesh = make_mesh((2, 2))
    params = jax.device_put(params, shardings(params, mesh))
    optimizer = optax.adamw(1e-3)
    where = shardings(jax.eval_shape(optimizer.init, params), mesh)
    state = jax.jit(optimizer.init, out_shardings=where)(params)
    for name, leaf in flatten(params).items():
        assert flatten(state)[f"0.mu.{name}"].sharding == leaf.sharding
        assert flatten(state)[f"0.nu.{name}"].sharding == leaf.sharding


def test_explicit_axes_become_automatic_ones(params: nnx.State) -> None:
    """Those of `jax.make_mesh`, whether the mesh was given or the weights lie on it already."""
    ours, theirs = make_mesh((2, 2)), jax.make_mesh((2, 2), ("fsdp", "tp"))
    assert shardings(params, theirs) == shardings(params, ours)
    lying = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(theirs, P(*["fsdp"][: x.ndim]))), params)
    assert mesh_of(jax.device_put(params, weight_shardings(lying, None))) == ours


@pytest.mark.parametrize(
    ("shape", "axes", "parts"), [((2, 2), ("fsdp", "tp"), 2), ((2, 2), ("data", "fsdp"), 4), ((4,), ("tp",), 1)]
)
def test_rows(shape: tuple[int, ...], axes: tuple[str, ...], parts: int) -> None:
    mesh = make_mesh(shape, axes)
    assert num_row_shards(mesh) == parts
    rows = jax.device_put(jnp.arange(24).reshape(8, 3), row_sharding(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(8 // parts, 3)}
    np.testing.assert_array_equal(rows, np.arange(24).reshape(8, 3))


def test_a_fingerprint_knows_every_bit_and_no_sharding() -> None:
    a = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    tree = {"a": a, "b": jnp.ones(3, jnp.bfloat16), "c": jnp.arange(2), "d": jnp.array([True, False])}
    one = fingerprint(tree)
    sharded = jax.device_put(a, NamedSharding(make_mesh((4, 1)), P("fsdp")))
    assert fingerprint(tree | {"a": sharded}) == one
    for name, value in {"a": jnp.nextafter(a[-1], jnp.inf), "b": 1.0078125, "c": 2, "d": True}.items():
        assert fingerprint(tree | {name: tree[name].at[-1].set(value)}) != one
