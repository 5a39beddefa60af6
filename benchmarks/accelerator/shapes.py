"""Shapes of the models that are measured, the recipe of their step, and random weights.

On a CPU each shape is made tiny, and keeps what its family computes otherwise.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from benchmarks.accelerator.machine import is_cpu
from covey.config import recipe
from covey.config.recipe import Recipe
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.dtypes import resolve_compute_dtype
from covey.models.lora import with_lora
from covey.parallel.arrays import place_model
from covey.recipes.load_model import decoder_options
from covey_plan.topologies import Places


class Work(NamedTuple):
    """Work of a step: P prompts × G samples, all of the greatest length in tokens."""

    prompts: int
    samples: int
    prompt_length: int
    new_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens of a step."""
        return self.prompts * self.samples * self.new_tokens


LARGE, TINY = Work(8, 8, 128, 240), Work(2, 2, 16, 16)
"""Work on an accelerator, where a group fills a row of 2,048 tokens, and on a CPU."""


@dataclass(frozen=True)
class Shape:
    """Shape of a model and of its step.

    Attributes:
        rank: of its adapters; 0 trains every weight.
        work: of a step on an accelerator.
        settings: of its recipe, in place of those of `recipe_of`.
    """

    config: ModelConfig
    rank: int
    work: Work = LARGE
    settings: Mapping[str, Any] = field(default_factory=dict)


QWEN = ModelConfig(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2,
    head_dim=64, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True, attention_bias=True,
)  # fmt: skip
GEMMA = ModelConfig(
    vocab_size=256_000, hidden_size=2304, intermediate_size=9216, num_layers=26, num_heads=8, num_kv_heads=4,
    head_dim=256, norm_eps=1e-6, tie_embeddings=True, activation="gelu_tanh", post_norms=True, norm_offset=1.0,
    embed_scale=48.0, attn_softcap=50.0, final_softcap=30.0, windows=(4096, None) * 13,
)  # fmt: skip
LLAMA = ModelConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, rope_theta=5e5,
)  # fmt: skip
OF_RECIPE = {
    "training.row_length": 1024, "training.max_tokens_per_micro_batch": 2048, "grpo.beta": 0.08,
    "rollout.temperature": 0.9, "rollout.top_k": 50, "training.actor_optimizer.max_grad_norm": 0.1,
    "model.lora.alpha": 64,
}  # fmt: skip
"""Settings of the recipe gsm8k-gemma2 on one device."""
SHAPES = {
    "0.5B": Shape(QWEN, 0),
    "2B": Shape(GEMMA, 64),
    "2B recipe": Shape(GEMMA, 64, Work(2, 4, 256, 512), OF_RECIPE),
    "8B": Shape(LLAMA, 64),
}
"""Name → shape."""


def shape_here(name: str) -> Shape:
    """Return a shape, tiny on a CPU."""
    shape = SHAPES[name]
    return Shape(made_tiny(shape.config), min(shape.rank, 4), TINY) if is_cpu() else shape


def made_tiny(config: ModelConfig) -> ModelConfig:
    """Return a config of the same family with few weights."""
    return replace(
        config, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, windows=config.windows and (8, None),
    )  # fmt: skip


def recipe_of(shape: Shape, mesh: Mapping[str, int] | None = None, dtype: str | None = None) -> Recipe:
    """Return the recipe of a step, whose learning rate hardly moves the weights.

    Args:
        mesh: number of devices along each axis; one device if not set.
        dtype: type of weights and products; bfloat16 if not set, and float32 on a CPU.
    """
    work, dtype = shape.work, dtype or ("float32" if is_cpu() else "bfloat16")
    row = work.prompt_length + work.samples * work.new_tokens
    settings = {
        "model.source": "scratch:arithmetic-tiny",
        "model.remat": "true",
        "model.dtype": dtype,
        "model.compute_dtype": dtype,
        "model.lora.rank": shape.rank,
        "rollout.max_prompt_length": work.prompt_length,
        "rollout.max_new_tokens": work.new_tokens,
        "rollout.slots": work.prompts * work.samples,
        "rollout.decode_chunk": 8,
        "rollout.temperature": 1.0,
        "grpo.num_generations": work.samples,
        "grpo.beta": 0.04,
        "grpo.max_sampling_rounds": 1,
        "training.max_steps": 1,
        "training.prompts_per_step": work.prompts,
        "training.row_length": row,
        "training.max_tokens_per_micro_batch": row,
        "training.eval_every_n_steps": 0,
        "training.actor_optimizer.learning_rate": 1e-9,
        "training.actor_optimizer.schedule": "constant",
        "training.actor_optimizer.warmup_ratio": 0,
    }
    settings |= shape.settings
    settings |= {f"model.mesh.{axis}": size for axis, size in (mesh or {}).items()}
    return recipe.load("arithmetic-tiny", [f"{name}={value}" for name, value in settings.items()])


def abstract_model(shape: Shape, options: recipe.AnyRecipe, places: Places) -> Decoder:
    """Return the model of a recipe in this shape, with shapes in place of arrays, on its devices."""
    switches: dict[str, Any] = decoder_options(options.model)
    switches |= {"compute_dtype": resolve_compute_dtype(options.model.compute_dtype)}
    model = abstract_decoder(shape.config, None, **switches)
    if options.model.lora.rank:
        model = nnx.eval_shape(partial(with_lora, config=options.model.lora), model)
    return place_model(model, places.actor)


def random_model(model: Decoder) -> Decoder:
    """Return a model of shapes with random arrays, made on its devices one by one: norms that scale by 1, biases and
    the second matrices of adapters 0, kernels with the spread of a new model, and embeddings with one that gives logits
    a spread of 2.
    """
    graph, params = nnx.split(model)
    offset, number = model.config.norm_offset, itertools.count()

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return _full(leaf.shape, leaf.dtype, leaf.sharding)(1.0 - offset)
        if "bias" in name or "['b']" in name:
            return _full(leaf.shape, leaf.dtype, leaf.sharding)(0.0)
        spread = 2 * leaf.shape[-1] ** -0.5 if "embedding" in name else leaf.shape[0] ** -0.5
        return _normal(leaf.shape, leaf.dtype, leaf.sharding)(next(number), spread)

    filled: Decoder = nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, params))
    return filled


@cache
def _full(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Any:
    return jax.jit(lambda value: jnp.full(shape, value, dtype), out_shardings=sharding)


@cache
def _normal(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Any:
    def draw(seed: Any, spread: Any) -> jax.Array:
        drawn: jax.Array = jax.random.normal(jax.random.key(seed), shape) * spread
        return drawn.astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
