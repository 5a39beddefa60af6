"""Moving trees between meshes, and finding out about them."""

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from covey.errors import CoveyError
from covey.parallel import Transfer, flatten, make_mesh, mesh_of, reshard


def on(mesh: jax.sharding.Mesh, *spec: str | None) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def placed_on(device: int) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[device])


def tree() -> dict[str, Any]:
    return {"a": {"kernel": jnp.arange(32.0).reshape(8, 4)}, "b": [jnp.arange(8, dtype=jnp.bfloat16)]}


def first_half() -> jax.sharding.Mesh:
    return make_mesh((2,), ("fsdp",), jax.devices()[:2])


def second_half() -> jax.sharding.Mesh:
    return make_mesh((2,), ("tp",), jax.devices()[2:])


class Outcome:
    """Collects what `on_done` is called with."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
        self.thread: threading.Thread | None = None
        self.called = threading.Event()

    def __call__(self, transfer: Transfer) -> None:
        self.transfer, self.thread = transfer, threading.current_thread()
        self.called.set()

    def wait(self) -> Transfer:
        assert self.called.wait(30)
        assert self.transfer is not None
        return self.transfer


# --- reshard


def test_to_another_mesh_and_back_keeps_every_bit() -> None:
    source = tree()
    there = reshard(source, {"a": {"kernel": on(first_half(), "fsdp")}, "b": [on(first_half())]})
    over = reshard(there, {"a": {"kernel": on(second_half(), None, "tp")}, "b": [on(second_half(), "tp")]})
    assert set(over["a"]["kernel"].devices()) == set(jax.devices()[2:])
    assert over["a"]["kernel"].sharding.spec == P(None, "tp")
    back = reshard(over, placed_on(0))
    for name, leaf in flatten(back).items():
        assert leaf.dtype == flatten(source)[name].dtype
        np.testing.assert_array_equal(leaf, flatten(source)[name])


def test_matched_by_name_whatever_the_containers() -> None:
    state = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[1]
    plain = jax.tree.map(lambda _: on(second_half()), nnx.to_pure_dict(state))
    moved = reshard(state, plain)
    assert isinstance(moved, nnx.State)
    assert mesh_of(moved) == second_half()
    target = jax.device_put(tree(), on(second_half()))  # of arrays
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, reshard(tree(), target), target))


def test_leaves_without_a_target_are_named() -> None:
    with pytest.raises(CoveyError, match=r"a\.kernel"):
        reshard(tree(), {"b": [on(first_half())]})


def test_done_is_reported_from_another_thread_while_the_caller_goes_on() -> None:
    outcome, went_on, was_free = Outcome(), threading.Event(), list[bool]()

    def report(transfer: Transfer) -> None:
        was_free.append(went_on.wait(2))
        outcome(transfer)

    reshard(tree(), on(second_half()), on_done=report)
    went_on.set()
    transfer = outcome.wait()
    assert was_free == [True]
    assert transfer.error is None
    assert transfer.bytes == 32 * 4 + 8 * 2
    assert 0 < transfer.seconds < 30
    assert outcome.thread is not threading.main_thread()


def test_failure_is_raised_and_reported() -> None:
    outcome = Outcome()
    with pytest.raises(ValueError, match="divi"):
        reshard({"x": jnp.zeros(3)}, on(first_half(), "fsdp"), on_done=outcome)
    assert isinstance(outcome.wait().error, ValueError)


def test_failure_on_the_way_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that dies while it moves."""

    class Dying:
        nbytes = 4

        def block_until_ready(self) -> None:
            raise RuntimeError("device lost")

        def is_deleted(self) -> bool:
            return False

    monkeypatch.setattr(jax, "device_put", lambda *args: {"x": Dying()})
    outcome = Outcome()
    reshard({"x": jnp.zeros(4)}, placed_on(0), on_done=outcome)
    assert "device lost" in str(outcome.wait().error)


def test_donated_source_is_gone() -> None:
    source = jax.device_put(tree(), on(first_half()))
    moved = reshard(source, on(second_half()), donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(source))
    np.testing.assert_array_equal(moved["a"]["kernel"], tree()["a"]["kernel"])


@pytest.mark.parametrize("name", ["first half", "all", "one"])
def test_donation_within_the_same_devices_keeps_the_result_alive(name: str) -> None:
    """Replicas that stay where they are share their buffer with the source: freeing one would take the other."""
    targets = {"first half": on(first_half()), "all": on(make_mesh((4,), ("tp",))), "one": placed_on(0)}
    source = jax.device_put(jnp.arange(8.0), on(first_half()))
    moved = reshard(source, targets[name], donate=True)
    del source
    np.testing.assert_array_equal(moved, np.arange(8.0))


def test_a_result_donated_onward_counts_as_arrived() -> None:
    """The next step may consume the arrays before the watching thread looks at them."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(20):
        outcome = Outcome()
        moved = reshard({"x": jnp.zeros((64, 64))}, placed_on(1), on_done=outcome)
        step(moved["x"])
        assert outcome.wait().error is None


@pytest.mark.parametrize("source", ["first half", "all", "one"])
@pytest.mark.parametrize("target", ["first half", "all", "one"])
def test_copy_survives_the_donation_of_its_source(source: str, target: str) -> None:
    """Trainer and rollout on common devices: without a copy the trainer's next update takes the rollout's weights."""
    places = {"first half": on(first_half()), "all": on(make_mesh((4,), ("tp",))), "one": placed_on(0)}
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array = jax.jit(lambda: jnp.arange(8.0), out_shardings=places[source])()
    copied, shared = reshard(array, places[target], copy=True), reshard(array, places[target])
    overwrite(array)
    np.testing.assert_array_equal(copied, np.arange(8.0))
    assert shared.is_deleted() or target != source  # the trap is real


@pytest.mark.parametrize("used", [True, False])
def test_pathways_resharder_when_it_is_in_use(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    calls: list[dict[str, Any]] = []

    def fake_reshard(x: Any, sharding: Any, **options: Any) -> Any:
        calls.append(options)
        return jax.device_put(x, sharding)

    top, experimental, module = (ModuleType(name) for name in ("pathwaysutils", "experimental", "reshard"))
    top.__spec__ = ModuleSpec("pathwaysutils", None)
    top.is_pathways_backend_used = lambda: used  # type: ignore[attr-defined]
    module.reshard = fake_reshard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pathwaysutils", top)
    monkeypatch.setitem(sys.modules, "pathwaysutils.experimental", experimental)
    monkeypatch.setitem(sys.modules, "pathwaysutils.experimental.reshard", module)
    moved = reshard(tree(), on(second_half()), donate=True)
    assert mesh_of(moved) == second_half()
    assert calls == ([{"donate": True}] if used else [])


# --- names and meshes


def test_flatten_names_leaves_of_every_container() -> None:
    state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))[1]
    found = flatten({"params": state, "opt_state": optax.adam(1e-3).init(state), "list": [1, (2, None)]})
    assert list(found) == [
        "list.0",
        "list.1.0",
        "opt_state.0.count",
        "opt_state.0.mu.bias",
        "opt_state.0.mu.kernel",
        "opt_state.0.nu.bias",
        "opt_state.0.nu.kernel",
        "params.bias",
        "params.kernel",
    ]
    assert list(flatten(state)) == list(flatten(nnx.to_pure_dict(state)))


def test_colliding_names_are_refused() -> None:
    with pytest.raises(CoveyError, match=r"a\.b"):
        flatten({"a.b": 1, "a": {"b": 2}})


@pytest.mark.slow
@given(st.recursive(st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text("abc", min_size=1), inner)))
def test_flatten_loses_no_leaf_and_keeps_their_order(anything: Any) -> None:
    assert list(flatten(anything).values()) == jax.tree.leaves(anything)


def test_mesh_of() -> None:
    assert mesh_of(jax.device_put(tree(), on(first_half()))) == first_half()
    assert mesh_of(tree()) is None
    assert mesh_of({"count": jnp.zeros(()), "x": jax.device_put(jnp.zeros(4), on(first_half()))}) == first_half()
    assert mesh_of({"x": on(second_half())}) == second_half()


def test_two_meshes_are_named() -> None:
    mixed = {
        "old": jax.device_put(jnp.zeros(4), on(first_half())),
        "new": jax.device_put(jnp.zeros(4), on(second_half())),
    }
    with pytest.raises(CoveyError, match="2 meshes") as caught:
        mesh_of(mixed)
    for part in ("old", "new", "fsdp=2", "tp=2", "[0, 1]", "[2, 3]"):
        assert part in str(caught.value)
