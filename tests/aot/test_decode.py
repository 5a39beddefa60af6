"""The programs that write to the cache, as the compilers for v5e, H100 and B200 leave them."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from covey.config.schema import LoRAConfig, MeshConfig, RolloutConfig
from covey.models.config import ModelConfig
from covey.models.decoder import abstract_decoder
from covey.models.lora import with_lora
from covey.parallel.arrays import place_model
from covey.rl.rollout_worker import SamplingWeights
from covey.sampling.model_runner import Programs
from covey_plan.compiled import lower
from covey_plan.hlo import Program
from covey_plan.machines import parse_target
from covey_plan.sampler_programs import SamplerPrograms
from covey_plan.topologies import cuda_version, place_on

SLOTS, LAYERS, VOCABULARY = 64, 2, 1024
ROLLOUT = RolloutConfig(decode_chunk=8, max_new_tokens=1024, slots=SLOTS, top_k=50)


def decoder(heads: int, kv_heads: int, width: int, devices: Any, rows: int, columns: int) -> Any:
    """Graph and shapes of a decoder on the first device, or on a mesh of several."""
    config = ModelConfig(
        vocab_size=VOCABULARY, hidden_size=heads * width, intermediate_size=1024, num_layers=LAYERS, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=width, windows=(None, 512), max_positions=4096,
    )  # fmt: skip
    model = abstract_decoder(config, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    if rows * columns == 1:
        return nnx.split(place_model(model, devices[0]))
    shape = np.array(devices).reshape(rows, columns)
    return nnx.split(place_model(model, Mesh(shape, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)))


def copies(text: str, size: int) -> list[str]:
    """Lines of a program that copy or transpose an array of at least `size` elements."""
    lines = [(line.strip(), sizes) for line in text.splitlines() if " copy(" in line or " transpose(" in line
             for sizes in re.findall(r"= \w+\[([\d,]+)\]", line)]  # fmt: skip
    return [line for line, shape in lines if math.prod(map(int, shape.split(","))) >= size]


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
    graph, params = decoder(heads, kv_heads, width, topology("v5e:2x2").devices, 1, devices)
    program = SamplerPrograms(Programs(graph, (2,)), params).decode(SLOTS, time, ROLLOUT)
    compiled = program.lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    cache = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(program.args[1])) // devices
    assert cache == SLOTS * time * kv_heads * width * 2 * 2 * LAYERS // devices
    assert memory.alias_size_in_bytes >= cache
    assert copies(text, min(cache // (2 * LAYERS * 2), (heads * width) ** 2 // devices)) == []
    assert memory.temp_size_in_bytes < max(0.05 * cache, 3e6)  # a small cache is less than the activations
    gathered = [x.bytes for x in Program(text).of("all-gather")]
    assert max(gathered, default=0) < SLOTS * VOCABULARY * 4
    assert len(re.findall(r"%\w*decode_attention[\w.]* = ", text)) == LAYERS


@pytest.mark.usefixtures("topology")
@pytest.mark.skipif(cuda_version() is None, reason="JAX's plugin for CUDA is not installed")
def test_a_step_with_adapters_copies_no_weights() -> None:
    """XLA for GPUs joins products of one input. Where there are more than four, it copies their matrices together in
    each step. Those of adapters are joined once for a chunk of steps.
    """
    config = ModelConfig(VOCABULARY, 2048, 4096, LAYERS, 8, 4, 256, max_positions=4096)
    base = abstract_decoder(config, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    model: Any = nnx.eval_shape(partial(with_lora, config=LoRAConfig(rank=64)), base)
    model = place_model(model, place_on(parse_target("h200"), MeshConfig()).actor)
    graph, params = nnx.split(SamplingWeights(model).model)
    program = SamplerPrograms(Programs(graph, (2,)), params).decode(8, 512, ROLLOUT)
    made = Program(lower(program).compile().as_text()).of("copy", "fusion")
    assert [x for x in made if x.loops and any(shape.startswith("bf16[2048,") for shape in x.shapes)] == []


def test_a_mesh_draws_without_rows_of_logits(topology: Callable[[str], Any]) -> None:
    """Where nothing is cut from the distribution: the maximum, sums of 128 blocks, and best tokens."""
    graph, params = decoder(8, 4, 256, topology("v5e:2x2").devices, 1, 4)
    program = SamplerPrograms(Programs(graph, (2,)), params).decode(SLOTS, 256, replace(ROLLOUT, top_k=0))
    collectives = Program(program.lower().compile().as_text()).collectives()
    drawing = [(x.opcode, x.bytes) for x in collectives if x.shapes[0].startswith("f32")]
    exchanged = [("all-reduce", SLOTS * 4), ("all-reduce", SLOTS * 128 * 4), ("all-gather", 4 * SLOTS * 3 * 4)]
    assert drawing == exchanged


@pytest.mark.parametrize(
    ("name", "rows", "columns", "kv_heads", "width", "prompt"),
    [
        ("v5e:2x2", 1, 1, 2, 64, 200),
        ("v5e:2x2", 1, 1, 8, 128, 256),
        ("v5e:2x2", 1, 4, 4, 256, 256),
        ("v5e:2x2", 2, 2, 8, 128, 256),
        ("h100", 1, 1, 8, 128, 256),
        ("b200", 1, 1, 8, 128, 256),
    ],
)
def test_admitting_prompts_copies_no_cache(
    topology: Callable[[str], Any], name: str, rows: int, columns: int, kv_heads: int, width: int, prompt: int
) -> None:
    """The cache is written in place, a slot at a time: nothing else is as large as the prompts in all slots."""
    if not name.startswith("v5e"):
        if cuda_version() is None:
            pytest.skip("JAX's plugin for CUDA is not installed")
        there = [place_on(parse_target(name), MeshConfig()).actor]
    else:
        there = topology(name).devices
    graph, params = decoder(8, kv_heads, width, there, rows, columns)
    program = SamplerPrograms(Programs(graph, (2,)), params).admit(SLOTS, 2048, 8, prompt, ROLLOUT)
    compiled = lower(program).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    row = kv_heads * width * 2 // columns
    cache = SLOTS // rows * 2048 * row * 2 * LAYERS
    assert memory.alias_size_in_bytes >= cache
    assert copies(text, SLOTS // rows * prompt * row // 2) == []
    assert memory.temp_size_in_bytes < 0.01 * cache + 8 * prompt * row * 2 * LAYERS
    writes = Program(text).of("fusion", "dynamic-update-slice")
    written = [x for x in writes if x.bytes >= cache // (2 * LAYERS)]
    assert [x.loops for x in written] == [(None,)] * 2 * LAYERS  # as often as prompts are inserted


@pytest.mark.parametrize(
    ("rows", "columns", "kv_heads", "width"), [(1, 1, 2, 64), (1, 1, 4, 128), (2, 2, 8, 128), (1, 4, 8, 256)]
)
def test_appending_tokens_copies_no_cache(
    topology: Callable[[str], Any], rows: int, columns: int, kv_heads: int, width: int
) -> None:
    """The tokens of a response are written in place too: what is copied is at most one slot."""
    graph, params = decoder(8, kv_heads, width, topology("v5e:2x2").devices, rows, columns)
    programs = Programs(graph, (2,))
    cache = SamplerPrograms(programs, params).decode(SLOTS, 2048, ROLLOUT).args[1]
    numbers = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    slots, tokens = numbers((SLOTS,)), numbers((SLOTS, 64))
    compiled = programs.append.lower(params, cache, slots, tokens, slots, slots, numbers(())).compile()
    block = SLOTS // rows * 2048 * kv_heads // columns * width
    assert copies(compiled.as_text(), block) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * LAYERS * block * 2
    assert compiled.memory_analysis().temp_size_in_bytes < LAYERS * block
