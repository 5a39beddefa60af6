"""Both forms of the layers: what goes into stacks comes out again, and what is shared stays shared."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.layer_stack import LayerStacks, stack_layers, stack_models, unstack_layers
from covey.models.lora import adapters_change_base, apply_lora_dropout, split_trainable, with_lora, without_lora
from covey.models.value_model import ValueModel, make_value_model
from covey.parallel import flatten
from covey.parallel.arrays import build_for_devices

CONFIG = ModelConfig(
    vocab_size=20, hidden_size=8, intermediate_size=16, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=4
)
SOME = LoRAConfig(rank=2, dropout=0.5, targets=(r"layers\.[123]\..*",))


def on_tpu(model: Any) -> Any:
    return build_for_devices(model, "tpu")


def adapted() -> Decoder:
    return on_tpu(with_lora(Decoder(CONFIG, rngs=nnx.Rngs(0)), SOME))


def arrays(model: nnx.Module) -> dict[str, Any]:
    return flatten(nnx.split(model)[1])


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_runs_of_like_layers_become_stacks_and_come_back() -> None:
    model = adapted()
    stacked = stack_layers(model)
    assert stacked.stacked == (1, 3)
    assert stacked.layer_runs() == [range(1), range(1, 4)]
    assert arrays(stacked)["layers.1.attn.q_proj.lora.a"].shape == (3, 8, 2)
    back = unstack_layers(stacked)
    assert nnx.split(back)[0] == nnx.split(model)[0]
    same(arrays(back), arrays(model))
    assert stack_layers(stacked) is stacked
    assert stack_layers(build_for_devices(model, "cuda")).stacked == (1, 3)
    on_cpu = build_for_devices(model, "cpu")
    assert stack_layers(on_cpu) is on_cpu
    with pytest.raises(AssertionError, match="unstack_layers"):
        stacked(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32), lambda *_: None, [None] * 4)


@pytest.mark.slow
def test_states_of_a_value_model_are_converted_where_they_are_nested() -> None:
    model = on_tpu(with_lora(make_value_model(Decoder(CONFIG, rngs=nnx.Rngs(0))), SOME))
    trained = split_trainable(stack_layers(model))[1]
    stacks, tree = LayerStacks(stack_layers(model)), {"moments": [trained], "count": np.zeros(2)}
    listed = stacks.unstack(tree)
    assert isinstance(model, ValueModel)
    same(flatten(listed["moments"][0]), flatten(split_trainable(model)[1]))
    same(flatten(stacks.stack(listed)), flatten(tree))


@pytest.mark.slow
def test_models_that_share_arrays_share_stacks() -> None:
    actor = adapted()
    one, other = map(arrays, stack_models([actor, on_tpu(without_lora(actor))]))
    pointer = lambda x: x.unsafe_buffer_pointer()  # noqa: E731
    assert pointer(one["embed.embedding"]) == pointer(other["embed.embedding"])
    whole = stack_models([base := on_tpu(Decoder(CONFIG, rngs=nnx.Rngs(0))), base])
    assert list(map(pointer, arrays(whole[0]).values())) == list(map(pointer, arrays(whole[1]).values()))


@pytest.mark.slow
def test_adapters_in_stacks_are_those_of_the_layers() -> None:
    model = adapted()
    stacked = stack_layers(model)
    assert not adapters_change_base(stacked)
    assert arrays(without_lora(stacked)).keys() == {name for name in arrays(stacked) if ".lora." not in name}
    dropped = [flatten(apply_lora_dropout(*nnx.split(unstack_layers(x)), 3)) for x in (adapted(), model)]
    graph, state = nnx.split(stacked)
    same(flatten(LayerStacks(stacked).unstack(apply_lora_dropout(graph, state, 3))), dropped[0])
    same(dropped[1], dropped[0])
