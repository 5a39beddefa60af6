"""`train_grpo`: load a model and train it in one call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from jax.sharding import Mesh

from covey.config.base import check_keywords, suggest
from covey.config.recipe import AnyRecipe, is_run, validate
from covey.config.schema import (
    EvalConfig,
    GRPOConfig,
    LoRAConfig,
    ModelOptions,
    RLTrainingConfig,
    RolloutConfig,
)
from covey.data.rows import Row
from covey.data.sources import read_rows
from covey.errors import CoveyError
from covey.models.decoder import Decoder, DecoderOptions
from covey.models.loading import sources
from covey.models.lora import check_rank
from covey.monitor.record import Observer
from covey.recipes.load_model import absolute_path, load_for
from covey.rewards.call import RewardFn, RewardFns, check_columns, check_evaluation_columns, resolve_reward_fns
from covey.rewards.scoring import RewardRunner
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import as_recipe
from covey.rl.roles import ClusterConfig, Role
from covey.sampling.responder import ResponderFactory
from covey.text.tokenizer import Tokenizer


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
    validate(as_recipe(config, grpo_config, functions, environments, reward_runner, eval_config))
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
