"""Updates layer by layer: the bits of one program of all weights, and programs that do not grow with the layers."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig, OptimizerConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.layer_stack import stack_layers
from covey.models.lora import split_trainable, with_lora
from covey.models.value_model import make_value_model
from covey.parallel.arrays import build_for_devices, place_model
from covey.parallel.mesh import make_mesh
from covey.parallel.shapes import abstract
from covey.train.optimizers import make_optimizer
from covey.train.programs import LayerUpdates, UpdatePrograms, WholeUpdate

SHAPE = ModelConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8,
    tie_embeddings=True,
)  # fmt: skip
ADAMW = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.5, warmup_ratio=0.0)
APART = replace(ADAMW, embedding_learning_rate=0.02)
ADAPTERS = LoRAConfig(rank=2, targets=("q_proj", "up_proj"))


def decoder(layers: int = 3, dtype: str = "float32") -> Decoder:
    return Decoder(replace(SHAPE, num_layers=layers), rngs=nnx.Rngs(0), param_dtype=dtype)


MODELS: dict[str, Callable[[], nnx.Module]] = {
    "full": lambda: decoder(2, "bfloat16"),
    "lora": lambda: with_lora(decoder(), ADAPTERS),
    "critic": lambda: with_lora(make_value_model(decoder()), ADAPTERS),
}


AS_IN_A_RUN = {"xla_cpu_use_fusion_emitters": True} if "emitters" in os.environ["XLA_FLAGS"] else {}
"""Other tests run without them; a weight in some hundreds then has another last bit."""


def updates_of(model: nnx.Module, optimizer: optax.GradientTransformation) -> UpdatePrograms:
    return UpdatePrograms(model, optimizer, lambda *_: None)  # type: ignore[arg-type, return-value]


def moved(programs: UpdatePrograms, update: Any, weights: Any, sums: Any) -> Any:
    """Weights and state behind three updates, in which the first gradients are larger than those behind them."""
    trainable = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), weights)
    state = update.init(trainable)
    for step, scale in enumerate((0.5, 0.25, 1e-3)):
        trainable, state = update.apply(trainable, state, sums, scale, programs.learning_rates(step))
    return trainable, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "mesh"),
    [
        ("lora", ADAMW, (2, 2)),
        ("critic", ADAMW, None),  # the head is the only weight outside of layers
        ("full", APART, None),  # the last norm's scale is the only weight of its group outside of layers
    ],
    ids=["lora on a mesh", "critic", "groups apart"],
)
def test_layers_are_updated_to_the_bits_of_one_program(
    kind: str, config: Any, mesh: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=AS_IN_A_RUN))
    model = place_model(MODELS[kind](), make_mesh(mesh) if mesh else jax.devices()[0])
    optimizer, trainable = make_optimizer(config, 8), split_trainable(model)[1]
    programs = updates_of(model, optimizer)
    rng = np.random.default_rng(0)
    zeros = programs.zeros(trainable)
    sums = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding), zeros)
    layers = programs.update
    whole = WholeUpdate(optimizer, programs.layout, programs.trainable, abstract(programs.init(trainable)))
    assert isinstance(layers, LayerUpdates)
    got, wanted = (moved(programs, update, trainable, sums) for update in (layers, whole))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_programs_do_not_grow_with_the_layers() -> None:
    def count(layers: int, adapters: LoRAConfig | None) -> int:
        model = decoder(layers)
        programs = updates_of(with_lora(model, adapters) if adapters else model, make_optimizer(ADAMW, 8))
        return len({part.program for part in programs.update.parts})

    assert [count(layers, ADAPTERS) for layers in (2, 5)] == [1, 1]
    assert [count(layers, None) for layers in (2, 5)] == [2, 2]


def test_a_transformation_of_a_user_and_stacks_have_one_program() -> None:
    """A user's transformation may need all weights at once; stacks have few kernels, however many layers there are."""
    stacked = stack_layers(build_for_devices(decoder(), "tpu"))
    for model, optimizer in ((decoder(), optax.lamb(0.1)), (stacked, make_optimizer(ADAMW, 8))):
        assert isinstance(updates_of(model, optimizer).update, WholeUpdate)
