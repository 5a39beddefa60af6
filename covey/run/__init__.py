"""Execute whole runs from their recipes, and use finished ones. The class of the recipe decides what is run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.config.recipe import Recipe, SFTRecipe, load_any
from covey.run import inference, sft
from covey.run.base import Announce, Run
from covey.run.export import export
from covey.run.inference import chat, generate
from covey.run.load_model import open_model, use_compilation_cache
from covey.run.rl import RLRun
from covey.run.sft import SFTRun

RUNS: dict[type, type[Run[Any]]] = {Recipe: RLRun, SFTRecipe: SFTRun}
"""Class of the recipe → class of its run."""


def train(
    recipe: Recipe | SFTRecipe,
    out: Path,
    announce: Announce | None = None,
) -> dict[str, Any]:
    """Run `recipe` in the new folder `out`; return the content of `summary.json`.

    Args:
        announce: shows the expected needs of the run before its first step.
    """
    return RUNS[type(recipe)].start(recipe, out, announce)


def resume(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Resume from the last checkpoint in `folder` (from the start when there is none); the result equals that of an
    uninterrupted run. `overrides` change its recipe, where changes are allowed (`settings`).
    """
    recipe = load_any(folder, overrides)
    return RUNS[type(recipe)].resume(recipe, folder)


def evaluate(source: str, recipe: Recipe | SFTRecipe) -> dict[str, Any]:
    """Evaluate the model or run at `source` on the held-out rows of `recipe`; print and return the metrics."""
    return sft.evaluate(source, recipe) if isinstance(recipe, SFTRecipe) else inference.evaluate(source, recipe)


__all__ = [
    "RUNS",
    "chat",
    "evaluate",
    "export",
    "generate",
    "open_model",
    "resume",
    "train",
    "use_compilation_cache",
]
