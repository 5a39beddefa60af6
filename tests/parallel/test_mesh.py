"""Meshes on four virtual devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from covey.errors import RecipeError
from covey.parallel import make_mesh


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
