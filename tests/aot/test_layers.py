"""Projections split over the devices of a mesh, and layers in an update, as the compiler for v5e leaves them."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, LoRAConfig
from covey.models.config import ModelConfig
from covey.models.decoder import abstract_decoder, rngs_for_shapes
from covey.models.layer_kinds import layer_shapes
from covey.models.layer_stack import stack_layers
from covey.models.layers import MLP, Linear
from covey.models.lora import with_lora
from covey.parallel.arrays import place_model, rows_placement
from covey.rl.batches import policy_loss_fn
from covey.sampling.logits import SamplingParams
from covey.train.programs import UpdatePrograms
from covey_plan.hlo import Program
from covey_plan.programs import abstract_policy_batch
from covey_plan.update_programs import abstract_rows, gradients_program

ROWS, TIME, WIDTH = 2, 1024, 2304


def test_devices_add_their_parts_of_a_product_in_its_own_type(topology: Callable[[str], Any]) -> None:
    """One sum forward, of the product; one backward, of the gradients of what two projections share: in bfloat16, for
    float32 would move twice as much.
    """
    mesh = Mesh(np.array(topology("v5e:2x2").devices).reshape(1, 4), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    config = ModelConfig(10, WIDTH, 4 * WIDTH, 1, 8, 4, 256)
    make = lambda: MLP(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs_for_shapes())  # noqa: E731
    mlp = nnx.eval_shape(make)
    for _, linear in nnx.iter_graph(mlp):
        if isinstance(linear, Linear):
            linear.platform = "tpu"
    graph, state = nnx.split(mlp)

    def shape(x: Any, *axes: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    narrows = lambda path: "down_proj" in jax.tree_util.keystr(path)  # noqa: E731
    placed = jax.tree.map_with_path(lambda path, x: shape(x, *(("tp",) if narrows(path) else (None, "tp"))), state)
    x = shape(jax.ShapeDtypeStruct((ROWS, TIME, WIDTH), jnp.bfloat16))

    def run(state: Any, x: Any, grad: Any) -> Any:
        out, pull = jax.vjp(lambda x: nnx.merge(graph, state)(x), x)
        return out, *pull(grad)

    compiled = jax.jit(run, out_shardings=x.sharding).lower(placed, x, x).compile()
    sums = Program(compiled.as_text()).of("all-reduce")
    assert [shape for one in sums for shape in one.shapes] == [f"bf16[{ROWS},{TIME},{WIDTH}]"] * 2


def test_an_update_attends_once_in_a_layer_and_copies_no_layer_of_a_stack(topology: Callable[[str], Any]) -> None:
    """The whole program of the gradients of adapters: kernels are read where they lie in their stacks."""
    config = ModelConfig(1024, 1024, 2048, 3, 8, 4, 128)
    base = abstract_decoder(config, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    model = nnx.eval_shape(partial(with_lora, config=LoRAConfig(rank=16)), base)
    model = stack_layers(place_model(model, topology("v5e:2x2").devices[0]))
    loss = policy_loss_fn(algorithm_of(GRPOConfig(beta=0.0)), SamplingParams())
    programs = UpdatePrograms(model, optax.sgd(1.0), loss)
    rows = abstract_rows(1, 640, rows_placement(programs.trainable))
    batch = abstract_policy_batch(rows, old_logps=False, ref_logps=False, keys=False)
    text = gradients_program(programs, batch).lower().compile().as_text()
    assert sorted(re.findall(r"%\w*tree_attention_(\w+?)_*(?:\.\d+)? = ", text)) == ["dkv", "dq", "forward"]
    shapes = [shape for path, shape in layer_shapes(config, 0).items() if path.endswith(".kernel")]
    kernels = {f"bf16[{n_in},{n_out}]" for n_in, n_out in shapes}
    made = Program(text).of("copy", "dynamic-slice", "fusion")
    assert [x for x in made if x.loops == (config.num_layers,) and kernels & set(x.shapes)] == []
