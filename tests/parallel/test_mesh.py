"""Meshes on four virtual devices."""

import re
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from covey.config.schema import MeshConfig, RoleMeshConfig
from covey.errors import RecipeError
from covey.parallel import make_mesh, mesh_from_config
from covey.parallel import mesh as mesh_module
from covey.parallel.mesh import (
    local_mesh,
    platform_of,
    rollout_mesh_from_config,
    spans_processes,
)


@pytest.mark.parametrize(
    ("shape", "axes", "first", "count"),
    [
        (None, ("fsdp", "tp"), 0, 1),
        ((1, 4), ("fsdp", "tp"), 0, 4),
        ((2, 2), ("fsdp", "tp"), 0, 4),
        ((4, 1), ("fsdp", "tp"), 0, 4),
        ((2,), ("tp",), 2, 2),
    ],
)
def test_a_mesh_has_all_of_its_devices(
    shape: tuple[int, ...] | None, axes: tuple[str, ...], first: int, count: int
) -> None:
    mesh = make_mesh(shape, axes, jax.devices()[first:])
    assert dict(mesh.shape) == dict(zip(axes, shape or (1, 1), strict=True))
    assert set(mesh.devices.flat) == set(jax.devices()[first : first + count])


def test_axes_are_automatic() -> None:
    """Explicit axes, what `jax.make_mesh` makes by itself, refuse this product of differently sharded arrays."""
    mesh = make_mesh((2, 2))
    assert set(mesh.axis_types) == {AxisType.Auto}
    a = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("fsdp", "tp")))
    b = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("fsdp", "tp")))
    assert float(jnp.sum(a @ b)) == 64.0


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


class Chip:
    """A chip of a TPU slice that is not there."""

    platform, device_kind, process_index, core_on_chip = "tpu", "TPU v6 lite", 0, 0

    def __init__(self, *coords: int):
        self.coords = coords


@pytest.mark.parametrize("shape", [(64, 4), (32, 8), (16, 16)])
def test_a_mesh_may_divide_a_dimension_of_a_tpu_slice(shape: tuple[int, int]) -> None:
    """Of 16 x 16 chips, each group along `tp` is one of neighbours in a line, and no two groups share a chip."""
    chips = [Chip(x, y, 0) for y in range(16) for x in range(16)]
    devices = make_mesh(shape, ("fsdp", "tp"), cast(Any, chips)).devices
    assert devices.shape == shape
    assert set(devices.flat) == set(chips)
    coords = np.array([[chip.coords for chip in group] for group in devices])
    steps = np.abs(np.diff(coords, axis=1)).sum(-1)
    assert steps.tolist() == [[1] * (shape[1] - 1)] * shape[0]


def test_one_device_is_no_mesh_and_too_many_are_refused() -> None:
    assert mesh_from_config(MeshConfig()) is None
    with pytest.raises(RecipeError, match="1 x 8 = 8 devices, and there are 4"):
        mesh_from_config(MeshConfig(tp=8))


def of_processes(*owners: Sequence[int]) -> Any:
    """A mesh whose devices belong to these processes."""
    devices = np.array([[SimpleNamespace(process_index=owner) for owner in row] for row in owners])
    return SimpleNamespace(devices=devices, shape={"fsdp": devices.shape[0], "tp": devices.shape[1]})


def test_a_process_has_a_block_of_a_mesh_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "Mesh", lambda devices, axes, axis_types: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for owners, shape in {((0, 0), (1, 1)): (1, 2), ((0, 1), (0, 1)): (2, 1)}.items():
        mesh = of_processes(*owners)
        mesh.axis_names = ("fsdp", "tp")
        assert spans_processes(mesh)
        part = local_mesh.__wrapped__(mesh, 1)
        assert part.shape == shape
        assert {device.process_index for device in part.flat} == {1}
    for owners, said in {((0, 1), (1, 0)): "no block", ((0, 0), (0, 0)): "process 1 has 0 devices"}.items():
        with pytest.raises(RecipeError, match=said):
            local_mesh.__wrapped__(of_processes(*owners), 1)


class FakeMesh:
    """A mesh whose devices are not there, with JAX's names."""

    def __init__(self, devices: Any, axis_names: Sequence[str], axis_types: Any = ()):
        self.devices, self.axis_names = np.asarray(devices), tuple(axis_names)

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.devices.shape, strict=True))


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three devices of each of two processes, of which this is the first."""
    devices = [SimpleNamespace(process_index=owner, id=10 * owner + n) for owner in (0, 1) for n in range(3)]
    made = {device.id: type("Device", (), vars(device))() for device in devices}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: list(made.values()))
    monkeypatch.setattr(mesh_module, "Mesh", FakeMesh)

    def make(shape: Sequence[int], axes: Sequence[str], found: Sequence[Any]) -> Any:
        grid = np.empty(len(found), object)
        grid[:] = found
        return FakeMesh(grid.reshape(shape), axes)

    monkeypatch.setattr(mesh_module, "make_mesh", make)
    return list(made.values())


def ids(mesh: Any) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def test_the_rollout_of_a_recipe_has_devices_beside_the_actors(two_processes: list[Any]) -> None:
    actor = mesh_from_config(MeshConfig(fsdp=2))
    rollout: Any = rollout_mesh_from_config(RoleMeshConfig(data=2, fsdp=2), actor)
    assert (ids(actor), ids(rollout)) == ([0, 10], [1, 2, 11, 12])
    assert rollout.shape == {"data": 2, "fsdp": 2, "tp": 1}
    assert ids(rollout_mesh_from_config(RoleMeshConfig(data=2), mesh_from_config(MeshConfig()))) == [1, 11]
    assert rollout_mesh_from_config(RoleMeshConfig(), actor) is None
    for sizes, said in {
        (6, 0, 0): "takes 3 devices of each of 2 processes, and model.mesh leaves 2",
        (3, 0, 0): "a mesh of 3 devices over 2 processes",
        (0, 0, 4): "mesh of the rollout has 4 devices along tp, 2 of each process; .*fix: tp 2, and the rest .* data",
    }.items():
        with pytest.raises(RecipeError) as caught:
            rollout_mesh_from_config(RoleMeshConfig(*sizes), actor)
        assert re.search(said, str(caught.value).replace("\n", "; ")), str(caught.value)


def test_a_role_of_each_process_has_its_own_devices_or_those_of_the_actor(
    two_processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = pytest.importorskip("covey_hosts.arrays")
    monkeypatch.setattr(arrays, "Mesh", FakeMesh)
    check = partial(arrays.check_per_process_mesh, None)
    actor = mesh_from_config(MeshConfig(fsdp=4))
    same = FakeMesh(actor.devices.reshape(2, 2), ("data", "fsdp"))  # type: ignore[union-attr]
    check(same, actor, "rollout")
    mixed = rollout_mesh_from_config(RoleMeshConfig(data=4), mesh_from_config(MeshConfig(fsdp=2)))
    assert mixed is not None
    with pytest.raises(RecipeError, match="has 2 of the actor's devices beside others"):
        check(mixed, actor, "rollout")
    own, other = (FakeMesh(np.array(two_processes[at], object).reshape(1, -1), ("fsdp", "tp")) for at in OF_PROCESSES)
    check(own, actor, "rollout")
    with pytest.raises(RecipeError, match="mesh of the rollout has devices of another process"):
        check(other, actor, "rollout")


OF_PROCESSES = slice(0, 3), slice(3, 6)


def test_the_mesh_of_a_recipe_counts_the_devices_of_all_processes(two_processes: list[Any]) -> None:
    """It takes the first of each; a recipe that sets no mesh has copies of the weights on one of each."""
    four, default = mesh_from_config(MeshConfig(fsdp=4)), mesh_from_config(MeshConfig())
    assert (four.shape, ids(four)) == ({"fsdp": 4, "tp": 1}, [0, 1, 10, 11])  # type: ignore[union-attr]
    assert (default.shape, ids(default)) == ({"data": 2}, [0, 10])  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match="a mesh of 3 devices over 2 processes"):
        mesh_from_config(MeshConfig(fsdp=3))


@pytest.mark.parametrize(
    ("platform", "capability", "found"),
    [("tpu", None, "tpu"), ("gpu", "9.0", "cuda"), ("gpu", "7.5", "gpu"), ("gpu", "gfx90a", "gpu")],
)
def test_cuda_is_where_kernels_can_run(platform: str, capability: str | None, found: str) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert platform_of(cast(Any, SimpleNamespace(device_set=[device]))) == found
    assert platform_of(make_mesh((2, 2))) == "cpu"


def test_attention_without_kernels_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_GPU_ATTENTION", "xla")
    for platform, found in {"gpu": "gpu", "tpu": "tpu"}.items():
        device = SimpleNamespace(platform=platform, compute_capability="9.0")
        assert platform_of(cast(Any, SimpleNamespace(device_set=[device]))) == found
