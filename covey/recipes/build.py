"""Make the learner and the data of a recipe, ready for the loop."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe, RecipeT, SFTRecipe
from covey.config.schema import EnvsConfig
from covey.data import Dataset
from covey.data import sources as data_source
from covey.data.loader import PromptLoader
from covey.display import echo, show_log
from covey.models.decoder import Decoder
from covey.models.dtypes import AUTO
from covey.models.loading.weights import load_critic, load_value_model, with_digest
from covey.models.lora import with_lora, without_lora
from covey.models.value_model import ValueModel, make_value_model
from covey.parallel import mesh_from_config, processes
from covey.parallel.mesh import rollout_mesh_from_config
from covey.recipes.load_model import decoder_options, load_to_train
from covey.registry import offered
from covey.rewards.call import check_columns, check_evaluation_columns
from covey.rewards.scoring import RewardRunner
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner, drop_long_prompts
from covey.rl.roles import ClusterConfig, Role
from covey.run.saved_run import ReadyRun, SavedRun
from covey.run.settings import check_same_recipe
from covey.sampling.responder import ResponderFactory
from covey.text.tokenizer import Tokenizer
from covey.types import Prompt


def load_data(recipe: Recipe | SFTRecipe) -> Dataset:
    """Load and check the data of a recipe."""
    data = data_source.load_data(recipe.data)
    if isinstance(recipe, Recipe):
        check_columns(recipe.rewards, data.train)
        check_columns(recipe.rewards, data.test)
    if isinstance(recipe, Recipe) or recipe.evaluation.answers:
        check_evaluation_columns(recipe.evaluation, data.test)
    return data


def load_inputs(recipe: Recipe | SFTRecipe) -> tuple[Dataset, Mesh | None]:
    """Load data and mesh, and show the forms of the rows. Mistakes in them end the run before it has a folder."""
    check_same_recipe(recipe, "the same command for all")
    mesh = mesh_from_config(recipe.model.mesh)
    show = echo if processes.here().is_first else lambda text: None
    with show_log(info=show, warning=show):
        data = load_data(recipe)
    if isinstance(recipe, Recipe):
        role_meshes(recipe, mesh)  # refused before a folder is made
    return data, mesh


def build(recipe: Recipe | SFTRecipe, data: Dataset, mesh: Mesh | None, run: SavedRun) -> ReadyRun:
    """Make the run of a recipe: load its model and make its learner. Packages offer other methods than reinforcement
    learning by the entry points `covey.methods`.

    Args:
        recipe: the checked recipe.
        data: its data.
        mesh: the devices to train on; the default device when not given.
        run: its folder, display and contexts.
    """
    is_rl = isinstance(recipe, Recipe)
    make: Callable[..., ReadyRun] = build_rl if is_rl else offered("covey.methods", recipe.method).build
    return make(recipe, data, mesh, run)


def build_rl(recipe: Recipe, data: Dataset, mesh: Mesh | None, run: SavedRun) -> ReadyRun:
    """Make a run of reinforcement learning; see `build`."""
    model, tokenizer, origin = load_to_train(recipe, mesh, run.folder)
    values, other_models = load_value_models(recipe, model, mesh)
    cluster = RLCluster(
        actor=model,
        critic=values.get(Role.CRITIC),
        reward=values.get(Role.REWARD),
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(role_meshes(recipe, mesh), recipe.training, recipe.rollout),
        environments=run.stack.enter_context(open_environments(recipe.envs)),
    )
    learner = make_learner(recipe, cluster, run.stack.enter_context(RewardRunner(recipe.reward_safety)))
    rows, held_out, unfit = drop_long_prompts(learner, data.train, data.test)
    loader = PromptLoader(rows, recipe.training.prompts_per_step, seed=recipe.seed)
    counts = {"prompts": len(loader.rows), **unfit}
    return ReadyRun(learner, loader, tokenizer, model.config, held_out, origin, counts, other_models)


def load_value_models(
    recipe: Recipe, actor: Decoder, mesh: Mesh | None
) -> tuple[dict[Role, ValueModel], dict[str, str]]:
    """Load the critic, if the algorithm has one, and the reward model, if the recipe names one.

    Where the recipe names no critic, it is the actor's base with a new value head, and with adapters if the actor has
    adapters.

    Returns:
        The models by role, and the origins of the models that the recipe names, which a resumed run compares.
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
        processes.here().check_same("critic", lambda: origins["critic"], "the same weights for all of them")
    else:
        critic = make_value_model(without_lora(actor), share=bool(options.lora.rank))
    models[Role.CRITIC] = with_lora(critic, options.lora, seed=recipe.seed + 1) if options.lora.rank else critic
    return models, origins


def open_environments(config: EnvsConfig) -> AbstractContextManager[ResponderFactory | None]:
    """Open the runner of the environment or the tools in `config`; None without either.

    Raises:
        CoveyError: it names one that does not exist, or no installed package runs environments.
    """
    named = config.environment or config.tools
    return offered("covey.responders", "envs")(config=config) if named else nullcontext()


def prompt_encoder(config: EnvsConfig, tokenizer: Tokenizer) -> Callable[[Prompt], np.ndarray]:
    """Return the function that encodes a row's prompt as a sample begins: with the list of the tools, if `config` names
    any. What an environment adds to the prompt is known only when its episode begins.
    """
    with open_environments(config) if config.tools else nullcontext() as tools:
        return (tools and tools.prompt_encoder(tokenizer)) or tokenizer.encode_prompt


def make_learner(recipe: Recipe, cluster: RLCluster, runner: RewardRunner) -> Learner:
    """Make the learner of the recipe's algorithm; it shows nothing by itself. A package offers a learner by the entry
    point `covey.algorithms`.
    """
    name = "ppo" if algorithm_of(recipe.grpo).needs_critic else "grpo"
    kind: Callable[..., Learner] = GRPOLearner if name == "grpo" else offered("covey.algorithms", name)
    return kind(
        rl_cluster=cluster,
        reward_fns=recipe.rewards,
        eval_config=recipe.evaluation,
        observers=(),
        reward_runner=runner,
        **{f"{name}_config": recipe.grpo},
    )


def role_meshes(recipe: Recipe, actor: Mesh | None) -> dict[Role, Mesh]:
    """Return the meshes of the actor and, where `role_to_mesh` sets it, of the rollout.

    Raises:
        RecipeError: there are too few devices for both, or the processes would not have whole copies of the weights.
    """
    meshes = {Role.ACTOR: actor, Role.ROLLOUT: rollout_mesh_from_config(recipe.role_to_mesh.rollout, actor)}
    return {role: mesh for role, mesh in meshes.items() if mesh is not None}


def with_compute_dtype(recipe: RecipeT, chosen: Any) -> RecipeT:
    """Return `recipe` with the type of products that was chosen, and report it where the recipe leaves the choice."""
    if recipe.model.compute_dtype != AUTO:
        return recipe
    if processes.here().is_first:
        echo(f"model.compute_dtype auto: this run computes in {chosen}")
    model: Any = replace(recipe.model, compute_dtype=chosen)
    return replace(recipe, model=model)
