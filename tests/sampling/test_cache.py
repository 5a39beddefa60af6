"""The KV cache in the layout of each platform: kernels, run as ordinary programs, attend to what blocks on a CPU do."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from covey.models.config import ModelConfig
from covey.sampling.cache import (
    CACHE_AXES,
    Block,
    CacheLayout,
    decode_attention,
    empty_block,
    insert_block,
    insert_prompts,
    keep_rows,
    take_slot,
)

SLOTS, TIME = 4, 256
LENGTH = np.array([3, 130, 200, 50])


def model_of(platform: str, width: int, mesh: Any = None) -> Any:
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=width
    )
    return SimpleNamespace(config=config, platform=platform, mesh=mesh or AbstractMesh((), ()))


def filled(layout: CacheLayout, width: int) -> list[Block]:
    """Blocks in which prompts were inserted into all slots but the last, and then slots were exchanged."""
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.normal(size=(2, 3, 2, TIME, width)), jnp.float32)
    place = lambda x, axis: x if axis == 2 else x.swapaxes(2, 3)  # noqa: E731
    prefix, blocks, start = Block(place(prompts[0], layout.keys), place(prompts[1], layout.values), layout), [], 0
    for length in layout.block_lengths(TIME):
        part = prefix.map(
            lambda x, axis, start=start, length=length: jax.lax.slice_in_dim(x, start, start + length, axis=axis)
        )
        empty = empty_block(layout, SLOTS, length, (2, width), jnp.float32)
        block = insert_block(empty, part, jnp.array([2, 0, 1, 0]), jnp.array([True, True, True, False]))
        blocks.append(keep_rows(block, jnp.array([1, 0, 2, 3])))
        start += length
    return blocks


def decoded(model: Any, blocks: list[Block], window: int | None, softcap: float | None) -> np.ndarray:
    """Outputs of three steps; the last slot is not active."""
    rng, outs = np.random.default_rng(1), []
    active = jnp.array([True, True, True, False])

    @jax.jit
    def step(blocks: list[Block], length: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        attend = decode_attention(model, length, active, interpret=True)
        return attend(q, k, v, blocks, window=window, softcap=softcap)

    width = model.config.head_dim
    for number in range(3):
        q, k, v = (jnp.asarray(rng.normal(size=(SLOTS, 1, n, width)), jnp.float32) for n in (4, 2, 2))
        out, blocks = step(blocks, jnp.asarray(LENGTH + number), q / width**0.5, k, v)
        outs.append(np.asarray(out)[:3])
    return np.stack(outs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "width", "window", "softcap"),
    [
        ("tpu", 128, None, None),
        ("tpu", 80, 20, 5.0),
        ("tpu", 512, None, None),
        ("cuda", 128, 60, None),
        ("cuda", 80, None, 5.0),
        ("cuda", 512, None, None),
    ],
)
def test_kernels_attend_to_what_blocks_do(platform: str, width: int, window: int | None, softcap: float | None) -> None:
    pytest.importorskip("covey_kernels")
    got, want = (
        decoded(model, filled(CacheLayout.of(model), width), window, softcap)
        for model in (model_of(platform, width), model_of("cpu", width))
    )
    np.testing.assert_allclose(got, want, atol=5e-6)


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_prompts_are_inserted_into_their_slots_alone(mesh: tuple[int, int] | None) -> None:
    """On a mesh each device fills its own; a prompt may be padded beyond the end of the cache. Layers differ in their
    heads, and the devices of a mesh divide those of the first layer alone.
    """
    layout, rng, spec = CacheLayout.of(model_of("tpu", 8)), np.random.default_rng(0), jax.sharding.PartitionSpec
    shapes = [(n, heads, 8, time) for n, time in ((SLOTS, 128), (3, 200)) for heads in (2, 1)]
    arrays = [rng.normal(size=(2, *shape)).astype(np.float32) for shape in shapes]
    old, new = arrays[:2], arrays[2:]
    cache, prefix = ([[Block(*jnp.asarray(pair), layout)] for pair in layers] for layers in (old, new))
    if mesh:
        devices = jax.make_mesh(mesh, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
        for layers, rows in ((cache, "fsdp"), (prefix, None)):
            for number, heads in enumerate(("tp", None)):
                layers[number] = jax.device_put(layers[number], jax.sharding.NamedSharding(devices, spec(rows, heads)))
    inserted = jax.jit(insert_prompts)(cache, prefix, jnp.array([2, 1, 0, 1]), jnp.array([True, False, True, True]))
    for layer, ((block,), want, other) in enumerate(zip(inserted, old, new, strict=True)):
        want = want.copy()
        want[:, [0, 2, 3]] = other[:, [2, 0, 1], ..., :128]
        np.testing.assert_array_equal([block.keys, block.values], want)
        assert not mesh or block.keys.sharding.shard_shape(block.keys.shape)[:2] == (SLOTS // 2, 1)
        for slot in range(SLOTS):
            (taken,) = jax.jit(take_slot)(inserted, np.int32(slot))[layer]
            np.testing.assert_array_equal([taken.keys, taken.values], want[:, slot : slot + 1])


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_devices_of_a_mesh_attend_with_their_slots_and_heads(platform: str) -> None:
    pytest.importorskip("covey_kernels")
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    model = model_of(platform, 64, mesh.abstract_mesh)
    sharded = jax.device_put(
        filled(CacheLayout.of(model), 64), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tp"))
    )
    assert CACHE_AXES[:2] == ("rows", "kv_heads")
    cpu = model_of("cpu", 64)
    want = decoded(cpu, filled(CacheLayout.of(cpu), 64), None, None)
    np.testing.assert_allclose(decoded(model, sharded, None, None), want, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "width"), [("tpu", 80), ("tpu", 128), ("cuda", 80)])
def test_a_position_behind_the_end_is_not_written(platform: str, width: int) -> None:
    """A slot that waits for a tool may be full while others are decoded, and goes on later."""
    pytest.importorskip("covey_kernels")
    model = model_of(platform, width)
    (block,) = filled(CacheLayout.of(model), width)
    attend = decode_attention(model, jnp.array([3, TIME, 200, TIME + 1]), jnp.full(SLOTS, False), interpret=True)
    q, k, v = (jnp.ones((SLOTS, 1, n, width)) for n in (4, 2, 2))
    _, (written,) = attend(q, k, v, [block], window=None, softcap=None)
    changed = block.map(lambda old, axis, new: np.argwhere(np.asarray(old != new)), written)
    for places, axis in ((changed.keys, block.layout.keys), (changed.values, block.layout.values)):
        assert set(map(tuple, places[:, [0, axis]])) == {(0, 3), (2, 200)}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_an_accelerator_has_one_block_for_each_layer(platform: str) -> None:
    lengths = CacheLayout.of(model_of(platform, 64)).block_lengths
    assert (lengths(0), lengths(94), lengths(300)) == ([], [128], [384])
