"""Compare the settings of a resumed run with the settings of its checkpoint: a change that makes it another run is
refused with a diff, other changes are reported. Each setting says which (`OnResume`).

Another mesh, and other sizes of stages and rows, give the same run up to rounding.

The run may be older than this version of Covey. A setting that it lacks had its default. A setting that no longer
exists does not refuse the run: it is reported, unless it was not set.
"""

import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covey.config.algorithms import PPOConfig, algorithm_of
from covey.config.base import treatments_on_resume
from covey.config.recipe import METHODS, SECTION, AnyRecipe, Recipe, SFTRecipe, flatten, to_yaml
from covey.errors import ResumeError
from covey.monitor.run_files import RECIPE
from covey.parallel import processes
from covey.registry import offered

Settings = dict[str, Any]
log = logging.getLogger(__name__)
LOCAL_ORIGIN = re.compile(
    r"/.*, sha256 (?P<digest>[0-9a-f]{16})(?P<adapter> with the adapter sha256 [0-9a-f]{16})?", re.DOTALL
)
"""Pattern of the origin of weights at a path."""


def settings_of(recipe: AnyRecipe) -> Settings:
    """Return the JSON value of every setting by dotted name, except those that are ignored on resume."""
    treatments = treatments_on_resume(type(recipe))
    return {name: x for name, x in flatten(asdict(recipe)).items() if treatments[name] != "ignore"}


def check_same_settings(saved: Settings, now: Settings, folder: Path, fix: str = "") -> dict[str, str]:
    """Refuse to resume the run at `folder`, saved with the settings `saved`, with settings `now` that make it another
    run; report and return the other differences by name. A setting that `saved` lacks had its default. The error names
    `fix`, or what to do on the command line.

    Raises:
        ResumeError: data, batch, seed, types or adapters differ, or a setting of arrays that the checkpoint has.
    """
    saved = settings_of(METHODS[now["method"]](seed=saved.get("seed", AnyRecipe.seed))) | saved
    changed = {
        name: f"{name} was {value!r}, " + (f"is {now[name]!r}" if name in now else "and is no setting any more")
        for name, value in saved.items()
        if value != now.get(name)
    }
    treatments = treatments_on_resume(METHODS[now["method"]])
    fixed = _of_saved_arrays(saved, now) if now["method"] == Recipe.method else set()
    fixed |= {name for name in now if treatments[name] == "refuse"}
    if refused := [x for name, x in changed.items() if name in fixed]:
        raise ResumeError(
            "these settings are not those that the run was saved with: " + "; ".join(refused),
            want="data, batch, seed, types, adapters and what has arrays in the checkpoint as they were",
            fix=fix
            or f"undo that, here or beside --resume; or begin a new run with its model: --model.source {folder}",
            where=str(folder / RECIPE),
        )
    if changed:
        log.warning("changed since the run was saved: " + "; ".join(changed.values()))
    return changed


def _of_saved_arrays(saved: Settings, now: Settings) -> set[str]:
    """Return the settings that would be overridden by arrays of the checkpoint, or ask for arrays that it lacks."""
    then, algorithm = (
        algorithm_of(
            PPOConfig.from_checked({f: settings[SECTION + f] for f in PPOConfig.kinds if SECTION + f in settings})
        )
        for settings in (saved, now)
    )
    kept = {
        "grpo.advantage": then.needs_critic != algorithm.needs_critic,
        "grpo.reference_every_n_updates": not (then.reference_every_n_updates and algorithm.reference_every_n_updates),
        "grpo.reference": then.reference_every_n_updates > 0,
        "critic": (saved["critic"] is None) != (now["critic"] is None),
    }
    return {name for name, is_kept in kept.items() if is_kept}


def check_same_recipe(recipe: Recipe | SFTRecipe, want: str) -> None:
    """Refuse processes in which the recipe, or a file of a module that it names as module:member, differs from that of
    process 0.

    Raises:
        CoveyError: one does; `want` says of a recipe what is expected.
    """
    processes.here().check_same("recipe", lambda: to_yaml(recipe), want)
    if processes.here().count > 1:
        offered("covey.processes", "check_code")(recipe)


def check_same_weights(then: str, now: str, where: Path, role: str = "") -> None:
    """Refuse to resume the run at `where`, which began with the weights `then`, with the weights `now`.

    Weights at a path are compared by content, whatever the path.

    Args:
        role: the setting that names the weights, for other weights than the policy's.
    """
    if then != now and not _is_same_local(then, now):
        what = f"{role} with the weights" if role else "the weights"
        raise ResumeError(
            f"this run began with {what} {then!r}, and {now!r} is what can be had now",
            fix="make the first available again: other weights would not continue the run",
            where=str(where),
        )


def _is_same_local(then: str, now: str) -> bool:
    first, second = LOCAL_ORIGIN.fullmatch(then), LOCAL_ORIGIN.fullmatch(now)
    if first is None or second is None:
        return False
    return first.group("digest", "adapter") == second.group("digest", "adapter")
