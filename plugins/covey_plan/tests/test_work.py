"""Work is counted right: flops and bytes by hand, and as XLA counts them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, with_lora
from covey.packing.rows import GroupShape
from covey_plan.work import decoding, forward, training

MODEL = ModelConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=16,
    tie_embeddings=True,
)  # fmt: skip
SMALL = ModelConfig(
    vocab_size=100, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
IN_KERNELS = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 12  # q, k and v, o, the MLP's three


def group_of(prompt, *lengths):
    return GroupShape(prompt, lengths, (None,) * len(lengths))


def test_flops_of_a_group_by_hand():
    # The prompt's 3 tokens once, and 3 + 1 of the completions: of each the last is not fed.
    pairs = (1 + 2 + 3) + (4 + 5 + 6) + 4
    found = forward(SMALL, [group_of(3, 4, 2)])
    assert found.projections == 2 * 2 * 7 * IN_KERNELS
    assert found.attention == 2 * (4 * 4 * 4) * pairs  # layers; scores and mixture, 2 · heads · width each
    assert found.head == 2 * 6 * 100 * 8
    assert found.adapters == 0


def test_a_window_hides_pairs():
    windowed = replace(SMALL, windows=(2, None))
    near, far = (1 + 2 + 2) + (2 + 2 + 2) + 2, (1 + 2 + 3) + (4 + 5 + 6) + 4
    assert forward(windowed, [group_of(3, 4, 2)]).attention == 64 * (near + far)


def test_heads_of_a_layer_have_their_own_number_and_width():
    wide = replace(SMALL, windows=(2, None), layer_heads=((2, 4), (1, 8)))  # keys of the second layer: 1 head of 8
    near, far = (1 + 2 + 2) + (2 + 2 + 2) + 2, (1 + 2 + 3) + (4 + 5 + 6) + 4
    assert forward(wide, [group_of(3, 4, 2)]).attention == 4 * 4 * (4 * near + 8 * far)
    read = [decoding(config, [(10, 1)] * 8, 8)[1] for config in (wide, replace(wide, layer_heads=((2, 4), (1, 4))))]
    assert read[0] - read[1] >= 4 * 2 * 4 * 11 * 8


def test_empty_completions_and_no_groups_are_no_work():
    assert sum(forward(SMALL, [])) == 0
    assert forward(SMALL, [group_of(3, 0)]).projections == 2 * 2 * 3 * IN_KERNELS


def test_backward_costs_twice_the_forward_and_less_under_adapters():
    groups = [group_of(3, 4, 2), group_of(5, 1)]
    work = forward(SMALL, groups, rank=2)
    sides = (8 + 16) + 2 * (8 + 8) + (16 + 8) + 3 * (8 + 12)
    assert work.adapters == 2 * 2 * 12 * 2 * sides
    assert training(SMALL, groups) == 3 * sum(forward(SMALL, groups))
    of_the_first_inputs = 2 * 12 * (8 * 16 + 2 * 8 * 8 + 3 * 8 * 2)
    frozen, trained = work.projections + work.head, work.adapters + work.attention
    assert training(SMALL, groups, rank=2) == 2 * frozen + 3 * trained - of_the_first_inputs


def test_a_decode_step_reads_the_weights_once_and_the_cache_it_sees():
    flops, read = decoding(SMALL, [(10, 1)] * 8, 8)
    weights, seen = 2 * IN_KERNELS + 100 * 8, 11 * 8
    assert flops == 8 * 2 * weights + 2 * 64 * seen
    assert read == 4 * (weights + 2 * 2 * (2 * 4) * seen)
    assert decoding(SMALL, [(10, 4)] * 8, 8)[0] == sum(decoding(SMALL, [(n, 1)] * 8, 8)[0] for n in range(10, 14))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_counted_flops_are_those_that_xla_counts(rank):
    """Of a plain causal pass, before XLA changes anything. It counts the pairs that are masked too, and element by
    element the rest: less than 2 per cent at this width.
    """
    length, c = 65, MODEL
    model = Decoder(c, rngs=nnx.Rngs(0), remat=False)
    graph, trained, frozen = split_trainable(with_lora(model, LoRAConfig(rank=rank)) if rank else model)

    def total(trained, tokens):
        model = nnx.merge(graph, trained, frozen)
        positions, spelt_out = jnp.arange(length - 1)[None], [None] * c.num_layers  # of a loop it counts one turn
        hidden, _ = model(
            tokens[:, :-1], positions, causal_attention(jnp.ones((1, length - 1), bool), positions), spelt_out
        )
        logps = jax.nn.log_softmax(model.logits(hidden))
        return jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1).sum()

    counted = jax.jit(jax.grad(total)).lower(trained, jnp.zeros((1, length), jnp.int32)).cost_analysis()["flops"]
    work = training(c, [group_of(1, length - 1)], rank)
    hidden_pairs = (length - 1) * (length - 2) // 2 - (length - 2)
    assert counted == pytest.approx(work + 3 * c.num_layers * 4 * 4 * 16 * hidden_pairs, rel=0.03)
