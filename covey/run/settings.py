"""Compare the settings of a resumed run with those it was saved with. The recipe in its folder may have been edited: a
change that makes it another run is refused with a diff; other changes are reported.

Another mesh, and other sizes of stages and rows, give the same run up to rounding.

The run may be older than this version of Covey. A setting that it lacks had its default, so the default of a new
setting must match the earlier behaviour, or `as_begun` sets it. A setting that no longer exists does not refuse the
run: it is reported.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from covey.config.algorithms import algorithm_of
from covey.config.recipe import METHODS, AnyRecipe, Recipe
from covey.errors import ResumeError

Settings = dict[str, Any]
log = logging.getLogger(__name__)


def settings_of(recipe: AnyRecipe) -> Settings:
    """Return the JSON value of every setting by dotted name, except `IGNORED_ON_RESUME`."""
    return {name: value for name, value in _flat(asdict(recipe)).items() if not _named(name, IGNORED_ON_RESUME)}


def as_begun(recipe: Recipe, then: Settings) -> Recipe:
    """Return the recipe of a run saved with the settings `then`, with the earlier behaviour for settings that its
    version of Covey lacked and whose default differs now: under a loaded adapter the reference was the base.
    """
    if REFERENCE in then or recipe.model.adapter is None or not algorithm_of(recipe.grpo).beta:
        return recipe
    return replace(recipe, grpo=replace(recipe.grpo, reference="base"))


def compare(then: Settings, now: Settings, folder: Path) -> None:
    """Refuse to resume the run at `folder`, saved with the settings `then`, with settings `now` that make it another
    run; report the other differences. A setting that `then` lacks had its default.

    Raises:
        ResumeError: data, batch, seed, types or adapters differ.
    """
    if REFERENCE not in then and now.get(REFERENCE) == "base":
        log.warning(f"this run is older than {REFERENCE}, and goes on with base, as it began")
        then = then | {REFERENCE: "base"}
    then = _defaults(then, now) | then
    other = {name: _told(name, then, now) for name in then if name not in now or then[name] != now[name]}
    if refused := [told for name, told in other.items() if name in now and _named(name, DECISIVE)]:
        raise ResumeError(
            "these settings are not those that the run was saved with: " + "; ".join(refused),
            want="data, batch, seed, types and adapters as they were",
            fix=f"undo that, here or beside --resume; or begin a new run with its model: --model.source {folder}",
            where=str(folder / "recipe.yaml"),
        )
    if other:
        log.warning("changed since the run was saved: " + "; ".join(other.values()))


def _told(name: str, then: Settings, now: Settings) -> str:
    return f"{name} was {then[name]!r}, " + (f"is {now[name]!r}" if name in now else "and is no setting any more")


def _defaults(then: Settings, now: Settings) -> Settings:
    """Return the default of every setting; that of the rollout's seed is the run's seed."""
    return settings_of(METHODS[now["method"]](seed=then.get("seed", AnyRecipe.seed)))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Settings:
    found: Settings = {}
    for name, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in WHOLE:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = list(value) if isinstance(value, tuple) else value
    return found


def _named(name: str, among: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in among)


REFERENCE = "grpo.reference"

WHOLE = ("reward_safety.on_error_of",)
"""Settings whose value is itself a mapping."""

DECISIVE = (
    "seed", "rollout.seed", "data", "model.dtype", "model.compute_dtype", "model.quantize", "model.quantize_block",
    "model.lora", "training.prompts_per_step", "training.batch_size", "grpo.algorithm", "grpo.num_generations",
    "grpo.num_iterations",
)  # fmt: skip
"""Settings, and sections of settings, that may not change when a run is resumed."""

IGNORED_ON_RESUME = (
    "name", "description", "needs", "expect", "out", "tracking", "model.mesh", "model.source", "model.adapter",
    "data.path", "data.test_path", "rollout.slots", "rollout.kv_cache_size", "evaluation",
    "training.watchdog_seconds", "training.show", "training.max_to_keep",
    "training.checkpoint_every_n_steps", "training.eval_every_n_steps",
)  # fmt: skip
"""Settings that may change without a report. Content at a path is compared by digest, whatever the path."""
