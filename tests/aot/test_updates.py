"""Sums of a compiled update: none in bfloat16, and none that a GPU adds up in any order."""

import re
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, LoRAConfig, MeshConfig
from covey.models.config import ModelConfig
from covey.models.decoder import abstract_decoder
from covey.models.layer_stack import stack_layers
from covey.models.lora import with_lora
from covey.packing.rows import abstract_rows
from covey.parallel.arrays import place_model, rows_placement
from covey.rl.batches import policy_loss_fn
from covey.sampling.logits import SamplingParams
from covey.train.programs import UpdatePrograms
from covey_plan.compiled import lower
from covey_plan.machines import parse_target
from covey_plan.programs import abstract_policy_batch
from covey_plan.topologies import cuda_version, place_on

SUM = re.compile(r"= (?P<shape>\([^()]*\)|\S+) (?P<name>reduce|scatter)\((?P<rest>.*)")


@pytest.mark.usefixtures("topology")
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("name", ["v5e:2x2", "h200"])
def test_an_update_rounds_no_partial_sum_and_scatters_to_different_places(name: str, rank: int) -> None:
    """Of all weights (rank 0) or adapters, in bfloat16. An atomic addition is a scatter of equal indices."""
    if name == "h200" and cuda_version() is None:
        pytest.skip("JAX's plugin for CUDA is not installed")
    mesh = MeshConfig(fsdp=4 if name.startswith("v5e") else 1)
    config = ModelConfig(4096, 512, 1024, 2, 4, 2, 128, tie_embeddings=False)
    model: Any = abstract_decoder(config, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    if rank:
        model = nnx.eval_shape(partial(with_lora, config=LoRAConfig(rank=rank)), model)
    model = stack_layers(place_model(model, place_on(parse_target(name), mesh).actor))
    loss = policy_loss_fn(algorithm_of(GRPOConfig(beta=0.0)), SamplingParams())
    programs = UpdatePrograms(model, optax.sgd(1.0), loss)
    rows = abstract_rows(4, 640, rows_placement(programs.trainable))
    batch = abstract_policy_batch(rows, old_logps=False, ref_logps=False, keys=False)
    text = lower(programs.gradients_program(batch)).compile().as_text()
    sums = [match.groupdict() for match in SUM.finditer(text) if re.search("f32|bf16", match["shape"])]
    assert {one["name"] for one in sums} == ({"reduce"} if rank else {"reduce", "scatter"})
    assert [one for one in sums if one["name"] == "scatter" and "unique_indices=true" not in one["rest"]] == []
    assert [one for one in sums if one["name"] == "reduce" and "bf16" in one["shape"]] == []
