"""Preview of a run without its weights: its first prompt and that prompt's tokens, number of steps, tokens of a step,
and the files that it writes. Data are read and fitted as the run does it; of the model only the header and the
tokenizer are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from covey.config.recipe import Recipe, SFTRecipe
from covey.data import PromptLoader
from covey.data.loader import fit_prompts
from covey.data.rows import count_plain
from covey.models.config import ModelConfig
from covey.monitor.record import total_steps
from covey.monitor.run_files import run_files
from covey.recipes.build import load_data, prompt_encoder
from covey.recipes.load_model import abstract_for
from covey.rl.evaluate import presets_of
from covey.sampling.scheduler import check_length, check_positions
from covey.text.tokenizer import Tokenizer
from covey.types import Prompt
from covey_report.run_files import TOKENS
from covey_report.token_values import token_values_interval
from covey_sft.batch import drop_long_examples, encode_example
from covey_sft.examples import ExampleLoader
from covey_sft.learner import HELD_OUT


@dataclass(frozen=True)
class Preview:
    """Description of a run before it starts.

    Attributes:
        prompt: the first prompt of the first step as the model gets it.
        tokens: token ids of this prompt.
        completion: the completion to learn after it; None in reinforcement learning.
        rows: number of training rows that are used.
        held_out: number of held-out rows.
        unfit: numbers of rows that are too long, by their treatment: dropped or truncated.
        steps: optimizer updates of the whole run.
        budget: numbers of prompts, completions and tokens of one step, by name.
        files: names of the files and folders in the run folder at the end.
    """

    prompt: str
    tokens: Sequence[int]
    completion: str | None
    rows: int
    held_out: int
    unfit: Mapping[str, int]
    steps: int
    budget: Mapping[str, int]
    files: Sequence[str]


def preview(recipe: Recipe | SFTRecipe) -> Preview:
    """Return the preview of a run of `recipe`.

    Raises:
        CoveyError: the data or the model are not there, or a prompt or an example is too long.
    """
    model, tokenizer = abstract_for(recipe, jax.default_backend())
    describe = _describe_rl if isinstance(recipe, Recipe) else _describe_sft
    return describe(recipe, model.config, tokenizer)  # type: ignore[arg-type]  # each gets its own kind


def _describe_rl(recipe: Recipe, model: ModelConfig, tokenizer: Tokenizer) -> Preview:
    check_positions(recipe.rollout, model.max_positions)
    data, training = load_data(recipe), recipe.training
    encode = prompt_encoder(recipe.envs, tokenizer)
    fitted = fit_prompts(data.train, encode, recipe.rollout.max_prompt_length, training.too_long)
    loader = PromptLoader(fitted.rows, training.prompts_per_step, seed=recipe.seed)
    count_plain(loader.rows, tokenizer, recipe.envs.environment)
    lengths = [len(encode(row["prompt"])) for row in loader.rows]
    for number, length in enumerate(lengths, 1):
        check_length(length, recipe.rollout, f"row {number} of the training data")
    prompts = training.prompts_per_step
    completions = prompts * recipe.grpo.num_generations
    budget = {
        "prompts": prompts,
        "completions": completions,
        "prompt tokens, mean": round(prompts * float(np.mean(lengths))),
        "completion tokens, at most": completions * recipe.rollout.max_new_tokens,
    }
    first = next(loader)[0]["prompt"]
    steps = total_steps(training, len(loader), recipe.grpo.num_iterations)
    unfit = {"dropped": fitted.dropped, "truncated": fitted.truncated}
    tokens = encode(first)
    shown = tokenizer.decode(tokens, skip_special=False) if recipe.envs.tools else _render(tokenizer, first)
    rendered = shown, tokens.tolist(), None
    every = token_values_interval(training, recipe.grpo.num_generations, steps)
    of_groups = [file.name for file in run_files() if file.group_rows]
    files = _files(*of_groups, *([TOKENS] if 0 < every <= steps else []), *_evaluation_files(recipe))
    return Preview(*rendered, len(loader.rows), len(data.test), unfit, steps, budget, files)


def _describe_sft(recipe: SFTRecipe, model: ModelConfig, tokenizer: Tokenizer) -> Preview:
    data, training = load_data(recipe), recipe.training
    fitted = drop_long_examples(data.train, tokenizer, training, model.max_positions, "training data")
    drop_long_examples(data.test, tokenizer, training, model.max_positions, HELD_OUT)
    loader = ExampleLoader(fitted.rows, training.batch_size, seed=recipe.seed)
    count_plain(loader.rows, tokenizer)
    encode = partial(encode_example, tokenizer=tokenizer, completion_only=training.completion_only)
    lengths = [sum(map(len, encode(row))) for row in loader.rows]
    budget = {
        "examples": training.batch_size,
        "tokens, mean": round(training.batch_size * float(np.mean(lengths))),
        "tokens, at most": training.batch_size * min(training.max_length, model.max_positions),
    }
    first = next(loader)[0]
    rendered = _render(tokenizer, first["prompt"]), encode(first)[0].tolist(), str(first["completion"])
    unfit = {"dropped": fitted.dropped, "truncated": fitted.truncated}
    steps = total_steps(training, len(loader))
    files = _files(*_evaluation_files(recipe))
    return Preview(*rendered, len(loader.rows), len(data.test), unfit, steps, budget, files)


def _render(tokenizer: Tokenizer, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.render(prompt)


def _evaluation_files(recipe: Recipe | SFTRecipe) -> list[str]:
    others = presets_of(recipe.evaluation)[1:] if isinstance(recipe, Recipe) else ()
    suffixes = ("", *(f"-{preset}" for preset in others))
    return [f"{name}{suffix}.jsonl" for name in ("before", "after") for suffix in suffixes]


def _files(*optional: str) -> list[str]:
    """Return the names of the files that every run writes, and of the `optional` ones, in the order of the table."""
    written = [file for file in run_files() if not file.optional or file.name in optional]
    return [f"{file.name}/" if file.is_folder else file.name for file in written]


def preview_to_json(preview: Preview) -> dict[str, Any]:
    """Return a preview as JSON-serialisable values."""
    lists = {"tokens": list(preview.tokens), "unfit": dict(preview.unfit), "budget": dict(preview.budget)}
    return vars(preview) | lists
