"""Learners whose `train` keeps its run in a folder when `out` names one.

These are `covey.GRPOLearner`, `covey.PPOLearner` and `covey.SFTLearner`: the learners of `rl` and `sft`, which know no
run folders, with the run that `base.Run` makes around them. The folder has the same files as that of a command. Its
recipe has the learner's settings; model and data are in the script alone, so only the script can resume the run.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from covey.config.recipe import Recipe, SFTRecipe, is_from_python, is_run, load_any, validate
from covey.config.schema import DataConfig, ModelOptions, SFTDataConfig
from covey.config.schema.data import FROM_PYTHON
from covey.data.examples import ExampleLoader
from covey.data.loader import PromptLoader
from covey.data.rows import Row, as_rows
from covey.errors import CoveyError, RecipeError, ResumeError
from covey.models.decoder import Decoder
from covey.models.loading import sources
from covey.monitor.record import total_steps
from covey.parallel import channel, checks
from covey.parallel.checks import check_shared_folder
from covey.rewards import function_names
from covey.rl import grpo, ppo
from covey.rl.cluster import RLCluster
from covey.rl.learner import Learner
from covey.run.base import Run, RunResources
from covey.run.folder import create_folder, reopen_folder
from covey.run.rl import RLRun
from covey.run.sft import HELD_OUT, SFTRun
from covey.sft import learner as sft


class _RLLearner(Learner):
    """RL learner with run folders."""

    initial_weights = ""
    """Checksum of the weights before the first step; empty until a run needs it."""

    def train(self, train_ds: Any, eval_ds: Any = None, *, out: str | Path | None = None) -> RLCluster:
        """Train as `covey.rl.learner.Learner.train` does.

        Args:
            train_ds, eval_ds: see there. With `out`, `eval_ds` is also evaluated before and after training.
            out: the run folder: metrics, completions, checkpoints and report go there. A run that is in it already is
                resumed from its last checkpoint, and gives the bits of a run that was never stopped. Without `out`
                nothing is written.

        Raises:
            ResumeError: settings, data or weights are not those that the run in `out` was saved with.
            Stopped: a signal came (Ctrl-C, SIGTERM); the run is saved, and the same call resumes it.
        """
        if out is None:
            return super().train(train_ds, eval_ds)
        recipe = self._recipe(Path(out))
        make = partial(self._make_run, recipe, self.loader(train_ds), () if eval_ds is None else as_rows(eval_ds))
        _train_in_folder(RLRun, self, recipe, Path(out), make)
        return self.cluster

    def _make_run(
        self, recipe: Recipe, loader: PromptLoader, held_out: Sequence[Row], resources: RunResources
    ) -> RLRun:
        self.check_data(loader.rows, held_out)
        self.prepare(total_steps(recipe.training, len(loader), recipe.grpo.num_iterations))
        assert self.cluster.trainer is not None, "prepared above"
        models = [self.cluster.trainer.params, *self.cluster.inference.params.values()]
        self.initial_weights = self.initial_weights or _checksum(models)
        return RLRun(recipe, resources, self, loader, held_out, self.initial_weights, {"prompts": len(loader.rows)})

    def _recipe(self, out: Path) -> Recipe:
        config = self.cluster.config
        return Recipe(
            name=_name(out),
            seed=config.rollout_config.seed,
            model=_model_options(self.cluster.rollout.model),
            data=DataConfig(task=FROM_PYTHON),
            rewards=tuple(function_names(self.reward_fns)),
            rollout=config.rollout_config,
            grpo=self.config,
            training=config.training_config,
            evaluation=self.eval_config,
        )


class GRPOLearner(_RLLearner, grpo.GRPOLearner):
    __doc__ = grpo.GRPOLearner.__doc__


class PPOLearner(_RLLearner, ppo.PPOLearner):
    __doc__ = ppo.PPOLearner.__doc__


class SFTLearner(sft.SFTLearner):
    __doc__ = sft.SFTLearner.__doc__

    initial_weights = ""
    """Checksum of the weights before the first step; empty until a run needs it."""

    def train(self, train_ds: Any, eval_ds: Any = None, *, out: str | Path | None = None) -> Decoder:
        """Train as `covey.sft.learner.SFTLearner.train` does.

        Args:
            train_ds, eval_ds: see there. With `out`, the loss on `eval_ds` is also computed before and after training.
            out: the run folder: metrics, checkpoints and report go there. A run that is in it already is resumed from
                its last checkpoint, and gives the bits of a run that was never stopped. Without `out` nothing is
                written.

        Raises:
            ResumeError: settings, data or weights are not those that the run in `out` was saved with.
            Stopped: a signal came (Ctrl-C, SIGTERM); the run is saved, and the same call resumes it.
        """
        if out is None:
            return super().train(train_ds, eval_ds)
        recipe = SFTRecipe(
            name=_name(Path(out)),
            seed=self.seed,
            model=_model_options(self.model),
            data=SFTDataConfig(task=FROM_PYTHON),
            training=self.config,
        )
        loader = train_ds if isinstance(train_ds, ExampleLoader) else self.loader(self.fit(train_ds).examples)
        held_out = () if eval_ds is None else self.fit(eval_ds, HELD_OUT).examples
        _train_in_folder(SFTRun, self, recipe, Path(out), partial(self._make_run, recipe, loader, held_out))
        return self.model

    def _make_run(
        self, recipe: SFTRecipe, loader: ExampleLoader, held_out: Sequence[Row], resources: RunResources
    ) -> SFTRun:
        trainer = self.prepare(total_steps(recipe.training, len(loader)))
        self.initial_weights = self.initial_weights or _checksum([trainer.params])
        counts = {"examples": len(loader.rows)}
        return SFTRun(recipe, resources, self, loader, held_out, self.initial_weights, counts)


def _train_in_folder(
    kind: type[Run[Any]],
    learner: Learner | sft.SFTLearner,
    recipe: Recipe | SFTRecipe,
    out: Path,
    make: Callable[[RunResources], Run[Any]],
) -> None:
    """Begin a run in the new folder `out`, or resume the one that is there."""
    validate(recipe)
    out = out.expanduser()
    check_shared_folder(out)
    resuming = channel.broadcast(is_run(out), "run folder")
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
    if not resuming and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CoveyError("this folder is not empty", want="a new or empty folder", fix='out="ANOTHER"', where=str(out))
    opened = reopen_folder(out, recipe, kind.step_files) if resuming else create_folder(out, recipe)
    with opened as folder:
        kind.execute(recipe, folder, make)


def _checksum(states: Sequence[nnx.State[Any, Any]]) -> str:
    """Return a checksum of all weights: a resumed run must have begun with the same ones."""
    checksum = sum(checks.fingerprint(jax.tree.leaves(state)) for state in states) % 2**32
    return f"a model from Python, checksum {checksum:08x}"


def _model_options(model: Decoder) -> ModelOptions:
    types: dict[str, Any] = {"dtype": str(model.head_weight.dtype), "compute_dtype": str(model.dtype)}
    return ModelOptions(source=sources.FROM_PYTHON, **types)


def _name(out: Path) -> str:
    """Return the name of a run in the folder `out`, in the characters that a recipe's name may have."""
    return re.sub(r"[^\w.-]", "-", out.name).lstrip(".-") or "run"
