"""Qwen3.5 and Gemma 4 on bases of 8 and 4 bits: adapters above them have the logits and gradients that they have above
a base of the same numbers in float32.
"""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.models.attention import causal_attention
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.layers import LoRA
from covey.models.loading.weights import fill_parameters, make_put
from covey.models.lora import projections, split_trainable, with_lora
from covey.parallel import flatten
from covey_quantised.kernels import QuantisationFormat, dequantise

HERE = Path(__file__).parent
QWEN = runpy.run_path(str(HERE / "test_qwen3_5.py"))["load"]
GEMMA = runpy.run_path(str(HERE / "test_gemma4.py"))["golden"]
BASES: dict[str, Any] = {"qwen3_5": (lambda: QWEN(3), 16), "gemma4": (lambda: GEMMA("one-width"), 4)}
TOKENS = np.random.RandomState(3).randint(0, 61, (2, 24))


def tensors_of(model: Decoder) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in flatten(nnx.state(model)).items()}


def adapted(base: Decoder) -> Decoder:
    """The same adapters on any base."""
    model, rng = with_lora(base, LoRAConfig(rank=2)), np.random.default_rng(0)
    for _, lora in sorted((str(path), x) for path, x in nnx.iter_graph(model) if isinstance(x, LoRA)):
        lora.b[...] = jnp.asarray(rng.normal(size=lora.b.shape, scale=0.1), jnp.float32)
    return model


@partial(jax.jit, static_argnums=0)
def run(graph: Any, trained: Any, rest: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    def loss(trained: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, trained, rest)
        attend = causal_attention(jnp.ones(TOKENS.shape, bool), positions)
        logits = model.logits(model(jnp.asarray(TOKENS), positions, attend)[0])
        return jnp.sin(logits).mean(), logits

    return jax.grad(loss, has_aux=True)(trained)


def logits_and_gradients(model: Decoder) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    gradients, logits = run(*split_trainable(model))
    return np.asarray(logits), {path: np.asarray(x) for path, x in flatten(gradients).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "bound"), [("qwen3_5", "int8", 0.1), ("qwen3_5", "nf4", 0.7), ("gemma4", "nf4", 0.7)]
)
def test_adapters_on_a_quantised_base_compute_what_they_do_on_its_numbers(family: str, kind: Any, bound: float) -> None:
    make, block = BASES[family]
    exact, how = make(), QuantisationFormat(kind, block)
    abstract = abstract_decoder(exact.config, how)
    tensors = tensors_of(exact)
    base = fill_parameters(abstract, how.tensors(iter(tensors.items())), make_put(abstract, None))
    stored = {path: linear.kernel for path, linear in projections(base).items()}
    numbers = {f"{path}.kernel": dequantise(k.values[...], k.scales[...], k.kind) for path, k in stored.items()}
    plain = abstract_decoder(exact.config)
    rounded = ((path, np.asarray(numbers.get(path, x))) for path, x in tensors.items())
    dense = fill_parameters(plain, rounded, make_put(plain, None))
    (got, gradients), (want, wanted) = (logits_and_gradients(adapted(model)) for model in (base, dense))
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert gradients.keys() == wanted.keys()
    for path, gradient in wanted.items():
        assert path.rsplit(".", 2)[-2] == "lora"
        np.testing.assert_allclose(gradients[path], gradient, atol=2e-5 * np.abs(gradient).max(), err_msg=path)
    near = logits_and_gradients(adapted(exact))[0]
    assert 0 < np.abs(got - near).mean() < bound * near.std()
