"""Sizes of a benchmark: the shape of a model and the work of a step, by name or from a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass

from covey.config.recipe import Recipe, find, is_run, load, load_any, names
from covey.config.schema import RLTrainingConfig, RolloutConfig
from covey.errors import RecipeError, nearest
from covey.models.config import ModelConfig
from covey.models.loading import weights

SHARE = 0.35
"""Mean length of a completion, as a fraction of the maximum number of new tokens, where a recipe is the size."""


@dataclass(frozen=True)
class Size:
    """A model's shape and a step's work: P prompts × G samples, lengths in tokens.

    Attributes:
        mean_length: of completions before they are cut at `max_new_tokens`.
        micro_batch: most tokens in one forward-backward, of every layout alike.
        lora: rank of the adapters where the command line does not say; 0 trains every weight.
    """

    model: ModelConfig
    prompts: int
    samples: int
    prompt_length: int
    mean_length: int
    max_new_tokens: int
    slots: int
    decode_chunk: int = RolloutConfig.decode_chunk
    row_length: int = RLTrainingConfig.row_length
    micro_batch: int = RLTrainingConfig.max_tokens_per_micro_batch
    lora: int = 0


def size_of(name: str, overrides: Sequence[str] = ()) -> Size:
    """Return the size `name`, or that of the recipe `name` with overrides.

    Raises:
        CoveyError: it is neither; or the recipe's model is not there.
    """
    if name not in SIZES:
        return of_recipe(_recipe(name, overrides))
    if overrides:
        raise RecipeError(f"a size takes no settings, and {overrides[0]} is one", fix="name a recipe instead")
    return SIZES[name]


def of_recipe(ready: Recipe) -> Size:
    """Return the maximum size of a step of `ready`. Of the model only its shape is read."""
    rollout, training = ready.rollout, ready.training
    return Size(
        _config(ready.model.source),
        prompts=training.prompts_per_step,
        samples=ready.grpo.num_generations,
        prompt_length=rollout.max_prompt_length,
        mean_length=max(2, round(SHARE * rollout.max_new_tokens)),
        max_new_tokens=rollout.max_new_tokens,
        slots=rollout.slots,
        decode_chunk=rollout.decode_chunk,
        row_length=training.row_length,
        micro_batch=training.max_tokens_per_micro_batch,
        lora=ready.model.lora.rank,
    )


def _recipe(name: str, overrides: Sequence[str]) -> Recipe:
    try:
        find(name)
    except RecipeError as error:
        if "/" in name or "." in name:
            raise
        want, near = f"{', '.join(SIZES)}, or a recipe's name or file", nearest(name, [*SIZES, *names(Recipe)])
        raise RecipeError(f"there is no size or recipe {name!r}", want=want, fix=near) from error
    return load(name, overrides)


def _config(source: str) -> ModelConfig:
    """Return the shape of the model at `source`; a run's is that of the model it began with."""
    while is_run(source):
        source = load_any(source).model.source
    return weights.open_source(source)[1].config


TINY = ModelConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=704, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
    tie_embeddings=True,
)  # fmt: skip
SMOLLM2 = ModelConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    rope_theta=100_000.0, tie_embeddings=True,
)  # fmt: skip

SIZES = {
    "tiny": Size(TINY, prompts=6, samples=8, prompt_length=48, mean_length=24, max_new_tokens=80, slots=16),
    "smollm2": Size(SMOLLM2, prompts=8, samples=8, prompt_length=128, mean_length=48, max_new_tokens=192, slots=32),
}
