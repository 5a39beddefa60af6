"""Learners whose `train` keeps its run in a folder when `out` names one.

These are `covey.GRPOLearner`, `covey.PPOLearner` and `covey.SFTLearner`: the learners of `rl` and `sft`, which know no
run folders, with the run that `base.Run` makes around them. The folder has the same files as that of a command. Its
recipe has the learner's settings and the model that it loaded; data are in the script alone, so only the script can
resume the run.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

import jax
from flax import nnx
from jax.sharding import Mesh

from covey.config.base import check_keywords, suggest
from covey.config.recipe import AnyRecipe, Recipe, SFTRecipe, is_from_python, is_run, load_any, validate
from covey.config.schema import (
    DataConfig,
    EnvsConfig,
    EvalConfig,
    GRPOConfig,
    LoRAConfig,
    ModelOptions,
    RewardSafetyConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTConfig,
    SFTDataConfig,
)
from covey.config.schema.data import FROM_PYTHON
from covey.data.examples import ExampleLoader
from covey.data.loader import PromptLoader
from covey.data.rows import Row, as_rows
from covey.data.sources import read_rows
from covey.errors import CoveyError, RecipeError, ResumeError
from covey.models.decoder import Decoder, DecoderOptions
from covey.models.loading import sources
from covey.models.lora import check_rank
from covey.monitor.record import Observer, StepLines, total_steps
from covey.parallel import channel, checks
from covey.parallel.checks import check_shared_folder
from covey.parallel.reshard import flatten
from covey.rewards import (
    RewardFn,
    RewardFns,
    RewardRunner,
    check_columns,
    check_evaluation_columns,
    function_names,
    resolve_reward_fns,
)
from covey.rl import grpo, ppo
from covey.rl.cluster import RLCluster
from covey.rl.learner import Learner
from covey.rl.roles import ClusterConfig, Role
from covey.run.base import Run, RunResources
from covey.run.folder import create_folder, reopen_folder
from covey.run.load_model import absolute_path, load_for, with_digest
from covey.run.rl import RLRun, fit_data
from covey.run.sft import HELD_OUT, SFTRun
from covey.sampling.responder import ResponderFactory
from covey.sft import learner as sft
from covey.sft.batch import supervised_loss
from covey.text.tokenizer import Tokenizer


class _RLLearner(Learner):
    """RL learner with run folders, whose settings are checked as those of a recipe."""

    _settings: Recipe

    if not TYPE_CHECKING:  # type checkers see the arguments of the learners of `rl`

        def __init__(self, *args: Any, **keywords: Any):
            super().__init__(*args, **keywords)
            environments, roles = self.cluster.rollout.environments, self.cluster.inference
            first, last = bool(environments and environments.scores), roles.has(Role.REWARD)
            self._settings = _settings_of(
                self.cluster.config,
                self.config,
                self.reward_fns[first : len(self.reward_fns) - last],
                environments,
                self.runner,
                self.eval_config,
                reward_model=sources.FROM_PYTHON if last else None,
                critic=sources.FROM_PYTHON if roles.has(Role.CRITIC) else None,
            )
            validate(self._settings)

    base = ""
    """Origin of the weights that `train_grpo` loaded, with their digest."""

    initial_weights = ""
    """Checksum of the weights before the first step; empty until a run needs it."""

    evaluations: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Metrics of the held-out rows `before` and `after` the last call of `train`; empty if it got no such rows."""

    def train(self, train_ds: Any, eval_ds: Any = None, *, out: str | Path | None = None) -> RLCluster:
        """Train as `covey.rl.learner.Learner.train` does.

        Args:
            train_ds, eval_ds: see there. `eval_ds` is also evaluated before and after training: `evaluations` has the
                metrics.
            out: the run folder: metrics, completions, checkpoints and report go there. A run that is in it already is
                resumed from its last checkpoint, and gives the bits of a run that was never stopped. Without `out`
                nothing is written.

        Raises:
            ResumeError: settings, data or weights are not those that the run in `out` was saved with.
            Stopped: a signal came (Ctrl-C, SIGTERM); the run is saved, and the same call resumes it.
        """
        ready = isinstance(train_ds, PromptLoader)
        rows, held_out, unfit = fit_data(
            self, [] if ready else as_rows(train_ds), [] if eval_ds is None else as_rows(eval_ds)
        )
        loader = self.loader(train_ds if ready else rows)
        if out is not None:
            recipe = replace(
                self._settings,
                name=_name(Path(out)),
                model=_model_options(self.cluster.rollout.model, self.cluster.source, self.cluster.lora),
            )
            summary = _train_in_folder(
                RLRun, self, recipe, Path(out), partial(self._make_run, recipe, loader, held_out, unfit)
            )
            self.evaluations = {name: summary[name] for name in ("before", "after") if summary.get(name)}
            return self.cluster
        _warn_of_unwritten(self.cluster.config.training_config)
        if held_out:
            self.check_data(loader.rows, held_out)
            self._begin(loader, held_out)
            self._evaluate("before", held_out)
        self.train_steps(loader, held_out or None)
        if held_out:
            self._evaluate("after", held_out)
        return self.cluster

    def _evaluate(self, name: str, held_out: Sequence[Row]) -> None:
        """Evaluate before or after training, and show the metrics where steps are shown as lines."""
        self.on_phase("evaluate")
        self.evaluations = {**self.evaluations, name: self.evaluate(held_out).summary()}
        for observer in self.observers:
            if isinstance(observer, StepLines):
                observer.evaluation(name, self.evaluations[name])

    def _make_run(
        self,
        recipe: Recipe,
        loader: PromptLoader,
        held_out: Sequence[Row],
        unfit: Mapping[str, int],
        resources: RunResources,
    ) -> RLRun:
        self.check_data(loader.rows, held_out)
        self.initial_weights = self.initial_weights or self._checksum_of_models()
        self.prepare(total_steps(recipe.training, len(loader), recipe.grpo.num_iterations))
        run = RLRun(
            recipe, resources, self, loader, held_out, self.initial_weights, {"prompts": len(loader.rows), **unfit}
        )
        run.base = self.base or with_digest(self.cluster.source)
        run.former_origin = self._checksum_of_models() if resources.folder.resuming else ""
        return run

    def _checksum_of_models(self) -> str:
        """Return the checksum of the models: before `prepare` of those that were given, whatever the loss needs."""
        return _checksum([nnx.split(self.cluster.program_actor)[1], *self.cluster.inference.params.values()])


class GRPOLearner(_RLLearner, grpo.GRPOLearner):
    __doc__ = grpo.GRPOLearner.__doc__


class PPOLearner(_RLLearner, ppo.PPOLearner):
    __doc__ = ppo.PPOLearner.__doc__


class SFTLearner(sft.SFTLearner):
    __doc__ = sft.SFTLearner.__doc__

    initial_weights = ""
    """Checksum of the weights before the first step; empty until a run needs it."""

    _settings: SFTRecipe

    if not TYPE_CHECKING:

        def __init__(self, **keywords: Any):
            super().__init__(**keywords)
            self._settings = SFTRecipe(seed=self.seed, data=SFTDataConfig(task=FROM_PYTHON), training=self.config)
            # A loss of the user's may have metrics of its own.
            own: Any = {} if self.loss_fn is supervised_loss else {"show": (), "keep_best": ""}
            validate(replace(self._settings, training=replace(self.config, **own)))

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
            _warn_of_unwritten(self.config)
            return super().train(train_ds, eval_ds)
        recipe = replace(self._settings, name=_name(Path(out)), model=_model_options(self.program_model))
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
) -> dict[str, Any]:
    """Begin a run in the new folder `out`, or resume the one that is there; return its summary."""
    out = out.expanduser()
    check_shared_folder(out)
    in_use = out.exists() and (not out.is_dir() or any(out.iterdir()))
    resuming, in_use = channel.broadcast((is_run(out), in_use), "run folder")  # process 0 soon writes there
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
    opened = reopen_folder(out, recipe, kind.step_files) if resuming else create_folder(out, recipe)
    with opened as folder:
        return kind.execute(recipe, folder, make)


def train_grpo(
    *,
    model: str,
    train_dataset: Any,
    eval_dataset: Any = None,
    reward_funcs: RewardFns = (),
    lora: LoRAConfig | None = None,
    grpo_config: GRPOConfig | None = None,
    training_config: RLTrainingConfig | None = None,
    rollout_config: RolloutConfig | None = None,
    eval_config: EvalConfig | None = None,
    reward_runner: RewardRunner | None = None,
    environments: ResponderFactory | None = None,
    tokenizer: Tokenizer | None = None,
    role_to_mesh: Mapping[Role, Mesh] | None = None,
    observers: Sequence[Observer] | None = None,
    out: str | Path | None = None,
    **options: Unpack[DecoderOptions],
) -> GRPOLearner:
    """Train a model by GRPO or one of its variants: load it into an `RLCluster`, and train it by a `GRPOLearner`.

    Args:
        model: a folder of a model or of a run, a PEFT adapter whose base can be loaded, `hf:org/name`, or a name such
            as `smollm2-135m`.
        train_dataset: rows with a `prompt` and the columns that the reward functions need (a list of dicts, a
            `datasets.Dataset`, a table), or the path of a file of them (.jsonl, .json, .csv, .parquet).
        eval_dataset: held-out rows, in the same forms. They are evaluated before and after training, and every
            `training_config.eval_every_n_steps` steps.
        reward_funcs: reward functions, or names of built-in ones; see `Learner`.
        lora: adapters to train, in place of all weights.
        grpo_config: the algorithm.
        training_config: steps, batch and optimizer.
        rollout_config: sampling settings, and the seed of the run.
        eval_config: number of held-out prompts, their sampling, and the functions that say what is right.
        reward_runner: sets where reward functions run and how their failures are handled.
        environments: runs the environment in which the model acts.
        tokenizer: replaces that of the model.
        role_to_mesh: devices of each role; one device when not given.
        observers: called after each step, in place of the line that is printed.
        out: the run folder, in which a run that is there already is resumed; nothing is written when not given.
        options: types and rematerialisation of the model; see `RLCluster.load`.

    Returns:
        The learner: its `history` has the metrics of each step, its `evaluations` those before and after, and
        `learner.cluster.save(FOLDER)` writes the model.

    Raises:
        WeightsError: the model is not available, or not supported.
        DataError: a data set is empty, or has no prompts.
        RewardError: a reward function is unknown, or a column that it needs is missing.
        RecipeError: there is no reward, or settings contradict each other.
        ResumeError: the run in `out` was saved with other settings, data or weights.
        Stopped: a signal came (Ctrl-C, SIGTERM); with `out` the run is saved, and the same call resumes it.

    Example:
        def short(completions, **columns):
            return [1.0 if len(text.split()) <= 8 else 0.0 for text in completions]

        learner = train_grpo(
            model="smollm2-135m",
            reward_funcs=short,
            train_dataset=[{"prompt": "Name a river."}, {"prompt": "Name a fish."}],
            training_config=RLTrainingConfig(max_steps=20, prompts_per_step=2),
        )
        learner.history["reward"]
    """
    _check_options(options)
    if not is_run(model):
        sources.check_source(model)
    if lora is not None:
        check_rank(lora)
    functions = resolve_reward_fns(reward_funcs)
    with _naming("train_dataset"):
        rows = read_rows(train_dataset)
        check_columns(functions, rows)
    with _naming("eval_dataset"):
        held_out = None if eval_dataset is None else _read_held_out(eval_dataset, functions, eval_config)
    config = ClusterConfig(role_to_mesh or {}, training_config or RLTrainingConfig(), rollout_config or RolloutConfig())
    validate(_settings_of(config, grpo_config, functions, environments, reward_runner, eval_config))
    actor, own_tokenizer, origin = _load_actor(model, lora or LoRAConfig(), config, options)
    cluster = RLCluster(
        actor=actor, tokenizer=tokenizer or own_tokenizer, cluster_config=config, environments=environments
    )
    cluster.source, cluster.lora = absolute_path(model), lora
    del actor
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_funcs=functions,
        grpo_config=grpo_config,
        eval_config=eval_config,
        reward_runner=reward_runner,
        observers=observers,
    )
    learner.base = origin
    learner.train(rows, held_out, out=out)
    return learner


def _settings_of(
    config: ClusterConfig,
    algorithm: GRPOConfig | None,
    functions: Sequence[RewardFn],
    environments: ResponderFactory | None,
    runner: RewardRunner | None,
    evaluation: EvalConfig | None,
    **more: Any,
) -> Recipe:
    """Return the settings of a script's run as a recipe, which has the same checks; `more` are further settings."""
    own = getattr(environments, "config", None)
    return Recipe(
        seed=config.rollout_config.seed,
        data=DataConfig(task=FROM_PYTHON),
        rewards=tuple(function_names(functions)),
        envs=own
        if isinstance(own, EnvsConfig)
        else EnvsConfig(environment=environments.name if environments else None),
        reward_safety=runner.safety if runner else RewardSafetyConfig(),
        rollout=config.rollout_config,
        grpo=algorithm or GRPOConfig(),
        training=config.training_config,
        evaluation=evaluation or EvalConfig(),
        **more,
    )


def _warn_of_unwritten(training: RLTrainingConfig | SFTConfig) -> None:
    """Warn of settings about checkpoints where no folder gets any."""
    names = "checkpoint_every_n_steps", "keep_best", "checkpoint_path"
    if unwritten := ", ".join(f"training.{name}" for name in names if getattr(training, name)):
        logging.getLogger(__name__).warning(
            f"nothing is written without train(..., out=FOLDER), but {unwritten} is set"
        )


def _load_actor(
    source: str, lora: LoRAConfig, config: ClusterConfig, options: DecoderOptions
) -> tuple[Decoder, Tokenizer, str]:
    given: dict[str, Any] = {"dtype" if name == "param_dtype" else name: value for name, value in options.items()}
    settings = ModelOptions(source=source, lora=lora, **given)
    return load_for(AnyRecipe(seed=config.rollout_config.seed, model=settings), config.mesh(Role.ACTOR))


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse a keyword that neither `train_grpo` nor the loading of a model has, before anything is read."""
    known = ["model", "train_dataset", *(train_grpo.__kwdefaults__ or ()), *DecoderOptions.__annotations__]
    check_keywords("train_grpo", options, dict.fromkeys(known), partial(suggest, object, more=known))


def _read_held_out(data: Any, functions: Sequence[RewardFn], config: EvalConfig | None) -> list[Row]:
    """Read held-out rows; check that they have the columns of the reward functions and of the evaluation's."""
    rows = read_rows(data)
    check_columns(functions, rows)
    check_evaluation_columns(config or EvalConfig(), rows)
    return rows


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Add the name of an argument to the errors about its value."""
    try:
        yield
    except CoveyError as error:
        where = f"{argument}: {error.where}" if error.where else argument
        raise type(error)(error.what, want=error.want, fix=error.fix, where=where) from None


def _checksum(states: Sequence[nnx.State[Any, Any]]) -> str:
    """Return a checksum of all weights: a resumed run must have begun with the same ones."""
    checksum = sum(checks.fingerprint(jax.tree.leaves(state)) for state in states) % 2**32
    return f"a model from Python, checksum {checksum:08x}"


def _model_options(model: Decoder, source: str = "", lora: LoRAConfig | None = None) -> ModelOptions:
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
