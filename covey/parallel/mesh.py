"""Meshes: the devices of a run as a grid with named axes.

`data` replicates the parameters and splits the rows, `fsdp` splits both, `tp` splits each matrix product. A mesh lies
within one process; several processes have one each (`distributed`).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, Sharding

from covey.config.schema import MeshConfig
from covey.errors import RecipeError, nearest

MESH_AXES = ("data", "fsdp", "tp")


def make_mesh(
    shape: Sequence[int] | None = None,
    axes: Sequence[str] = ("fsdp", "tp"),
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Make a mesh over `devices`, or over all devices of this process.

    Its axes are automatic: the compiler shards arrays that have no sharding of their own. `jax.make_mesh` by default
    makes explicit axes, where every product of two differently sharded arrays needs a sharding for its result.

    Args:
        shape: number of devices along each axis. If not set, the mesh has only the first device.
        axes: names out of `MESH_AXES`, one for each number of `shape`.
        devices: devices to use; all of this process if not set.

    Raises:
        RecipeError: the names or numbers are invalid, or do not use every device once.
    """
    if shape is None:
        shape, devices = (1,) * len(axes), (devices or jax.local_devices())[:1]
    shape, axes = tuple(shape), tuple(axes)
    _check_axes(shape, axes)
    devices = list(jax.local_devices() if devices is None else devices)
    if math.prod(shape) != len(devices):
        raise RecipeError(
            f"a mesh of {_format_product(shape)} devices, and there are {len(devices)}",
            want=f"numbers that multiply to {len(devices)}",
            fix="on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual devices",
            where="mesh",
        )
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Return `mesh` with automatic axes, as `make_mesh` makes them: the same devices, names and order."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def mesh_from_config(config: MeshConfig) -> Mesh | None:
    """Make the mesh that a recipe sets, over the first devices of this process; None for one device.

    Raises:
        RecipeError: this process has fewer devices.
    """
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    if sizes["data"] == 1:
        del sizes["data"]
    count = math.prod(sizes.values())
    return make_mesh(tuple(sizes.values()), tuple(sizes), jax.local_devices()[:count]) if count > 1 else None


def platform_of(place: Mesh | Sharding) -> str:
    """Return the platform for which programs on these devices are built: `cpu`, `tpu`, `gpu`, or `cuda` for NVIDIA GPUs
    of compute capability 8.0 or more, for which `models.kernels` are written. The devices may be those of a description
    of a topology (`jax.experimental.topologies`), which are not there.
    """
    device: Any = next(iter(place.devices.flat if isinstance(place, Mesh) else place.device_set))
    major = str(getattr(device, "compute_capability", "")).split(".")[0]  # ROCm gives a name
    has_kernels = device.platform == "gpu" and major.isdigit() and int(major) >= 8
    return "cuda" if has_kernels else str(device.platform)


def _check_axes(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    unknown = [axis for axis in axes if axis not in MESH_AXES]
    if unknown:
        raise RecipeError(f"unknown mesh axis {unknown[0]!r}", fix=nearest(str(unknown[0]), MESH_AXES), where="mesh")
    if len(set(axes)) != len(axes):
        raise RecipeError(f"mesh axes {axes} name one twice", want="each axis once", where="mesh")
    if len(shape) != len(axes) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise RecipeError(
            f"mesh shape {shape} for axes {axes}", want="one whole number from 1 up for each axis", where="mesh"
        )


def _format_product(shape: tuple[int, ...]) -> str:
    """Format `(2, 4)` as `2 x 4 = 8`."""
    return f"{' x '.join(map(str, shape))} = {math.prod(shape)}" if len(shape) > 1 else str(math.prod(shape))
