"""Use a model or a finished run: evaluate, generate, chat."""

import dataclasses
import logging
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from covey.config.recipe import Recipe, SFTRecipe, is_run
from covey.config.recipe import load_any as load_recipe
from covey.config.schema import RolloutConfig
from covey.config.schema.envs import metric_name
from covey.data import sources as data_source
from covey.data.rows import Row
from covey.display import echo, show_log, typed_lines
from covey.errors import DataError
from covey.monitor.progress import Progress
from covey.parallel import processes
from covey.recipes.build import open_environments
from covey.recipes.load_model import available_own_mesh, load_for, open_model
from covey.registry import offered
from covey.rewards.call import RewardFn, check_columns, check_evaluation_columns, environment_reward
from covey.rewards.scoring import RewardRunner
from covey.rl.evaluate import evaluate as evaluate_model
from covey.rl.learner import fit_rows
from covey.rl.rollout_worker import RolloutWorker
from covey.run.saved_run import console_of_process
from covey.run.settings import check_same_recipe
from covey.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
TEXT_ONLY = "The model has no chat template: it continues each line alone"


def evaluate(source: str, recipe: Recipe | SFTRecipe) -> dict[str, Any]:
    """Evaluate the model or run at `source` on the held-out rows of `recipe`; print and return the metrics."""
    if isinstance(recipe, Recipe):
        return evaluate_rl(source, recipe)
    return offered("covey.methods", recipe.method).evaluate(source, recipe)  # type: ignore[no-any-return]


def evaluate_rl(source: str, recipe: Recipe) -> dict[str, Any]:
    """Evaluate the model or run at `source` on the held-out prompts of `recipe`; print and return the metrics.

    Each of several processes samples and evaluates its share of the prompts, with a copy of the model on its devices.
    """
    held_out = data_source.load_data(recipe.data).test
    check_same_inputs(recipe, held_out)
    check_columns(recipe.rewards, held_out)
    check_evaluation_columns(recipe.evaluation, held_out)
    with Progress(0, console_of_process()) as progress, show_log(progress.phase, progress.message):
        with open_worker(recipe, source) as worker, RewardRunner(recipe.reward_safety) as runner:
            progress.phase("sampling answers")
            functions = scoring_functions(recipe)
            weights = recipe.grpo.reward_weights  # the last may be that of a reward model, which is not loaded here
            evaluation = evaluate_model(
                worker,
                fit_rows(held_out, worker, recipe.training).rows,
                recipe.evaluation,
                recipe.rollout,
                functions,
                weights and weights[: len(functions)],
                progress.advance,
                runner,
            )
        progress.evaluation(source, evaluation.summary())
    return evaluation.summary()


def scoring_functions(recipe: Recipe) -> list[RewardFn | str]:
    """Return the functions that score completions: the environment's reward, if any, and the recipe's rewards."""
    name = recipe.envs.environment
    return [*([environment_reward(metric_name(name))] if name else []), *recipe.rewards]


def check_same_inputs(recipe: Recipe | SFTRecipe, held_out: Sequence[Row]) -> None:
    """Refuse processes that evaluate by another recipe, or on other data, than process 0.

    Raises:
        RecipeError: they do.
    """
    same = "the same command and data for all"
    check_same_recipe(recipe, same)
    processes.here().check_same("held-out data", lambda: zlib.crc32(repr(list(held_out)).encode()), same)


def generate(source: str, prompt: str, samples: int, rollout: RolloutConfig) -> list[str]:
    """Generate `samples` completions of one user message with the model or run at `source`."""
    with show_log(info=lambda _: None, warning=_echo_to_stderr):
        model, tokenizer = open_model(source, mesh=_mesh_of(source))
    worker = RolloutWorker(model, tokenizer, rollout)
    (group,) = worker.generate([{"prompt": _as_chat(tokenizer, prompt)}], samples)
    return [completion.text for completion in group.completions]


def chat(source: str, rollout: RolloutConfig) -> None:
    """Hold a conversation on the terminal; an empty line or end of input ends it."""
    with show_log(info=_echo, warning=_echo):
        model, tokenizer = open_model(source, mesh=_mesh_of(source))
    limit = max(1, model.config.max_positions - rollout.max_new_tokens)
    worker = RolloutWorker(model, tokenizer, dataclasses.replace(rollout, max_prompt_length=limit))
    messages: list[dict[str, str]] = []
    print(f"{'Say something' if tokenizer.chat_template else TEXT_ONLY}; an empty line ends the chat.", flush=True)
    for text in typed_lines():
        try:
            messages = _reply(worker, messages, text, limit)
        except DataError as error:
            _echo(f"this line is left out: {error}")
        else:
            _echo(messages[-1]["content"])


def _reply(worker: RolloutWorker, before: Sequence[dict[str, str]], text: str, limit: int) -> list[dict[str, str]]:
    """Return the conversation `before` with `text` and the model's reply, without its oldest turns if it is longer than
    `limit` tokens.

    Raises:
        DataError: the text cannot be a prompt: it is too long by itself, or the chat template refuses it.
    """
    tokenizer = worker.tokenizer
    size = len(tokenizer.encode_prompt(_as_chat(tokenizer, text)))
    if size > limit:
        raise DataError(f"it has {size:,} tokens", want=f"at most {limit:,}", fix="say it in fewer words")
    messages = [*before, {"role": "user", "content": text}]
    while tokenizer.chat_template and len(messages) > 1 and len(tokenizer.encode_prompt(messages)) > limit:
        messages = messages[2:]
        _echo("(the oldest turn is forgotten: the conversation has outgrown the model)")
    (group,) = worker.generate([{"prompt": messages if tokenizer.chat_template else text}], 1, step=len(messages))
    return [*messages, {"role": "assistant", "content": group.completions[0].text}]


@contextmanager
def open_worker(recipe: Recipe, source: str | None = None) -> Iterator[RolloutWorker]:
    """Load the model at `source`, or that the recipe begins with, and open the recipe's environment or tools."""
    model, tokenizer, _ = load_for(recipe, available_own_mesh(recipe.model.mesh), source)
    with open_environments(recipe.envs) as environments:
        yield RolloutWorker(model, tokenizer, recipe.rollout, environments)


def _mesh_of(source: str) -> Mesh | None:
    """Return the mesh that the run at `source` was trained on; a model that is not a run uses one device."""
    return available_own_mesh(load_recipe(source).model.mesh) if is_run(source) else None


def _as_chat(tokenizer: Tokenizer, text: str) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def _echo(text: str) -> None:
    echo(text, keep="\n\t")


def _echo_to_stderr(text: str) -> None:
    """Print a message to standard error, for commands that print the answer alone."""
    echo(text, keep="\n\t", file=sys.stderr)
