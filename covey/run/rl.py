"""Execute an RL run from its recipe: load, evaluate, train, evaluate, write the results. `base.Run` has the loop.

In addition to the files of every run, `samples.jsonl` holds each completion with its scores.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe
from covey.config.recipe import load as load_recipe
from covey.data import Dataset
from covey.data import sources as data_source
from covey.data.loader import PromptLoader
from covey.envs.runner import open_environments
from covey.files import folder_below
from covey.models.decoder import Decoder
from covey.models.loading.weights import load_value_model
from covey.models.lora import with_lora, without_lora
from covey.models.value_model import ValueModel, make_value_model
from covey.monitor.progress import SampleLine
from covey.monitor.record import StepRecord, total_steps
from covey.monitor.run_files import CHECKPOINTS
from covey.monitor.writer import completion_text, prompt_text
from covey.parallel import distributed
from covey.parallel.mesh import rollout_mesh_from_config
from covey.rewards import RewardRunner, check_columns, check_evaluation_columns
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import Evaluation, during_training
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner
from covey.rl.ppo import PPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.rl.token_values import interval
from covey.run.base import Run, RunResources
from covey.run.inference import evaluate_held_out, fit_to_recipe
from covey.run.load_model import decoder_options, load_for, refuse_other_weights, with_digest
from covey.run.settings import may_need_earlier_values, with_earlier_values
from covey.text.tokenizer import Tokenizer
from covey.train.checkpoint import Checkpointer
from covey.train.json_lines import require_entry
from covey.types import Group

log = logging.getLogger(__name__)


def train(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Run `recipe` in the new folder `out`; return the content of `summary.json`."""
    return RLRun.start(recipe, out)


def resume(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Resume from the last checkpoint in `folder` (from the start when there is none); the result equals that of an
    uninterrupted run. `overrides` change its recipe, where changes are allowed (`settings`).
    """
    recipe = load_recipe(folder, overrides)
    with Checkpointer(folder_below(folder, CHECKPOINTS), read_only=True) as saves:
        if may_need_earlier_values(recipe) and saves.latest() is not None:
            extra = saves.restore(target={}, subset=True)[1]
            recipe = with_earlier_values(recipe, require_entry(extra, "settings", dict))
    return RLRun.resume(recipe, folder)


class LearnerRun(Run[Recipe]):
    """An RL run in its folder, wherever its learner comes from: a recipe or a script.

    Attributes:
        learner: trains; a subclass makes it or gets it.
    """

    learner: Learner

    def train(self) -> None:
        training, group = self.recipe.training, self.recipe.grpo.num_generations
        self.learner.token_values_every = interval(training, group, self.total)
        self.learner.train(self.loader, self.data.test or None)

    @property
    def step(self) -> int:
        return self.learner.step

    def state(self) -> Any:
        return self.learner.cluster.state()

    def state_shapes(self) -> Any:
        return self.learner.cluster.state_shapes()

    def checkpoint_metadata(self) -> dict[str, Any]:
        return {"learner": self.learner.state()}

    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        self.learner.cluster.load_state(state, step)
        self.learner.load_state(require_entry(extra, "learner", dict), step)

    def _evaluate_before(self) -> dict[str, Any] | None:
        self.learner.rehearse(self.loader.rows)
        return super()._evaluate_before()

    def show_evaluation(self, name: str, evaluation: Evaluation) -> dict[str, Any]:
        """Show the evaluation `name` and write it to the folder; return its metrics."""
        summary = evaluation.summary()
        self.progress.evaluation(name, summary, _lines(evaluation.groups))
        self.resources.trackers.log(self.step, {f"eval/{what}": value for what, value in summary.items()})
        self.folder.write_answers(name, evaluation.groups, evaluation.correct)
        for preset, other in evaluation.others.items():
            self.folder.write_answers(f"{name}-{preset}", other.groups, other.correct)
        return summary

    def write(self, record: StepRecord) -> None:
        """Write a step's metrics, completions and token values to the folder."""
        super().write(record)
        self.folder.write_samples(record.step, record.groups)
        self.folder.write_token_values(record.step, record.token_values)

    def show(self, record: StepRecord) -> None:
        """Show a step."""
        self.progress.step(record.metrics, _lines(record.groups))


class RLRun(LearnerRun):
    """An RL run by its recipe."""

    def __init__(self, recipe: Recipe, data: Dataset, mesh: Mesh | None, resources: RunResources):
        super().__init__(recipe, data, mesh, resources)
        self._other_models: dict[str, str] = {}
        cluster, self.origin = self._load_cluster()
        self.data, self._unfit = self._fit_prompts(cluster.tokenizer)
        self.loader = PromptLoader(self.data.train, recipe.training.prompts_per_step, seed=recipe.seed)
        self.learner = self._make_learner(cluster)
        self.total = total_steps(recipe.training, len(self.loader), recipe.grpo.num_iterations)
        self.learner.prepare(self.total)
        self.learner.check_prompts(self.loader.rows)

    @classmethod
    def load_data(cls, recipe: Recipe) -> Dataset:
        data = data_source.load(recipe.data)
        check_columns(recipe.rewards, data.train)
        check_columns(recipe.rewards, data.test)
        check_evaluation_columns(recipe.evaluation, data.test)
        return data

    @classmethod
    def _load_inputs(cls, recipe: Recipe) -> tuple[Dataset, Mesh | None]:
        data, mesh = super()._load_inputs(recipe)
        role_meshes(recipe, mesh)  # refused before a folder is made
        return data, mesh

    def initial_summary(self) -> dict[str, Any]:
        return {"model": self.origin, "data": {"prompts": len(self.loader.rows), **self._unfit}}

    def checkpoint_metadata(self) -> dict[str, Any]:
        return {**super().checkpoint_metadata(), "other_models": self._other_models}

    def refuse_another_run(self, extra: Mapping[str, Any]) -> None:
        super().refuse_another_run(extra)
        then = extra.get("other_models")
        for role, now in self._other_models.items():
            if then is None:
                log.warning(f"the run did not record its {role}: assuming that the one at {now} is the same")
            elif role in then:
                refuse_other_weights(then[role], now, self.folder.path, role)

    def _load_cluster(self) -> tuple[RLCluster, str]:
        recipe = self.recipe
        model, tokenizer, origin = load_for(recipe, self.mesh)
        distributed.refuse_differences("model", lambda: origin, "the same weights for all of them")
        reward = self._value_model("reward_model", recipe.reward_model) if recipe.reward_model else None
        critic = self._critic(model) if algorithm_of(recipe.grpo).needs_critic else None
        config = ClusterConfig(role_meshes(recipe, self.mesh), recipe.training, recipe.rollout)
        environments = self.resources.stack.enter_context(open_environments(recipe.envs))
        cluster = RLCluster(
            actor=model,
            critic=critic,
            reward=reward,
            tokenizer=tokenizer,
            cluster_config=config,
            environments=environments,
        )
        return cluster, origin

    def _critic(self, actor: Decoder) -> ValueModel:
        """Return the critic that the recipe names, or the actor's base with a new value head; with adapters if the
        actor has some.
        """
        recipe, options = self.recipe, self.recipe.model
        if recipe.critic:
            how = decoder_options(options)
            base = self._value_model("critic", recipe.critic, new_head=True, mesh=self.mesh, **how)
            origin = self._other_models["critic"]
            distributed.refuse_differences("critic", lambda: origin, "the same weights for all of them")
        else:
            base = make_value_model(without_lora(actor), share=bool(options.lora.rank))
        return with_lora(base, options.lora, seed=recipe.seed + 1) if options.lora.rank else base

    def _value_model(self, role: str, source: str, **how: Any) -> ValueModel:
        """Load the model that the recipe names for `role`; record its origin, so that no resume uses another model."""
        loaded = load_value_model(source, **how)
        self._other_models[role] = with_digest(loaded.origin)
        return loaded.model

    def _make_learner(self, cluster: RLCluster) -> Learner:
        recipe = self.recipe
        common: dict[str, Any] = {
            "rl_cluster": cluster,
            "reward_fns": recipe.rewards,
            "on_phase": self.phase,
            "eval_config": during_training(recipe.evaluation),
            "observers": [self.write, self.show, self.after_step],
            "on_bad_batch": self.folder.keep_bad_batch,
            "reward_runner": self.resources.stack.enter_context(RewardRunner(recipe.reward_safety)),
        }
        if algorithm_of(recipe.grpo).needs_critic:
            return PPOLearner(ppo_config=recipe.grpo, **common)
        return GRPOLearner(grpo_config=recipe.grpo, **common)

    def _fit_prompts(self, tokenizer: Tokenizer) -> tuple[Dataset, dict[str, int]]:
        """Leave out or cut prompts that are too long, if the recipe allows it; return the rest, and counts of them."""
        train, test = (fit_to_recipe(rows, tokenizer, self.recipe) for rows in (self.data.train, self.data.test))
        unfit = {name: getattr(train, name) + getattr(test, name) for name in ("dropped", "truncated")}
        if not any(unfit.values()):
            return self.data, unfit
        counts = " and ".join(f"{count} {name}" for name, count in unfit.items() if count)
        log.warning(f"prompts longer than rollout.max_prompt_length: {counts}")
        return replace(self.data, train=train.rows, test=test.rows), unfit

    def evaluate(self, name: str) -> dict[str, Any]:
        self.phase(f"evaluating {name} training")
        evaluation = evaluate_held_out(
            self.learner.cluster, self.data.test, self.recipe, self.progress, self.learner.runner
        )
        return self.show_evaluation(name, evaluation)


def role_meshes(recipe: Recipe, actor: Mesh | None) -> dict[Role, Mesh]:
    """Return the mesh of each role that has one: that of the actor, and what `role_to_mesh` sets beside it.

    Raises:
        RecipeError: there are too few devices for both, or the processes would not have whole copies of the weights.
    """
    meshes = {Role.ACTOR: actor, Role.ROLLOUT: rollout_mesh_from_config(recipe.role_to_mesh.rollout, actor)}
    return {role: mesh for role, mesh in meshes.items() if mesh is not None}


def _lines(groups: Sequence[Group]) -> list[SampleLine]:
    """Convert scored completions to the lines that the terminal shows."""
    return [
        SampleLine(prompt_text(g.prompt), completion_text(c), float(r))
        for g in groups
        if g.rewards is not None
        for c, r in zip(g.completions, g.rewards, strict=True)
    ]
