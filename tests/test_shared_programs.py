"""What the suite's time depends on: runs of models that are alike call the same jitted functions."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig, OptimizerConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.lora import with_lora
from covey.sampling.model_runner import Programs
from covey.train.optimizers import make_optimizer
from covey.train.programs import UpdatePrograms

CONFIG = ModelConfig(
    vocab_size=37, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
    tie_embeddings=True,
)  # fmt: skip


def adapted() -> Decoder:
    return nnx.eval_shape(lambda: with_lora(abstract_decoder(CONFIG), LoRAConfig(rank=2)))


def loss(graph: Any, params: Any, batch: Any) -> Any:
    return jnp.zeros(()), {}


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("model", [lambda: abstract_decoder(CONFIG), adapted])
def test_models_that_are_alike_share_their_programs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them: what is unlike, be it by one attribute, is traced and compiled again in every run."""
    jitted, jit = list[Any](), jax.jit
    monkeypatch.setattr(jax, "jit", lambda *args, **options: jitted.append(jit(*args, **options)) or jitted[-1])
    for _ in range(2):
        UpdatePrograms(model(), make_optimizer(OptimizerConfig(), 2), loss)
        Programs(nnx.graphdef(model()), (2,))
    count = len(jitted) // 2
    assert count > 12
    assert [one for one, other in zip(jitted[:count], jitted[count:], strict=True) if one is not other] == []
