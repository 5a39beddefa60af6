"""What the compiler makes of the actor's gradient on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.losses.logprobs import token_logps
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, with_lora
from covey.packing.rows import Rows
from covey.parallel import make_mesh, row_sharding, shardings
from covey_plan.hlo import Program

R, T, V, D = 4, 64, 8192, 32
CONFIG = ModelConfig(
    vocab_size=V, hidden_size=D, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8,
    tie_embeddings=True,
)  # fmt: skip


def gradient_program(shape: tuple[int, int], rank: int) -> Program:
    """Gradient of the log-probs in the trainable weights, on a mesh (fsdp, tp), from shapes alone."""

    def build() -> Decoder:
        model = Decoder(CONFIG, rngs=nnx.Rngs(0))
        return with_lora(model, LoRAConfig(rank=rank)) if rank else model

    mesh = make_mesh(shape)
    graph, *parts = split_trainable(nnx.eval_shape(build))
    sharded = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
    trainable, frozen = (jax.tree.map(sharded, part, shardings(part, mesh)) for part in parts)
    index = jax.ShapeDtypeStruct((R, T), jnp.int32, sharding=row_sharding(mesh))
    rows = Rows(*[index] * 7, jax.ShapeDtypeStruct((R, T, 2), jnp.int32, sharding=row_sharding(mesh)))

    def loss(trainable: Any, frozen: Any, rows: Rows) -> jax.Array:
        params = nnx.merge_state(trainable, frozen)
        return token_logps(graph, params, rows, 0.9, entropy_gradient=False).logps.sum()

    places = jax.tree.map(lambda x: x.sharding, trainable)
    return Program(jax.jit(jax.grad(loss), out_shardings=places).lower(trainable, frozen, rows).compile().as_text())


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rank"), [((1, 4), 4), ((2, 2), 0), ((4, 1), 0)])
def test_embedding_and_gradients_stay_divided(shape: tuple[int, int], rank: int) -> None:
    """The embedding, as the input table and as the head: no device has more of it than its piece or its part of the
    vocabulary, and in loops only hidden states, layers and sums per token move, and nothing in the loop over blocks of
    the vocabulary. Of the gradients of all layers a device has its piece.
    """
    program, (fsdp, tp) = gradient_program(shape, rank), shape
    too_large = {f"f32[{v},{d}]" for v in (V, V // tp) for d in (D, D // fsdp)} - {f"f32[{V // tp},{D // fsdp}]"}
    kernels, n = [(D, D), (D, 64), (64, D)], CONFIG.num_layers
    pieces = {f"f32[{n},{a // p},{b // q}]" for a, b in kernels for p, q in ((fsdp, tp), (tp, fsdp))}
    whole = {f"f32[{n},{a // p},{b // q}]" for a, b in kernels for p, q in ((1, 1), (1, tp), (tp, 1))} - pieces
    found = {shape for x in program.instructions for shape in x.shapes}
    assert rank or pieces & found
    assert not (too_large | (set() if rank else whole)) & found
    moved = [x for x in program.collectives() if x.loops]
    assert {len(x.loops) for x in moved} == {1}
    query_key_value_grads, layer = R * T // fsdp * (3 * D + 5 * rank), 4 * D * D + 3 * D * 64 + 2 * D + 1
    assert max(x.bytes for x in moved) <= 4 * max(query_key_value_grads, 0 if rank else layer, R * T * D)
    exchanged = [x.bytes for x in program.collectives() if x.opcode == "all-to-all" and x.bytes >= V * D]
    assert exchanged == [V * D * 4 // 4] * (2 if fsdp > 1 else 0)
