"""Sums of gradients: those of the layers of a loop grow in place, and none is lost whatever a loss does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig, MeshConfig
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.layers import LoRA
from covey.models.lora import apply_lora_dropout, split_trainable, with_lora
from covey.models.value_model import make_value_model
from covey.parallel.arrays import place_model, put_rows
from covey.parallel.mesh import mesh_from_config
from covey.train.gradient_sums import GradientLayout
from covey.train.trainer import MicroBatch, Trainer

CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 8)))
POSITIONS = jnp.broadcast_to(jnp.arange(8), (2, 8))


def total(graph: Any, params: Any, tokens: Any = TOKENS) -> jax.Array:
    """The sum of the sines of all outputs, so that the gradient depends on the weights."""
    attend = causal_attention(jnp.ones(tokens.shape, bool), POSITIONS)
    return jnp.sin(jax.tree.leaves(nnx.merge(graph, params)(tokens, POSITIONS, attend))[0]).sum()


def weights(graph: Any, params: Any) -> jax.Array:
    return sum(jnp.square(x).sum() for x in jax.tree.leaves(params))


def dropout(graph: Any, params: Any) -> jax.Array:
    return total(graph, apply_lora_dropout(graph, params, 3))


LOSSES: dict[str, Callable[[Any, Any], jax.Array]] = {
    "two loops": lambda graph, params: total(graph, params) + total(graph, params, TOKENS[::-1] + 1),
    "a loop and the weights": lambda graph, params: total(graph, params) + weights(graph, params),
    "only the weights": weights,
    "dropout": dropout,
}


def model(kind: str) -> nnx.Module:
    base = Decoder(CONFIG, rngs=nnx.Rngs(0))
    adapters = LoRAConfig(rank=2, dropout=0.5, targets=("q_proj", r"layers\.[12]\..*up_proj"))
    return {"full": lambda: base, "lora": lambda: with_lora(base, adapters), "value": lambda: make_value_model(base)}[
        kind
    ]()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loss"), [("lora" if name == "dropout" else "full", name) for name in LOSSES])
def test_sums_are_those_of_plain_gradients(kind: str, loss: str) -> None:
    """Of two micro-batches, whatever else uses the weights of the layers."""
    trained = model(kind)
    graph, trainable, frozen = split_trainable(trained)
    layout = GradientLayout(trained, trainable)

    def of(trainable: Any) -> tuple[jax.Array, None]:
        return LOSSES[loss](graph, nnx.merge_state(trainable, frozen)), None

    add = jax.jit(lambda sums: layout.add_gradients(of, trainable, sums)[0])
    sums = add(add(layout.zeros(trainable)))
    want = jax.jit(jax.grad(lambda trainable: of(trainable)[0]))(trainable)
    pairs = zip(jax.tree.leaves(layout.as_trainable(sums)), jax.tree.leaves(want), strict=True)
    for got, gradient in pairs:
        wanted = 2 * np.asarray(gradient)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=0.5e-5 * np.abs(wanted).max())
    assert any(np.abs(x).max() > 0.1 for x in sums.loops)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "value"])
def test_the_gradient_of_all_layers_does_not_exist_beside_its_sum(kind: str) -> None:
    """The loop back carries the sums; what it stacks beside them is nothing of a weight's shape."""
    made = model(kind)
    graph, trainable, frozen = split_trainable(made)
    layout = GradientLayout(made, trainable)
    loss = lambda trainable: (total(graph, nnx.merge_state(trainable, frozen)), None)  # noqa: E731
    trace = jax.make_jaxpr(lambda sums: layout.add_gradients(loss, trainable, sums)[0])(layout.zeros(trainable))
    loops = [equation for equation in trace.jaxpr.eqns if equation.primitive.name == "scan"]
    back = loops[len(loops) // 2 :]
    carried = [v.aval.shape for loop in back for v in loop.outvars[: loop.params["num_carry"]]]
    stacked = [v.aval.shape for loop in back for v in loop.outvars[loop.params["num_carry"] :]]
    sums = [x.shape for x in layout.zeros(trainable).loops]
    assert sums
    assert sorted(set(sums)) == sorted({shape for shape in carried if shape in sums})
    assert not [shape for shape in stacked if shape in sums]


@pytest.mark.slow
def test_devices_add_the_gradients_of_adapters_once_a_step() -> None:
    """Rows divided over `data`: a micro-batch exchanges only scalars, and the sums of the step are those of one
    device, under dropout too.
    """
    adapters = LoRAConfig(rank=2, dropout=0.5, targets=("q_proj", "up_proj"))  # each has noise to compile
    adapted = with_lora(Decoder(CONFIG, rngs=nnx.Rngs(0)), adapters)
    for _, node in nnx.iter_graph(adapted):
        if isinstance(node, LoRA):
            node.b[...] = 0.1 * jax.random.normal(jax.random.key(node.noise[1]), node.b.shape)

    def trained(place: Any) -> tuple[list[jax.Array], Any]:
        loss = lambda graph, params, tokens: (total(graph, params, tokens), {})  # noqa: E731
        trainer = Trainer(place_model(adapted, place), optax.sgd(1.0), loss)
        batches = [put_rows(tokens, trainer.params) for tokens in (TOKENS, TOKENS[::-1] + 1)]
        sums = trainer.gradients([MicroBatch(batch, 1.0) for batch in batches]).sums
        return jax.tree.leaves(sums), (trainer.programs, batches[0])

    (want, _), (got, of_batch) = trained(jax.devices()[0]), trained(mesh_from_config(MeshConfig(data=2, fsdp=1, tp=1)))
    for ours, alone in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-5 * np.abs(alone).max())
    hlo, plan = (pytest.importorskip(f"covey_plan.{name}") for name in ("hlo", "update_programs"))
    program = plan.gradients_program(*of_batch)
    assert max(x.bytes for x in hlo.Program(program.lower().compile().as_text()).collectives()) <= 8
