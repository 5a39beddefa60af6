"""Programs of the run that a recipe describes, from its settings and the header of its checkpoint.

No tensor of the base is read and no array is made, and the devices need not be there.
"""

from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from covey.config.recipe import AnyRecipe, Recipe, SFTRecipe, chain_of_runs
from covey.models import scratch
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.dtypes import resolve_compute_dtype
from covey.models.loading import peft, weights
from covey.models.lora import with_lora
from covey.models.quantised import parse_format
from covey.parallel.mesh import platform_of
from covey.parallel.sharding import place_model
from covey.rl.cluster import RLCluster
from covey.rl.programs import RLPrograms
from covey.rl.roles import ClusterConfig, Role
from covey.run.load_model import decoder_options
from covey.sft.learner import SFTLearner, SFTPrograms
from covey.text.tokenizer import Tokenizer


def policy_programs(
    recipe: Recipe, place: Mesh | jax.Device, total_steps: int, rollout: Mesh | None = None
) -> RLPrograms:
    """Return the programs of the policy of `recipe`, for a mesh or a device that need not be there.

    Args:
        total_steps: optimizer updates of the whole run, from which the schedule follows.
        rollout: the rollout's own mesh, if it has one.

    Raises:
        WeightsError: the source is not available, is incomplete, or is not a supported model.
    """
    model, tokenizer = _placed_model(recipe, place)
    meshes = {Role.ACTOR: place if isinstance(place, Mesh) else None, Role.ROLLOUT: rollout}
    own = {role: mesh for role, mesh in meshes.items() if mesh is not None}
    config = ClusterConfig(own, recipe.training, recipe.rollout)
    cluster = RLCluster(actor=model, tokenizer=tokenizer, cluster_config=config)
    is_async = bool(recipe.envs.environment or recipe.envs.tools)
    return RLPrograms(cluster, recipe.grpo, total_steps=total_steps, is_async=is_async)


def supervised_programs(recipe: SFTRecipe, place: Mesh | jax.Device, total_steps: int) -> SFTPrograms:
    """Return the programs of the supervised training of `recipe`; arguments and errors as for `policy_programs`."""
    model, tokenizer = _placed_model(recipe, place)
    mesh = place if isinstance(place, Mesh) else None
    learner = SFTLearner(model=model, tokenizer=tokenizer, config=recipe.training, mesh=mesh)
    return SFTPrograms(learner, total_steps)


def _placed_model(recipe: AnyRecipe, place: Mesh | jax.Device) -> tuple[Decoder, Tokenizer]:
    platform = platform_of(place if isinstance(place, Mesh) else SingleDeviceSharding(place))
    model, tokenizer = abstract_for(recipe, platform)
    return place_model(model, place), tokenizer


def abstract_for(recipe: AnyRecipe, platform: str) -> tuple[Decoder, Tokenizer]:
    """Return the model that `load_model.load_for` loads, with shapes in place of arrays and not yet on its devices.

    Args:
        recipe: names the model, whose weights are not read, and its adapter, whose matrices are read for their shapes.
        platform: that of the devices, on which the compute type `auto` depends.

    Raises:
        WeightsError: the source is not available, is incomplete, or is not a supported model.
    """
    options, seed, (_, source) = recipe.model, recipe.seed, chain_of_runs(recipe.model.source)
    checkpoint = weights.open_source(scratch.with_seed(source, seed))[1]
    switches = decoder_options(options) | {"compute_dtype": resolve_compute_dtype(options.compute_dtype, platform)}
    model = abstract_decoder(checkpoint.config, parse_format(options.quantize, options.quantize_block), **switches)
    if options.adapter:
        adapted = partial(peft.load_adapter, folder=options.adapter, dropout=options.lora.dropout, seed=seed)
        model = nnx.eval_shape(adapted, model)
    if options.lora.rank:
        model = nnx.eval_shape(partial(with_lora, config=options.lora, seed=seed), model)
    return model, checkpoint.tokenizer
