"""Devices of a description, which need not be there, and the mesh of a recipe over them."""

import importlib.util
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from covey.config.recipe import Recipe, SFTRecipe
from covey.config.schema import MeshConfig, RoleMeshConfig
from covey.errors import CoveyError, RecipeError, first_line
from covey.parallel.mesh import MESH_AXES, mesh_from_config, rollout_mesh_from_config
from covey.registry import install_command
from covey_plan.machines import Target

COUNT_FLAG = "--xla_force_host_platform_device_count"

HOSTS = {"v5e:2x4": (2, 4, 1), "v6e:2x4": (2, 4, 1)}
"""Chips of a host in slices that one host may have as a whole; libtpu would divide them into hosts of four."""


class Gpu(NamedTuple):
    """A GPU for XLA's compiler, with the figures of its own descriptions of devices.

    Attributes:
        name: as the driver names it.
        capability: major number of the compute capability.
        cores: number of streaming multiprocessors.
        clock: GHz.
        memory, cache: bytes of the memory and of the second-level cache.
        bandwidth: bytes/s of the memory.
    """

    name: str
    capability: int
    cores: int
    clock: float
    memory: int
    cache: int
    bandwidth: int

    def description(self) -> str:
        """Return the device as a `GpuTargetConfigProto` in text."""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 fpus_per_core: 128
  core_count: {self.cores} clock_rate_ghz: {self.clock} cuda_compute_capability {{ major: {self.capability} }}
  device_memory_size: {self.memory} l2_cache_size: {self.cache} memory_bandwidth: {self.bandwidth}
}}
platform_name: "CUDA" runtime_version {{ major: {cuda_version()} }} dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84_929_347_584, 52_428_800, 3_352_320_000_000),
    "h200": Gpu("NVIDIA H200", 9, 132, 1.98, 151_397_597_184, 52_428_800, 4_800_000_000_000),
    "b200": Gpu("NVIDIA B200", 10, 148, 1.965, 191_514_411_008, 132_644_864, 7_672_320_000_000),
}
"""Name in a plan → GPU."""


def cuda_version() -> int | None:
    """Return the version of CUDA of JAX's plugin, the newer one where both are installed; None without a plugin."""
    return next((major for major in (13, 12) if importlib.util.find_spec(f"jax_cuda{major}_plugin")), None)


class Places(NamedTuple):
    """Devices of a recipe: the mesh or the only device of the actor, and the rollout's own mesh if it has one."""

    actor: Mesh | jax.Device
    rollout: Mesh | None = None

    @property
    def several(self) -> bool:
        """Whether there are several devices."""
        return isinstance(self.actor, Mesh) or self.rollout is not None


def mesh_size(config: MeshConfig) -> int:
    """Return the number of devices of a recipe's mesh."""
    return math.prod(getattr(config, axis) for axis in MESH_AXES)


def rollout_config(recipe: Recipe | SFTRecipe) -> RoleMeshConfig:
    """Return the mesh that a recipe sets for the rollout alone; its size is 0 if it sets none."""
    return recipe.role_to_mesh.rollout if isinstance(recipe, Recipe) else RoleMeshConfig()


def check_mesh(config: MeshConfig, rollout: RoleMeshConfig, target: Target) -> None:
    """Check that the meshes use every device of `target` once.

    Raises:
        RecipeError: they do not.
    """
    wanted = mesh_size(config) + rollout.size
    if target.count in (None, wanted):
        return
    if rollout.size:
        raise RecipeError(
            f"{target.name} has {target.count} devices, and the recipe's meshes have {wanted}: model.mesh "
            f"{_format(config)} = {mesh_size(config)}, role_to_mesh.rollout {_format(rollout)} = {rollout.size}",
            want=f"meshes with {target.count} devices together",
            fix=_smaller(rollout.size, target.count),
            where="role_to_mesh",
        )
    raise RecipeError(
        f"{target.name} has {target.count} devices, and the recipe's mesh has {_format(config)} = {mesh_size(config)}",
        want=f"a mesh whose axes multiply to {target.count}",
        fix=f"for example --mesh.data 1 --mesh.fsdp {target.count} --mesh.tp 1",
        where="model.mesh",
    )


def _smaller(rollout: int, count: int) -> str:
    """Return a fix for two meshes on `count` devices: the actor on the devices that the rollout leaves, or
    a smaller rollout where it leaves none.
    """
    if rollout < count:
        return f"for example --mesh.data 1 --mesh.fsdp {count - rollout} --mesh.tp 1, beside this rollout"
    return f"a role_to_mesh.rollout of at most {count - 1} devices" if count > 1 else "no role_to_mesh.rollout"


def _format(config: MeshConfig | RoleMeshConfig) -> str:
    return " × ".join(f"{axis} {getattr(config, axis) or 1}" for axis in MESH_AXES)


def place_on(target: Target, config: MeshConfig, rollout: RoleMeshConfig | None = None) -> Places:
    """Return the meshes of a recipe over the devices of `target`, of each process the first ones for the actor, as in a
    run.

    Args:
        target: the devices.
        config: mesh of the actor.
        rollout: the rollout's own mesh.

    Raises:
        RecipeError: the meshes do not use every device once, or a process would not have devices of both.
        CoveyError: the compiler for these devices is not installed.
    """
    rollout = rollout or RoleMeshConfig()
    check_mesh(config, rollout, target)
    count = mesh_size(config)
    devices = _devices(target, count + rollout.size)
    mesh = mesh_from_config(config, devices) if count > 1 else None
    return Places(mesh or devices[0], rollout_mesh_from_config(rollout, mesh, devices))


def _devices(target: Target, count: int) -> Sequence[Any]:
    if target.platform == "cpu":
        return _cpu_devices(count)
    with _without_flags_for_cpus(), _own_end_by_sigterm():
        return _tpu_devices(target) if target.platform == "tpu" else _gpu_devices(target)


def _cpu_devices(count: int) -> Sequence[Any]:
    if count > 1 and COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        with suppress(RuntimeError):  # JAX has begun, with the devices that it has
            jax.config.update("jax_num_cpu_devices", count)
    return jax.devices("cpu")[:count]


def _tpu_devices(target: Target) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise CoveyError(
            f"{target.name} needs libtpu, the compiler for TPUs, which is not installed",
            want="the extra 'plan', on Linux with an x86-64 processor (libtpu is under Google Cloud's terms)",
            fix=install_command("plan"),
        )
    try:
        hosts = {"chips_per_host_bounds": HOSTS[target.name]} if target.name in HOSTS else {}
        described = topologies.get_topology_desc(platform="tpu", topology_name=target.name, **hosts)
        return list(described.devices)
    except Exception as error:  # whatever libtpu raises, it does not know these devices
        raise CoveyError(
            f"libtpu has no topology {target.name}: {first_line(error):.200}",
            want="such as v5e:2x4 or v5p:2x2x2",
        ) from error


def _gpu_devices(target: Target) -> Sequence[Any]:
    if cuda_version() is None:
        install = f'cuda/bin/{install_command()} "jax[cuda13]=={jax.__version__}"'
        raise CoveyError(
            f"{target.name} needs JAX's plugin for CUDA, which is not installed",
            want="an environment of its own, because the plugin takes 5.6 GB; no GPU is needed to plan",
            fix=f"python -m venv cuda && {install} && cuda/bin/covey plan",
        )
    assert target.count is not None, "GPUs have a number"
    shape, gpu = f"1x{target.processes}x{target.count // target.processes}", GPUS[target.machine].description()
    return list(topologies.get_topology_desc(target.machine, "cuda", target_config=gpu, topology=shape).devices)


@contextmanager
def _without_flags_for_cpus() -> Iterator[None]:
    """Hide XLA_FLAGS, once the CPU has read it: libtpu refuses flags that are not its own."""
    jax.devices()
    flags = os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


@contextmanager
def _own_end_by_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM: libtpu, once loaded, has one that prints stack traces and may wait for a
    lock of the compilation that it has interrupted.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
