"""A script's run: `train(..., out=)` of a learner keeps it in a folder as a command does.

The recipe in the folder has the learner's settings and the model that it loaded; data are in the script alone, so only
the script can resume the run.
"""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from covey.config.recipe import Recipe, SFTRecipe, is_from_python, is_run, load_any
from covey.config.schema import LoRAConfig, ModelOptions, RLTrainingConfig, SFTConfig
from covey.errors import CoveyError, RecipeError, ResumeError
from covey.models.decoder import Decoder
from covey.models.loading import sources
from covey.parallel import processes
from covey.parallel.arrays import fingerprint, flatten
from covey.run.folder import RunFolder, create_folder, reopen_folder
from covey.run.saved_run import ReadyRun, SavedRun, train_in_folder

log = logging.getLogger(__name__)


def train_from_script(
    learner: Any, recipe: Recipe | SFTRecipe, out: str | Path, make: Callable[[SavedRun], ReadyRun]
) -> None:
    """Begin a run of `learner` in the new folder `out`, or resume the run that is there."""
    recipe = replace(recipe, name=_name(Path(out)))
    with _open(learner, recipe, Path(out).expanduser()) as folder:
        summary = train_in_folder(recipe, folder, make)
    learner.evaluations = {name: summary[name] for name in ("before", "after") if summary.get(name)}


def _open(learner: Any, recipe: Recipe | SFTRecipe, out: Path) -> AbstractContextManager[RunFolder]:
    processes.here().check_shared_folder(out)
    in_use = out.exists() and (not out.is_dir() or any(out.iterdir()))
    resuming, in_use = processes.here().broadcast((is_run(out), in_use), "run folder")  # process 0 soon writes there
    if resuming and not is_from_python(load_any(out)):
        raise ResumeError(
            "this run was begun by a command",
            want="a run that train(..., out=) has begun",
            fix='out="ANOTHER"',
            where=str(out),
        )
    if not resuming and learner.step:
        raise RecipeError(
            f"this learner has already made {learner.step} steps, and {out} has no run to resume",
            want="a learner that has not trained yet, or the folder of its run",
            fix="make a new learner",
        )
    if not resuming and in_use:
        raise CoveyError("this folder is not empty", want="a new or empty folder", fix='out="ANOTHER"', where=str(out))
    return reopen_folder(out, recipe) if resuming else create_folder(out, recipe)


def warn_of_unwritten(training: RLTrainingConfig | SFTConfig) -> None:
    """Warn of settings about checkpoints where no folder gets any."""
    names = "checkpoint_every_n_steps", "keep_best", "checkpoint_path"
    if unwritten := ", ".join(f"training.{name}" for name in names if getattr(training, name)):
        log.warning(f"nothing is written without train(..., out=FOLDER), but {unwritten} is set")


def checksum(states: Sequence[nnx.State[Any, Any]]) -> str:
    """Return a checksum of all weights: a resumed run must have begun with the same weights."""
    checksum = sum(fingerprint(jax.tree.leaves(state)) for state in states) % 2**32
    return f"a model from Python, checksum {checksum:08x}"


def model_options(model: Decoder, source: str = "", lora: LoRAConfig | None = None) -> ModelOptions:
    """Return the settings that a run records of its model. One that a script gave as an object has no source, but its
    types and the rank of its adapters.
    """
    types: dict[str, Any] = {"dtype": str(model.head_weight.dtype), "compute_dtype": str(model.dtype)}
    adapters = flatten(nnx.state(model, nnx.LoRAParam))
    ranks = [leaf.shape[-1] for name, leaf in adapters.items() if name.endswith(".a")]
    lora = lora or LoRAConfig(rank=max(ranks, default=0))
    return ModelOptions(source=source or sources.FROM_PYTHON, lora=lora, **types)


def _name(out: Path) -> str:
    """Return the name of a run in the folder `out`, in the characters that a recipe's name may have."""
    return re.sub(r"[^\w.-]", "-", out.name).lstrip(".-") or "run"
