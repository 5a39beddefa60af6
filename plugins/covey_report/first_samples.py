"""Sample the completions that a run begins with."""

from collections.abc import Sequence

from rich.console import Console

from covey.config.recipe import Recipe
from covey.data import PromptLoader
from covey.data import sources as data_source
from covey.display import show_log
from covey.monitor.progress import Progress
from covey.recipes.use import open_worker
from covey.rewards.call import check_columns
from covey.rl.learner import fit_rows
from covey.types import Group


def sample_training_prompts(recipe: Recipe, count: int) -> Sequence[Group]:
    """Sample groups for the first `count` training prompts of a run of `recipe`, with its untouched model. As far as
    they are prompts of its first step, these are the completions that the run begins with.
    """
    rows = data_source.load_data(recipe.data).train
    check_columns(recipe.rewards, rows)
    console = Console(stderr=True, highlight=False)
    with (
        Progress(0, console) as progress,
        show_log(progress.phase, progress.message),
        open_worker(recipe) as worker,
    ):
        fitted = fit_rows(rows, worker, recipe.training)
        first = next(PromptLoader(fitted.rows, count, seed=recipe.seed))
        progress.phase("sampling")
        return worker.generate(first, recipe.grpo.num_generations, progress=progress.advance)
