"""The head's log-probs and gradients at real widths, as the compiler for v5e leaves them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from covey.losses.logprobs import HeadConfig, chunked_logps, frozen_head_logps, vocab_block_size
from covey_plan.hlo import Program

M = 1024
GEMMA2_2B, LLAMA3_8B = (256_000, 2304, 30.0), (128_256, 4096, None)


@pytest.mark.parametrize(
    ("name", "shape", "rows", "model", "frozen", "parts"),
    [
        ("v5e:2x2", (1, 4), 2, GEMMA2_2B, True, 0),
        ("v5e:2x4", (2, 4), 8, LLAMA3_8B, True, 2),
        ("v5e:2x4", (8, 1), 8, LLAMA3_8B, False, 6),
    ],
)
def test_a_device_needs_memory_for_its_part_and_exchanges_chunks(
    topology: Callable[[str], Any], name: str, shape: tuple[int, int], rows: int, model: Any, frozen: bool, parts: int
) -> None:
    """`parts` is the scratch memory in sizes of the bfloat16 part: the part and its exchange, and for training a
    gradient, which is float32.
    """
    vocabulary, width, softcap = model
    devices = np.array(list(topology(name).devices)).reshape(shape)
    mesh = Mesh(devices, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    head = HeadConfig(0.9, softcap, jnp.bfloat16, block_size=vocab_block_size(vocabulary))
    weight = jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16, sharding=place("tp", "fsdp"))
    hidden = jax.ShapeDtypeStruct((rows, M, width), jnp.bfloat16, sharding=place("fsdp"))
    target = jax.ShapeDtypeStruct((rows, M), jnp.int32, sharding=place("fsdp"))

    def total(weight: Any, hidden: Any, target: Any) -> Any:
        fn = partial(frozen_head_logps, head, False) if frozen else partial(chunked_logps, head)
        return fn(weight, hidden, target, jnp.int32(M))[0].sum()

    trained, out = (1, place("fsdp")) if frozen else ((0, 1), (place("tp", "fsdp"), place("fsdp")))
    compiled: Any = jax.jit(jax.grad(total, trained), out_shardings=out).lower(weight, hidden, target).compile()
    collectives = Program(compiled.as_text()).collectives()
    in_loops = [x for x in collectives if x.loops]
    assert {len(x.loops) for x in in_loops} == {1}
    assert max(x.bytes for x in in_loops) == head.chunk_size * width * 4
    part = vocabulary * width * 2 // mesh.size
    assert max((x.bytes for x in collectives if not x.loops), default=0) <= 1.01 * part
    assert compiled.memory_analysis().temp_size_in_bytes < parts * 1.05 * part + 50e6
