"""Sums of a compiled update: none in bfloat16, and none that a GPU adds up in any order. Loops of a recurrent one."""

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
from covey.parallel.arrays import place_model, rows_placement
from covey.rl.batches import policy_loss_fn
from covey.sampling.logits import SamplingParams
from covey.train.programs import UpdatePrograms
from covey_plan.compiled import lower
from covey_plan.hlo import Program
from covey_plan.machines import parse_target
from covey_plan.programs import abstract_policy_batch
from covey_plan.topologies import cuda_version, place_on
from covey_plan.update_programs import abstract_rows, gradients_program

SUM = re.compile(r"= (?P<shape>\([^()]*\)|\S+) (?P<name>reduce|scatter)\((?P<rest>.*)")


MACHINES = pytest.mark.parametrize("name", ["v5e:2x2", "h200"])


@pytest.mark.usefixtures("topology")
@pytest.mark.parametrize("rank", [0, 16])
@MACHINES
def test_an_update_rounds_no_partial_sum_and_scatters_to_different_places(name: str, rank: int) -> None:
    """Of all weights (rank 0) or adapters, in bfloat16. An atomic addition is a scatter of equal indices."""
    config = ModelConfig(4096, 512, 1024, 2, 4, 2, 128, tie_embeddings=False)
    text = compiled_gradients(config, name, rank, 640)
    sums = [match.groupdict() for match in SUM.finditer(text) if re.search("f32|bf16", match["shape"])]
    assert {one["name"] for one in sums} == ({"reduce"} if rank else {"reduce", "scatter"})
    assert [one for one in sums if one["name"] == "scatter" and "unique_indices=true" not in one["rest"]] == []
    assert [one for one in sums if one["name"] == "reduce" and "bf16" in one["shape"]] == []


@pytest.mark.usefixtures("topology")
@MACHINES
def test_delta_nets_are_trained_without_a_loop_over_tokens(name: str) -> None:
    """A row of 512 tokens has room for 22 pieces. They are the longest loop; the one without a known length is that of
    the head, over blocks of tokens, and there alone it is that of any model.
    """
    pytest.importorskip("covey_families")
    from covey_families.settings import DeltaSettings
    from covey_families.trees import PIECE, num_pieces

    pieces = num_pieces(512, PIECE, has_branches=False)
    config = ModelConfig(
        1024, 256, 512, 4, 2, 2, 128, family="qwen3_5_text", rotary_dim=32, attention_gate=True, tie_embeddings=True,
        mixers=("delta_net", "delta_net", "delta_net", "attention"), kind_settings=DeltaSettings(4, 4, 64, 64),
    )  # fmt: skip
    loops = {one.loops for one in Program(compiled_gradients(config, name, 16, 512)).instructions}
    assert max(trips for each in loops for trips in each if trips is not None) == pieces
    assert {each for each in loops if None in each} <= {(None,)}


def compiled_gradients(config: ModelConfig, name: str, rank: int, time: int) -> str:
    """Return the text of the gradients of four rows, of all weights or of adapters."""
    if name == "h200" and cuda_version() is None:
        pytest.skip("JAX's plugin for CUDA is not installed")
    mesh = MeshConfig(fsdp=4 if name.startswith("v5e") else 1)
    model: Any = abstract_decoder(config, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    if rank:
        model = nnx.eval_shape(partial(with_lora, config=LoRAConfig(rank=rank)), model)
    model = stack_layers(place_model(model, place_on(parse_target(name), mesh).actor))
    loss = policy_loss_fn(algorithm_of(GRPOConfig(beta=0.0)), SamplingParams())
    programs = UpdatePrograms(model, optax.sgd(1.0), loss)
    rows = abstract_rows(4, time, rows_placement(programs.trainable))
    batch = abstract_policy_batch(rows, old_logps=False, ref_logps=False, keys=False)
    text: str = lower(gradients_program(programs, batch)).compile().as_text()
    return text
