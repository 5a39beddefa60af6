"""Execute whole runs from their recipes, and use finished ones."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from covey.config.recipe import Recipe, RecipeT, SFTRecipe, load_any
from covey.models.dtypes import resolve_compute_dtype
from covey.parallel import processes
from covey.recipes.build import build, load_inputs, with_compute_dtype
from covey.recipes.load_model import open_model, use_compilation_cache, with_absolute_paths
from covey.recipes.use import evaluate
from covey.run.folder import RunFolder, create_folder, reopen_folder
from covey.run.saved_run import ReadyRun, train_in_folder


def train(recipe: RecipeT, out: Path, make: Callable[..., ReadyRun] = build) -> dict[str, Any]:
    """Run `recipe` in the new folder `out`, as `make` makes it; return the content of `summary.json`."""
    recipe = with_absolute_paths(recipe)
    return _run_in(recipe, out, recipe, create_folder, make)


def resume(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Resume from the last checkpoint in `folder` (from the start when there is none); the result equals that of an
    uninterrupted run. `overrides` change its recipe, where changes are allowed (`run.settings`).
    """
    recipe: Any = load_any(folder, overrides)
    began: Any = load_any(folder)
    if with_absolute_paths(began) == began:  # an older run may have been saved with relative ones
        recipe = with_absolute_paths(recipe)
    # The run keeps the type of products that it began with, on any machine.
    return _run_in(recipe, folder, began, reopen_folder)


def _run_in(
    recipe: RecipeT,
    out: Path,
    began: Recipe | SFTRecipe,
    open_folder: Callable[[Path, Any], AbstractContextManager[RunFolder]],
    make: Callable[..., ReadyRun] = build,
) -> dict[str, Any]:
    """Run `recipe` in `out`, in the type of products that the recipe `began` leads to."""
    processes.here().check_shared_folder(out)
    recipe = with_compute_dtype(recipe, resolve_compute_dtype(began.model.compute_dtype))
    data, mesh = load_inputs(recipe)
    with open_folder(out, recipe) as folder:
        return train_in_folder(recipe, folder, partial(make, recipe, data, mesh))


__all__ = [
    "evaluate",
    "open_model",
    "resume",
    "train",
    "use_compilation_cache",
]
