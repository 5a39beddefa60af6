"""Learners whose `train` keeps its run in a folder when `out` names one.

These are `covey.GRPOLearner`, `covey.PPOLearner` and `covey.SFTLearner`: the learners of `rl` and `sft`, which know no
run folders, with the run that `base.Run` makes around them. The folder has the same files as that of a command. Its
recipe has the learner's settings; model and data are in the script alone, so only the script can resume the run.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from covey.config.recipe import Recipe, SFTRecipe, is_from_python, is_run, load_any, validate
from covey.config.schema import DataConfig, ModelOptions, SFTDataConfig
from covey.config.schema.data import FROM_PYTHON
from covey.data import Dataset
from covey.data import sources as data_source
from covey.data.examples import ExampleLoader
from covey.data.loader import PromptLoader
from covey.data.rows import as_rows
from covey.errors import CoveyError, RecipeError, ResumeError
from covey.models.decoder import Decoder
from covey.models.loading import sources
from covey.monitor.record import StepLines, total_steps
from covey.monitor.run_files import METRICS
from covey.monitor.writer import read_rows
from covey.parallel import distributed
from covey.parallel.checks import check_shared_folder
from covey.rewards import check_columns, function_names
from covey.rl import grpo, ppo
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import evaluation_functions
from covey.rl.learner import Learner
from covey.run.base import Run, RunResources
from covey.run.folder import create_folder, reopen_folder
from covey.run.rl import LearnerRun
from covey.run.sft import HELD_OUT, SFTLearnerRun
from covey.sft import learner as sft

ANOTHER_FOLDER = 'undo that; or begin a new run: out="ANOTHER"'


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
        held_out = () if eval_ds is None else as_rows(eval_ds)
        make = partial(_RLRun, self, self.loader(train_ds), held_out, recipe)
        _train_in_folder(_RLRun, self, recipe, Path(out), make)
        return self.cluster

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
        data, options = SFTDataConfig(task=FROM_PYTHON), _model_options(self.model)
        recipe = SFTRecipe(name=_name(Path(out)), seed=self.seed, model=options, data=data, training=self.config)
        loader = train_ds if isinstance(train_ds, ExampleLoader) else self.loader(self.fit(train_ds).examples)
        held_out = () if eval_ds is None else self.fit(eval_ds, HELD_OUT).examples
        _train_in_folder(_SFTRun, self, recipe, Path(out), partial(_SFTRun, self, loader, held_out, recipe))
        return self.model


class _RLRun(LearnerRun):
    """Run of a learner that a script has made."""

    def __init__(
        self,
        learner: _RLLearner,
        loader: PromptLoader,
        held_out: Sequence[Any],
        recipe: Recipe,
        resources: RunResources,
    ):
        super().__init__(recipe, Dataset(FROM_PYTHON, loader.rows, held_out), None, resources)
        self.learner, self.loader = learner, loader
        self.total = total_steps(recipe.training, len(loader), recipe.grpo.num_iterations)
        check_columns(learner.reward_fns, loader.rows)
        if held_out:
            check_columns((*learner.reward_fns, *evaluation_functions(recipe.evaluation)), held_out)
        learner.prepare(self.total)
        learner.check_prompts(loader.rows)
        assert learner.cluster.trainer is not None, "prepared above"
        models = [learner.cluster.trainer.params, *learner.cluster.inference.params.values()]
        self.origin = learner.initial_weights = learner.initial_weights or _checksum(models)

    @classmethod
    def load_data(cls, recipe: Recipe) -> Dataset:
        return data_source.load(recipe.data)

    def initial_summary(self) -> dict[str, Any]:
        return {"model": self.origin, "data": {"prompts": len(self.loader.rows)}}

    def evaluate(self, name: str) -> dict[str, Any]:
        if not self.data.test:
            return {}
        self.phase(f"evaluating {name} training")
        return self.show_evaluation(name, self.learner.evaluate(self.data.test, self.progress.advance))

    def refuse_another_run(self, extra: Mapping[str, Any]) -> None:
        self.refuse_other_settings(extra, ANOTHER_FOLDER)

    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        super().load_state(state, extra, step)
        self.learner.history.rows[:] = _rows_of(self.folder.path)

    def train(self) -> None:
        with _observed(self.learner, self):
            super().train()


class _SFTRun(SFTLearnerRun):
    """Run of a supervised learner that a script has made."""

    def __init__(
        self,
        learner: SFTLearner,
        loader: ExampleLoader,
        held_out: Sequence[Any],
        recipe: SFTRecipe,
        resources: RunResources,
    ):
        super().__init__(recipe, Dataset(FROM_PYTHON, loader.rows, held_out), None, resources)
        self.learner, self.loader, self.held_out = learner, loader, list(held_out)
        self.total = total_steps(recipe.training, len(loader))
        self.trainer = learner.prepare(self.total)
        self.origin = learner.initial_weights = learner.initial_weights or _checksum([self.trainer.params])

    @classmethod
    def load_data(cls, recipe: SFTRecipe) -> Dataset:
        return data_source.load_examples(recipe.data)

    def initial_summary(self) -> dict[str, Any]:
        return {"model": self.origin, "data": {"examples": len(self.loader.rows)}}

    def evaluate(self, name: str) -> dict[str, Any]:
        if not self.held_out:
            return {}
        self.phase(f"evaluating {name} training")
        metrics = self.learner.held_out_loss(self.held_out) | {"examples": len(self.held_out)}
        self.progress.evaluation(name, metrics)
        return metrics

    def refuse_another_run(self, extra: Mapping[str, Any]) -> None:
        self.refuse_other_settings(extra, ANOTHER_FOLDER)

    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        super().load_state(state, extra, step)
        self.learner.history.rows[:] = _rows_of(self.folder.path)

    def train(self) -> None:
        with _observed(self.learner, self):
            super().train()


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
    resuming = distributed.agreed(is_run(out), "run folder")
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
    with opened as folder, kind.make_progress(recipe, folder) as progress:
        kind.execute(recipe, folder, progress, make)


@contextmanager
def _observed(learner: Learner | sft.SFTLearner, run: _RLRun | _SFTRun) -> Iterator[None]:
    """Have `run` write and show the steps of `learner`, beside the observers that the user gave."""
    observers, on_phase, on_bad_batch = learner.observers, learner.on_phase, learner.on_bad_batch
    own = [observer for observer in observers if not isinstance(observer, StepLines)]
    learner.observers = [run.write, run.show, *own, run.after_step]
    learner.on_phase = _both(run.phase, on_phase)
    learner.on_bad_batch = _both(run.folder.keep_bad_batch, on_bad_batch)
    try:
        yield
    finally:
        learner.observers, learner.on_phase, learner.on_bad_batch = observers, on_phase, on_bad_batch


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call


def _checksum(states: Sequence[nnx.State[Any, Any]]) -> str:
    """Return a checksum of all weights: a resumed run must have begun with the same ones."""
    checksum = sum(distributed.fingerprint(jax.tree.leaves(state)) for state in states) % 2**32
    return f"a model from Python, checksum {checksum:08x}"


def _model_options(model: Decoder) -> ModelOptions:
    types: dict[str, Any] = {"dtype": str(model.head_weight.dtype), "compute_dtype": str(model.dtype)}
    return ModelOptions(source=sources.FROM_PYTHON, **types)


def _name(out: Path) -> str:
    """Return the name of a run in the folder `out`, in the characters that a recipe's name may have."""
    return re.sub(r"[^\w.-]", "-", out.name).lstrip(".-") or "run"


def _rows_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps that the run in `folder` made before, NaN where a value was not finite."""
    rows = read_rows(folder / METRICS)
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
