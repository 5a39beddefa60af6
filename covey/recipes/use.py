"""Use a model or a finished run: evaluate it, or sample from it."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from covey.config.recipe import Recipe, SFTRecipe
from covey.config.schema.envs import metric_name
from covey.data import sources as data_source
from covey.data.rows import Row
from covey.display import show_log
from covey.monitor.progress import Progress
from covey.parallel import processes
from covey.recipes.build import open_environments
from covey.recipes.load_model import available_own_mesh, load_for
from covey.registry import offered
from covey.rewards.call import RewardFn, check_columns, check_evaluation_columns, environment_reward
from covey.rewards.scoring import RewardRunner
from covey.rl.evaluate import evaluate as evaluate_model
from covey.rl.learner import fit_rows
from covey.rl.rollout_worker import RolloutWorker
from covey.run.saved_run import console_of_process
from covey.run.settings import check_same_recipe


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


@contextmanager
def open_worker(recipe: Recipe, source: str | None = None) -> Iterator[RolloutWorker]:
    """Load the model at `source`, or that the recipe begins with, and open the recipe's environment or tools."""
    model, tokenizer, _ = load_for(recipe, available_own_mesh(recipe.model.mesh), source)
    with open_environments(recipe.envs) as environments:
        yield RolloutWorker(model, tokenizer, recipe.rollout, environments)
