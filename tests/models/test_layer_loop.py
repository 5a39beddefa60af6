"""The loop over layers: both of its forms compute the same, and the accelerators' has no conditional."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from covey.models.layer_loop import save_all_but_selected, scan_layers

WIDTH = 64


def step(x: jax.Array, weights: dict[str, jax.Array], shift: jax.Array) -> jax.Array:
    return jnp.tanh(checkpoint_name(x @ weights["kernel"], "product") + weights["bias"] * shift) + x


def layers(count: int) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape, scale=0.1), jnp.float32)  # noqa: E731
    return [{"kernel": draw(WIDTH, WIDTH), "bias": draw(WIDTH)} for _ in range(count)]


def total(platform: str, policy: Any, weights: Any, x: jax.Array) -> jax.Array:
    shifts = jnp.arange(1.0, 1 + len(weights))
    return scan_layers(step, x, weights, shifts, platform=platform, policy=policy).sum()


def unrolled(weights: Any, x: jax.Array) -> jax.Array:
    for number, layer in enumerate(weights):
        x = step(x, layer, jnp.float32(1 + number))
    return x.sum()


POLICIES = [None, save_all_but_selected, jax.checkpoint_policies.save_only_these_names("product")]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_both_forms_are_the_layers_one_after_another(policy: Any) -> None:
    weights, x = layers(3), jnp.asarray(np.random.default_rng(1).normal(size=(5, WIDTH)), jnp.float32)
    want = jax.jit(jax.grad(unrolled, (0, 1)))(weights, x)
    for platform in ("cpu", "tpu", "cuda"):
        got = jax.jit(jax.grad(partial(total, platform, policy), (0, 1)))(weights, x)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_second_derivatives_go_through_a_loop(platform: str) -> None:
    weights, x = layers(2), jnp.asarray(np.random.default_rng(1).normal(size=(5, WIDTH)), jnp.float32)

    def slope(total: Any) -> jax.Array:
        return jax.grad(lambda weights: optax.tree.norm(jax.grad(total)(weights, x)))(weights)

    got, want = jax.jit(lambda: (slope(partial(total, platform, None)), slope(unrolled)))()
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5 * scale), got, want)


def compiled(platform: str, count: int, policy: Any = None) -> Any:
    fn = jax.jit(jax.grad(partial(total, platform, policy), 1))
    return fn.lower(layers(count), jnp.ones((5, WIDTH), jnp.float32)).compile()


def test_a_program_for_accelerators_has_no_branch_for_each_layer() -> None:
    hlo = pytest.importorskip("covey_plan.hlo")
    few, many = (hlo.Program(compiled("tpu", count).as_text()) for count in (3, 9))
    assert not many.of("conditional")
    in_loops = [len([x for x in program.instructions if x.loops]) for program in (few, many)]
    assert in_loops[0] == in_loops[1]
    assert hlo.Program(compiled("cpu", 3).as_text()).of("conditional")


@pytest.mark.parametrize("policy", POLICIES)
def test_stacked_weights_are_one_copy_in_memory(policy: Any) -> None:
    """What the forward pass saves for the backward pass does not include them once more."""
    count = 32
    weights = count * (WIDTH + 1) * WIDTH * 4
    saved = 5 * count * 5 * WIDTH * 4
    assert compiled("tpu", count, policy).memory_analysis().temp_size_in_bytes < 1.2 * weights + saved


def test_stacks_are_not_copied() -> None:
    """A program takes stacks as they are."""
    count, x = 32, jnp.ones((5, WIDTH), jnp.float32)
    stacks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers(count))
    run = partial(scan_layers, step, per_layer=jnp.arange(1.0, 1 + count), platform="tpu", policy=None)
    gradient = jax.jit(jax.grad(lambda x, stacks: run(x, stacks).sum()))
    assert gradient.lower(x, stacks).compile().memory_analysis().temp_size_in_bytes < 0.2 * stacks["kernel"].nbytes
    np.testing.assert_allclose(run(x, stacks), run(x, layers(count)), rtol=1e-6)


@pytest.mark.parametrize(("count", "barriers"), [(1, True), (2, False)])
def test_a_layer_alone_has_a_barrier_between_its_passes(count: int, barriers: bool) -> None:
    """XLA spells out a loop of one turn, and would undo the recomputation; in others a barrier copies the weights."""
    lowered = jax.jit(jax.grad(partial(total, "tpu", None), 1)).lower(layers(count), jnp.ones((5, WIDTH), jnp.float32))
    assert ("optimization_barrier" in lowered.as_text()) == barriers
