"""Devices that are not there: what is missing is named with the way to get it."""

import importlib.util

import jax
import pytest
from jax.sharding import Mesh

from covey.config.schema import MeshConfig, RoleMeshConfig
from covey.errors import CoveyError, RecipeError
from covey_plan.machines import parse_target
from covey_plan.topologies import place_on


def test_a_mesh_must_use_every_device() -> None:
    with pytest.raises(RecipeError) as raised:
        place_on(parse_target("v5e:2x4"), MeshConfig(fsdp=1, tp=4))
    assert "v5e:2x4 has 8 devices" in str(raised.value)
    assert "data 1 × fsdp 1 × tp 4 = 4" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "told"), [("v5e:2x4", r"\[plan\]"), ("h100:8", r"python -m venv cuda .* \"jax\[cuda13\]==")]
)
def test_a_missing_compiler_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CoveyError, match=told):
        place_on(parse_target(name), MeshConfig(fsdp=8))


def test_a_cpu_has_the_devices_that_the_mesh_asks_for() -> None:
    mesh = place_on(parse_target("cpu"), MeshConfig(fsdp=2, tp=2)).actor
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == {"fsdp": 2, "tp": 2}
    assert place_on(parse_target("cpu"), MeshConfig()) == (jax.devices("cpu")[0], None)


def test_the_rollout_has_the_devices_that_the_actor_leaves() -> None:
    own = place_on(parse_target("cpu"), MeshConfig(), RoleMeshConfig(data=3))
    assert own.actor == jax.devices("cpu")[0]
    assert own.rollout is not None
    assert list(own.rollout.devices.flat) == jax.devices("cpu")[1:4]
    with pytest.raises(
        RecipeError, match=r"v5e:2x4 has 8 devices, and the recipe's meshes have 6: .*rollout .* = 2"
    ) as two:
        place_on(parse_target("v5e:2x4"), MeshConfig(fsdp=4), RoleMeshConfig(tp=2))
    assert "fix: for example --mesh.data 1 --mesh.fsdp 6 --mesh.tp 1, beside this rollout" in str(two.value)
    with pytest.raises(RecipeError, match=r"fix: a role_to_mesh\.rollout of at most 7 devices"):
        place_on(parse_target("v5e:2x4"), MeshConfig(), RoleMeshConfig(fsdp=8))
