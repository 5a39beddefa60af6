"""Execute runs of reinforcement learning, and make one from its recipe. `base.Run` has the loop.

In addition to the files of every run, `samples.jsonl` holds each completion with its scores.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe
from covey.data import Dataset
from covey.data import sources as data_source
from covey.data.loader import PromptLoader
from covey.data.rows import Row
from covey.files import require_entry
from covey.models.decoder import Decoder
from covey.models.loading.weights import load_critic, load_value_model
from covey.models.lora import with_lora, without_lora
from covey.models.value_model import ValueModel, make_value_model
from covey.monitor.formats import SampleLine
from covey.monitor.record import StepRecord, total_steps
from covey.parallel import checks
from covey.parallel.mesh import rollout_mesh_from_config
from covey.parallel.reshard import stack_bytes
from covey.parallel.wire import deserialize, serialize
from covey.rewards import RewardRunner, check_columns, check_evaluation_columns
from covey.rl.cluster import RLCluster
from covey.rl.drawn_steps import own_share
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner
from covey.rl.ppo import PPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.rl.token_values import token_values_interval
from covey.run.base import Run, RunResources
from covey.run.inference import count_plain, fit_rows, open_environments
from covey.run.load_model import check_same_weights, decoder_options, load_to_train, with_digest
from covey.sampling.noise import DRAW_VERSION

log = logging.getLogger(__name__)
DRAWN = "drawn_ahead"
"""Array of a checkpoint with the serialized steps that earlier weights have drawn, a row from each process."""
OF_SAMPLES = (
    "rewards",
    "reward_model",
    "reward_safety.",
    "envs.",
    "rollout.",
    "grpo.max_sampling_rounds",
    "grpo.overlong_",
    "grpo.reward_weights",
)
"""Beginnings of the settings by which steps are drawn: where one was changed, they are drawn anew, by the last weights.
"""


@dataclass(eq=False)
class RLRun(Run[Recipe]):
    """A run of reinforcement learning.

    Attributes:
        other_models: origin of reward model and critic by role, for those that the recipe names.
    """

    learner: Learner
    other_models: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load_data(cls, recipe: Recipe) -> Dataset:
        data = data_source.load_data(recipe.data)
        check_columns(recipe.rewards, data.train)
        check_columns(recipe.rewards, data.test)
        check_evaluation_columns(recipe.evaluation, data.test)
        return data

    @classmethod
    def _load_inputs(cls, recipe: Recipe) -> tuple[Dataset, Mesh | None]:
        data, mesh = super()._load_inputs(recipe)
        role_meshes(recipe, mesh)  # refused before a folder is made
        return data, mesh

    @classmethod
    def from_recipe(cls, recipe: Recipe, data: Dataset, mesh: Mesh | None, resources: RunResources) -> Self:
        model, tokenizer, origin = load_to_train(recipe, mesh, resources.folder)
        values, other_models = load_value_models(recipe, model, mesh)
        cluster = RLCluster(
            actor=model,
            critic=values.get(Role.CRITIC),
            reward=values.get(Role.REWARD),
            tokenizer=tokenizer,
            cluster_config=ClusterConfig(role_meshes(recipe, mesh), recipe.training, recipe.rollout),
            environments=resources.stack.enter_context(open_environments(recipe.envs)),
        )
        learner = make_learner(recipe, cluster, resources.stack.enter_context(RewardRunner(recipe.reward_safety)))
        rows, held_out, unfit = fit_data(learner, data.train, data.test)
        loader = PromptLoader(rows, recipe.training.prompts_per_step, seed=recipe.seed)
        counts = {"prompts": len(loader.rows), **unfit}
        return cls(recipe, resources, learner, loader, held_out, origin, counts, other_models)

    def prepare(self) -> int:
        recipe, learner = self.recipe, self.learner
        total = total_steps(recipe.training, len(self.loader), recipe.grpo.num_iterations)
        learner.token_values_every = token_values_interval(recipe.training, recipe.grpo.num_generations, total)
        learner.check_data(self.loader.rows, self.held_out)
        learner.prepare(total)
        self.trained = cluster = learner.cluster
        self.tokenizer, self.model_config = cluster.tokenizer, cluster.rollout.model.config
        self.counts = {**self.counts, "plain": count_plain(self.loader.rows, self.tokenizer, recipe.envs.environment)}
        return total

    def measure(self, name: str) -> dict[str, Any]:
        evaluation = self.learner.evaluate(self.held_out, self.progress.advance)
        summary = evaluation.summary()
        self.progress.evaluation(name, summary, SampleLine.of(evaluation.groups))
        self.folder.write_answers(name, evaluation.groups, evaluation.correct)
        for preset, other in evaluation.others.items():
            self.folder.write_answers(f"{name}-{preset}", other.groups, other.correct)
        return summary

    def _evaluate_before(self) -> dict[str, Any] | None:
        self.learner.rehearse(self.loader.rows)
        return super()._evaluate_before()

    def train(self) -> None:
        self.learner.train_steps(self.loader, self.held_out or None)  # `train` of a script's learner evaluates too

    def show(self, record: StepRecord) -> None:
        self.progress.step(record.metrics, SampleLine.of(record.groups))

    def track(self, record: StepRecord) -> None:
        recipe = self.recipe
        due = recipe.log_completions and record.due(recipe.log_completions_every_n_steps)
        groups = record.groups if due else ()
        self.resources.trackers.log(record.step, record.metrics, groups, recipe.num_completions_to_log)

    def arrays(self) -> dict[str, Any]:
        drawn = [step.without_times() for step in self.learner.drawn_ahead()]
        return super().arrays() | ({DRAWN: stack_bytes(serialize(drawn))} if self.learner.lead else {})

    def array_shapes(self, step: int) -> dict[str, Any]:
        saved = self.folder.saves.shapes(step) if self.learner.lead else {}
        return super().array_shapes(step) | {name: shape for name, shape in saved.items() if name == DRAWN}

    def load_arrays(self, arrays: dict[str, Any], step: int) -> None:
        by_process = [deserialize(row.tobytes()) for row in np.asarray(arrays.pop(DRAWN, ()))]
        drawn = [own_share(parts) for parts in zip(*by_process, strict=True)]
        self.learner.drawn = [] if any(name.startswith(OF_SAMPLES) for name in self.changed) else drawn
        super().load_arrays(arrays, step)

    def checkpoint_metadata(self) -> dict[str, Any]:
        return {"learner": self.learner.state(), "other_models": self.other_models, "draw_version": DRAW_VERSION}

    def load_metadata(self, extra: Mapping[str, Any], step: int) -> None:
        state = require_entry(extra, "learner", dict)
        self.learner.load_state(state | ({"beta": self.learner.beta} if "grpo.beta" in self.changed else {}), step)

    def check_same_run(self, extra: Mapping[str, Any]) -> None:
        super().check_same_run(extra)
        if extra.get("draw_version", 1) != DRAW_VERSION:
            log.warning(
                "the run began with another draw of tokens (an inverse CDF, now Gumbel-max in two levels): it goes on"
                " with samples of the same distribution, but not with those that it would have drawn"
            )
        then = require_entry(extra, "other_models", dict)
        for role, now in self.other_models.items():
            if role in then:
                check_same_weights(then[role], now, self.folder.path, role)


def load_value_models(
    recipe: Recipe, actor: Decoder, mesh: Mesh | None
) -> tuple[dict[Role, ValueModel], dict[str, str]]:
    """Load the critic, if the algorithm has one, and the reward model, if the recipe names one.

    A critic that the recipe does not name is the actor's base with a new value head; with adapters if the actor has
    some.

    Returns:
        The models by role, and the origin of each that the recipe names: no resumed run uses another.
    """
    options, models, origins = recipe.model, dict[Role, ValueModel](), dict[str, str]()
    if recipe.reward_model:
        loaded = load_value_model(recipe.reward_model)
        models[Role.REWARD], origins["reward_model"] = loaded.model, with_digest(loaded.origin)
    if not algorithm_of(recipe.grpo).needs_critic:
        return models, origins
    if recipe.critic:
        loaded = load_critic(recipe.critic, mesh=mesh, **decoder_options(options))
        critic, origins["critic"] = loaded.model, with_digest(loaded.origin)
        checks.check_same("critic", lambda: origins["critic"], "the same weights for all of them")
    else:
        critic = make_value_model(without_lora(actor), share=bool(options.lora.rank))
    models[Role.CRITIC] = with_lora(critic, options.lora, seed=recipe.seed + 1) if options.lora.rank else critic
    return models, origins


def make_learner(recipe: Recipe, cluster: RLCluster, runner: RewardRunner) -> Learner:
    """Make the learner of the recipe's algorithm; it shows nothing by itself."""
    kind: Callable[..., Learner] = PPOLearner if algorithm_of(recipe.grpo).needs_critic else GRPOLearner
    return kind(
        rl_cluster=cluster,
        reward_fns=recipe.rewards,
        eval_config=recipe.evaluation,
        observers=(),
        reward_runner=runner,
        **{"ppo_config" if kind is PPOLearner else "grpo_config": recipe.grpo},
    )


def fit_data(
    learner: Learner, train_rows: Sequence[Row], test_rows: Sequence[Row]
) -> tuple[Sequence[Row], Sequence[Row], dict[str, int]]:
    """Leave out or cut prompts that are too long, if the settings allow it; return training and held-out rows, and the
    numbers of the prompts that were dropped or truncated.
    """
    worker, training = learner.cluster.rollout, learner.cluster.config.training_config
    train, test = (fit_rows(rows, worker, training) for rows in (train_rows, test_rows))
    unfit = {name: getattr(train, name) + getattr(test, name) for name in ("dropped", "truncated")}
    if counts := " and ".join(f"{count} {name}" for name, count in unfit.items() if count):
        log.warning(f"prompts longer than rollout.max_prompt_length: {counts}")
    return train.rows, test.rows, unfit


def role_meshes(recipe: Recipe, actor: Mesh | None) -> dict[Role, Mesh]:
    """Return the mesh of each role that has one: that of the actor, and what `role_to_mesh` sets beside it.

    Raises:
        RecipeError: there are too few devices for both, or the processes would not have whole copies of the weights.
    """
    meshes = {Role.ACTOR: actor, Role.ROLLOUT: rollout_mesh_from_config(recipe.role_to_mesh.rollout, actor)}
    return {role: mesh for role, mesh in meshes.items() if mesh is not None}
