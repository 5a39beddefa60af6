"""Meshes: the devices of a run as a grid with named axes.

`data` replicates the parameters and splits the rows, `fsdp` splits both, `tp` splits each matrix product. A mesh may
have devices of several processes, equally many of each; `local_mesh` is the part of one process.
"""

import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, Sharding

from covey.config.schema import MeshConfig, RoleMeshConfig
from covey.errors import RecipeError, nearest

MESH_AXES = ("data", "fsdp", "tp")
PROCESS = "process"
"""Name of an axis over the processes."""


def make_mesh(
    shape: Sequence[int] | None = None,
    axes: Sequence[str] = ("fsdp", "tp"),
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Make a mesh over `devices`, or over all devices of all processes.

    Its axes are automatic: the compiler shards arrays that have no sharding of their own. `jax.make_mesh` by default
    makes explicit axes, where every product of two differently sharded arrays needs a sharding for its result.

    On TPUs an axis has chips that are neighbours in the slice. Where its number is no product of dimensions of the
    slice, as 4 in 16 x 16, a dimension is divided between the axes, and the last axis has the nearest chips.

    Args:
        shape: number of devices along each axis. If not set, the mesh has only the first device.
        axes: names out of `MESH_AXES`, one for each number of `shape`.
        devices: devices to use; all of all processes if not set.

    Raises:
        RecipeError: the names or numbers are invalid, or do not use every device once.
    """
    if shape is None:
        shape, devices = (1,) * len(axes), (devices or jax.local_devices())[:1]
    shape, axes = tuple(shape), tuple(axes)
    _check_axes(shape, axes)
    devices = list(jax.devices() if devices is None else devices)
    if math.prod(shape) != len(devices):
        raise RecipeError(
            f"a mesh of {_format_product(shape)} devices, and there are {len(devices)}",
            want=f"numbers that multiply to {len(devices)}",
            fix="on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual devices",
            where="mesh",
        )
    types = (AxisType.Auto,) * len(axes)
    try:
        return jax.make_mesh(shape, axes, axis_types=types, devices=devices)
    except NotImplementedError:  # JAX divides a dimension of the slice by itself only on v5e
        return Mesh(create_device_mesh(shape, devices, allow_split_physical_axes=True), axes, axis_types=types)


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Return `mesh` with automatic axes, as `make_mesh` makes them: the same devices, names and order."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def mesh_from_config(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Make the mesh that a recipe sets, over the first devices of each process; `default_mesh` if it sets none.

    Args:
        config: sizes of the axes.
        devices: devices to choose from; all of all processes if not set.

    Raises:
        RecipeError: there are fewer devices, or the processes would have different numbers of them.
    """
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    if sizes["data"] == 1:
        del sizes["data"]
    count = math.prod(sizes.values())
    if count == 1:
        return default_mesh()
    return make_mesh(tuple(sizes.values()), tuple(sizes), _first_devices(count, _devices_by_process(devices)))


def rollout_mesh_from_config(
    config: RoleMeshConfig, actor: Mesh | None, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
    """Make the mesh of the rollout that a recipe sets, over the first devices of each process that `actor` leaves; None
    if the recipe sets none.

    Args:
        config: sizes of the axes.
        actor: mesh of the actor; None for the first device.
        devices: devices to choose from; all of all processes if not set.

    Raises:
        RecipeError: there are too few devices, or a copy of the weights would lie over several processes.
    """
    count = config.size
    if not count:
        return None
    processes = _devices_by_process(devices)
    used = set(processes[0][:1] if actor is None else actor.devices.flat)
    free = [[device for device in devices if device not in used] for devices in processes]
    each = _equal_share(count, len(processes), "role_to_mesh.rollout")
    if each > min(map(len, free)):
        places = "" if len(free) == 1 else f" of each of {len(free)} processes"
        raise RecipeError(
            f"role_to_mesh.rollout takes {each} devices{places}, and model.mesh leaves {min(map(len, free))}",
            want="devices for both: the meshes of actor and rollout share none",
            fix="smaller meshes; or leave role_to_mesh.rollout out, and the rollout uses those of model.mesh",
            where="role_to_mesh.rollout",
        )
    sizes = tuple(getattr(config, axis) or 1 for axis in MESH_AXES)
    mesh = make_mesh(sizes, MESH_AXES, [device for devices in free for device in devices[:each]])
    if spans_processes(mesh):
        check_whole_copies(mesh, "rollout")
    return mesh


def check_whole_copies(mesh: Mesh, role: str) -> None:
    """Refuse the mesh of a role that each process plays for itself, if a copy of the weights lies over processes.

    Raises:
        RecipeError: see above.
    """
    part = local_mesh(mesh)
    if divided := [axis for axis, size in part.shape.items() if axis != "data" and size != mesh.shape[axis]]:
        axis = divided[0]
        raise RecipeError(
            f"the mesh of the {role} has {mesh.shape[axis]} devices along {axis}, {part.shape[axis]} of each process",
            want="whole copies of the weights in each process, which samples by itself: a model divided over hosts "
            "cannot sample",
            fix=f"{axis} {part.shape[axis]}, and the rest of the devices along data",
            where="role_to_mesh",
        )


def default_mesh() -> Mesh | None:
    """Return the mesh of a model without a mesh of its own: None, for one device; in several processes a mesh along
    `data` of the first device of each.
    """
    count = jax.process_count()
    return make_mesh((count,), ("data",), _first_devices(count, _devices_by_process())) if count > 1 else None


def spans_processes(mesh: Mesh | None) -> bool:
    """Return whether `mesh` has devices of several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


@cache
def local_mesh(mesh: Mesh, process: int | None = None) -> Mesh:
    """Return the part of `mesh` on the devices of one process, with the same axes.

    Args:
        mesh: a mesh over several processes, or over one.
        process: index of the process; this one if not set.

    Raises:
        RecipeError: the process has no devices in `mesh`, or they are no block of it.
    """
    process = jax.process_index() if process is None else process
    owned = np.vectorize(lambda device: device.process_index == process)(mesh.devices)
    block = mesh.devices[np.ix_(*map(np.unique, np.nonzero(owned)))]
    if not owned.any() or block.size != owned.sum():
        raise RecipeError(
            f"process {process} has {owned.sum()} devices in the mesh {dict(mesh.shape)}, which are no block of it",
            want="a block of the mesh in each process",
            fix="make_mesh(shape, axes), which takes the devices in the order of the processes",
            where="mesh",
        )
    return Mesh(block, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _first_devices(count: int, processes: Sequence[Sequence[jax.Device]]) -> list[jax.Device]:
    """Return `count` devices, the first ones of each process, in the order of the processes."""
    each = _equal_share(count, len(processes), "mesh")
    return [device for devices in processes for device in devices[:each]]


def _equal_share(count: int, processes: int, where: str) -> int:
    each, rest = divmod(count, processes)
    if rest:
        raise RecipeError(
            f"a mesh of {count} devices over {processes} processes",
            want="equally many devices of each process: a mesh counts those of all",
            where=where,
        )
    return each


def _devices_by_process(devices: Sequence[jax.Device] | None = None) -> list[list[jax.Device]]:
    """Return devices by process; those of JAX if not set."""
    devices = jax.devices() if devices is None else devices
    numbers = sorted({device.process_index for device in devices})
    return [[device for device in devices if device.process_index == number] for number in numbers]


def platform_of(place: Mesh | Sharding) -> str:
    """Return the platform for which programs on these devices are built: `cpu`, `tpu`, `gpu`, or `cuda` for NVIDIA GPUs
    of compute capability 8.0 or more, for which `covey_kernels` are written, unless COVEY_GPU_ATTENTION=xla asks for
    attention without kernels. The devices may come from a description of a topology (`jax.experimental.topologies`).
    """
    device: Any = next(iter(place.devices.flat if isinstance(place, Mesh) else place.device_set))
    major = str(getattr(device, "compute_capability", "")).split(".")[0]  # ROCm gives a name
    return (
        "cuda"
        if device.platform == "gpu"
        and major.isdigit()
        and int(major) >= 8
        and os.environ.get("COVEY_GPU_ATTENTION") != "xla"
        else str(device.platform)
    )


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
