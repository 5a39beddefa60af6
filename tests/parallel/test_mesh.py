"""Meshes on four virtual devices."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from covey.config.schema import MeshConfig
from covey.errors import RecipeError
from covey.parallel import make_mesh, mesh_from_config
from covey.parallel.mesh import platform_of


def test_without_a_shape_it_is_one_device() -> None:
    mesh = make_mesh()
    assert dict(mesh.shape) == {"fsdp": 1, "tp": 1}
    assert mesh.devices.flat[0] == jax.devices()[0]


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_shape_over_all_devices(shape: tuple[int, int]) -> None:
    mesh = make_mesh(shape, ("fsdp", "tp"))
    assert tuple(mesh.shape.values()) == shape
    assert set(mesh.devices.flat) == set(jax.devices())


def test_axes_are_automatic() -> None:
    """Explicit axes, what `jax.make_mesh` makes by itself, refuse this product of differently sharded arrays."""
    mesh = make_mesh((2, 2))
    assert set(mesh.axis_types) == {AxisType.Auto}
    a = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("fsdp", "tp")))
    b = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("fsdp", "tp")))
    assert float(jnp.sum(a @ b)) == 64.0


def test_on_some_devices() -> None:
    half = jax.devices()[2:]
    assert list(make_mesh((2,), ("tp",), half).devices.flat) == half


@pytest.mark.parametrize(
    ("shape", "axes", "says"),
    [
        ((3,), ("fsdp",), "a mesh of 3 devices, and there are 4"),
        ((2, 4), ("fsdp", "tp"), "2 x 4 = 8 devices, and there are 4"),
        ((2, 2), ("fsd", "tp"), "did you mean 'fsdp'"),
        ((2, 2), ("fsdp", "pipeline"), "one of: data, fsdp, tp"),
        ((2, 2), ("tp", "tp"), "one twice"),
        ((4,), ("fsdp", "tp"), "one whole number"),
        ((4, 0), ("fsdp", "tp"), "one whole number"),
        ((-1, 4), ("fsdp", "tp"), "one whole number"),
        ((2.0, 2), ("fsdp", "tp"), "one whole number"),
    ],
)
def test_mistakes_are_explained(shape: tuple[int, ...], axes: tuple[str, ...], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make_mesh(shape, axes)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (MeshConfig(fsdp=1, tp=4), {"fsdp": 1, "tp": 4}),
        (MeshConfig(fsdp=2, tp=2), {"fsdp": 2, "tp": 2}),
        (MeshConfig(data=2), {"data": 2, "fsdp": 1, "tp": 1}),
    ],
)
def test_the_mesh_of_a_recipe_takes_the_first_devices(config: MeshConfig, axes: dict[str, int]) -> None:
    mesh = mesh_from_config(config)
    assert mesh is not None
    assert dict(mesh.shape) == axes
    assert list(mesh.devices.flat) == jax.devices()[: mesh.size]


def test_one_device_is_no_mesh_and_too_many_are_refused() -> None:
    assert mesh_from_config(MeshConfig()) is None
    with pytest.raises(RecipeError, match="1 x 8 = 8 devices, and there are 4"):
        mesh_from_config(MeshConfig(tp=8))


@pytest.mark.parametrize(
    ("platform", "capability", "found"),
    [("tpu", None, "tpu"), ("gpu", "9.0", "cuda"), ("gpu", "7.5", "gpu"), ("gpu", "gfx90a", "gpu")],
)
def test_cuda_is_where_kernels_can_run(platform: str, capability: str | None, found: str) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert platform_of(cast(Any, SimpleNamespace(device_set=[device]))) == found


def test_the_platform_of_a_mesh_is_that_of_its_devices() -> None:
    assert platform_of(make_mesh((2, 2))) == "cpu"
