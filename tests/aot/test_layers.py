"""Projections split over the devices of a mesh, as the compiler for v5e leaves them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from covey.models.config import ModelConfig
from covey.models.decoder import rngs_for_shapes
from covey.models.layers import MLP, Linear
from covey.plan.hlo import Program

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
