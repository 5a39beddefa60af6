"""List every program that a run of reinforcement learning compiles on an accelerator, with its shapes.

They are counted from the run's own rules (`Decoder.fixed_shapes`). What a critic, a reward model, a moving
reference or an environment adds is not among them, and neither are the small programs of loading, for example of new
adapters.
"""

from collections.abc import Iterator
from typing import NamedTuple

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe
from covey.models.lora import has_lora
from covey.rl.evaluate import PRESETS, during_training, evaluation_rollout
from covey.rl.programs import RLPrograms
from covey.rl.token_values import interval
from covey.sampling.logits import SamplingParams


class Entry(NamedTuple):
    """A program of a run, and its shape in words."""

    name: str
    shape: str


def inventory(recipe: Recipe, made: RLPrograms) -> list[Entry]:
    """Return the programs of a run of `recipe`; none where shapes follow the lengths, as on a CPU."""
    return [*_training(recipe, made), *_sampling(recipe, made)] if made.cluster.fixed_shapes else []


def has_token_values(recipe: Recipe) -> bool:
    """Return whether a run of `recipe` comes to a step with token values."""
    steps = recipe.training.max_steps or 1
    every = interval(recipe.training, recipe.grpo.num_generations, steps)
    return every > 0 and (recipe.training.max_steps is None or every <= steps)


def _training(recipe: Recipe, made: RLPrograms) -> Iterator[Entry]:
    rows = [f"{count} rows of {length}" for count, length in made.row_sizes()]
    algorithm = algorithm_of(recipe.grpo)
    yield Entry("optimizer state", "")
    yield Entry("zero gradients", "")
    yield from (Entry("gradients", shape) for shape in rows)
    yield Entry("apply", "")
    if algorithm.needs_reference:
        yield from (Entry("score of the reference", shape) for shape in rows)
    if algorithm.needs_reference and (recipe.model.adapter or not has_lora(made.cluster.program_actor)):
        yield Entry("copy for the reference", "")
    if algorithm.needs_old_logps:
        yield from (Entry("score", shape) for shape in rows)
    if has_token_values(recipe):
        yield Entry("token values", "{} rows of {}".format(*made.token_value_size()))


def _sampling(recipe: Recipe, made: RLPrograms) -> Iterator[Entry]:
    scheduler = made.scheduler()
    slots = f"{len(scheduler.slots)} slots of {scheduler.cache_length}"
    yield Entry("weights to sample with", "")
    yield Entry("prefill", "{} prompts of {}".format(*scheduler.prefill_shape))
    yield Entry("empty cache", slots)
    yield Entry("admit", slots)
    yield Entry("decode", slots)
    if _evaluates_otherwise(recipe):
        yield Entry("decode with other settings", slots)


def _evaluates_otherwise(recipe: Recipe) -> bool:
    """Return whether evaluations draw with other settings than training; several of them share a program."""
    config, rollout = recipe.evaluation, recipe.rollout
    presets = tuple(PRESETS.values()) if config.preset == "all" else ()
    used = [evaluation_rollout(one, rollout) for one in (config, during_training(config))]
    own = SamplingParams.from_config(rollout)
    return bool(presets) or any(SamplingParams.from_config(one) != own for one in used)
