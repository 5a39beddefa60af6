"""What tests of this room share: a tiny decoder, random groups, and the inputs of a loss on them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from flax import nnx

from covey.configs import LoRAConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import with_lora
from covey.rl.losses import LossInputs, sequence_mean
from covey.rl.rows import Rows, lay, spread
from covey.types import Completion, FinishReason, Group

CONFIG = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    tie_embeddings=True, windows=(None, 6), final_softcap=30.0,
)  # fmt: skip

GroupsOf = Callable[..., list[Group]]


@pytest.fixture
def decoder() -> Callable[..., Decoder]:
    """`decoder(lora=0, **switches)`: always the same random weights; adapters with a B that is not zero."""

    def make(lora: int = 0, **switches: object) -> Decoder:
        model = Decoder(CONFIG, rngs=nnx.Rngs(0), **switches)  # type: ignore[arg-type]
        if lora:
            model = with_lora(model, LoRAConfig(rank=lora))
            noise = np.random.default_rng(5)
            for layer in model.layers:
                for linear in (layer.attn.q_proj, layer.mlp.down_proj):
                    linear.lora.b[...] = noise.normal(size=linear.lora.b.shape, scale=0.05).astype(np.float32)
        return model

    return make


@pytest.fixture
def groups_of() -> GroupsOf:
    """`groups_of([(prompt length, [completion lengths])], seed=0)`: random tokens."""

    def make(shapes: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> list[Group]:
        rng = np.random.default_rng(seed)
        draw = lambda n: rng.integers(0, 300, n).astype(np.int32)  # noqa: E731
        logps = lambda n: -rng.random(n).astype(np.float32)  # noqa: E731
        return [
            Group("p", draw(p), tuple(Completion(draw(n), logps(n), logps(n), FinishReason.STOP) for n in sizes))
            for p, sizes in shapes
        ]

    return make


@pytest.fixture
def inputs_for() -> Callable[..., LossInputs]:
    """`inputs_for(rows, lengths, ref=True)`: random advantages, references and the weights of the sequence mean."""

    def make(rows: Rows, lengths: Sequence[int], ref: bool = True) -> LossInputs:
        rng = np.random.default_rng(1)
        advantages = rng.normal(size=len(lengths))
        sampled = [rng.normal(size=n) - 5 for n in lengths]
        references = [rng.normal(size=n) - 5 for n in lengths]
        weights, _ = sequence_mean(np.array(lengths), max(lengths))
        return LossInputs(
            advantage=spread(rows, advantages),
            weight=spread(rows, weights),
            sampled=lay(rows, sampled),
            beta=np.full((len(rows.tokens), 1), 0.04, np.float32),
            ref_logps=lay(rows, references) if ref else None,
        )

    return make
