"""A chunk of decode steps, as the compiler for v5e leaves it."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from covey.config.schema import RolloutConfig
from covey.models.config import ModelConfig
from covey.models.decoder import abstract_decoder
from covey.parallel.sharding import place_model
from covey.plan.hlo import Program
from covey.sampling.programs import Programs

SLOTS, LAYERS = 64, 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "time", "devices"),
    [(14, 2, 64, 2048, 1), (32, 8, 128, 2048, 1), (8, 4, 256, 2048, 1), (32, 8, 128, 2048, 4), (8, 4, 256, 256, 4)],
)
def test_decoding_writes_to_the_cache_in_place(
    topology: Callable[[str], Any], heads: int, kv_heads: int, width: int, time: int, devices: int
) -> None:
    """No copy of it or of a kernel of queries, in the loop or around it, and little memory beside it. On a mesh each
    device has some heads, and none gathers the logits.
    """
    config = ModelConfig(
        vocab_size=1024, hidden_size=heads * width, intermediate_size=1024, num_layers=LAYERS, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=width, windows=(None, 512), max_positions=4096,
    )  # fmt: skip
    kinds = {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16}
    there = topology("v5e:2x2").devices
    mesh = Mesh(np.array(there).reshape(1, 4), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    model = place_model(abstract_decoder(config, **kinds), there[0] if devices == 1 else mesh)
    graph, params = nnx.split(model)
    rollout = RolloutConfig(decode_chunk=8, max_new_tokens=1024, slots=SLOTS, top_k=50)
    program = Programs(graph, (2,)).decode_program(params, SLOTS, time, rollout)
    compiled = program.lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    cache = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(program.args[1])) // devices
    assert cache == SLOTS * time * kv_heads * width * 2 * 2 * LAYERS // devices
    assert memory.alias_size_in_bytes >= cache
    sizes = [(line.strip(), sizes) for line in text.splitlines() if " copy(" in line or " transpose(" in line
             for sizes in re.findall(r"= \w+\[([\d,]+)\]", line)]  # fmt: skip
    block = cache // (2 * LAYERS * 2)
    queries = config.hidden_size * heads * width // devices
    assert [line for line, shape in sizes if math.prod(map(int, shape.split(","))) >= min(block, queries)] == []
    assert memory.temp_size_in_bytes < max(0.05 * cache, 3e6)  # a small cache is less than the activations
    gathered = [x.bytes for x in Program(text).of("all-gather")]
    assert max(gathered, default=0) < SLOTS * config.vocab_size * 4
    assert len(re.findall(r"%\w*decode_attention[\w.]* = ", text)) == LAYERS
