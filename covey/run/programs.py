"""Programs of the run that a recipe describes, from its settings and the header of its checkpoint.

No tensor of the base is read and no array is made, and the devices need not be there.
"""

from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh

from covey.config.recipe import AnyRecipe, Recipe, SFTRecipe, chain_of_runs
from covey.models import scratch
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.dtypes import resolve_compute_dtype
from covey.models.loading import peft, weights
from covey.models.lora import with_lora
from covey.models.quantised import parse_format
from covey.parallel.mesh import platform_of
from covey.rl.programs import RLPrograms
from covey.rl.roles import ClusterConfig, Role
from covey.run.load_model import decoder_options
from covey.sampling.calculator import make_tool
from covey.sft.learner import SFTPrograms
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
    mesh, device = (place, None) if isinstance(place, Mesh) else (None, place)
    platform = platform_of(place if isinstance(place, Mesh) else jax.sharding.SingleDeviceSharding(place))
    model, tokenizer = abstract_for(recipe, platform)
    tool = make_tool(tokenizer, recipe.rollout)
    meshes = {role: one for role, one in ((Role.ACTOR, mesh), (Role.ROLLOUT, rollout)) if one is not None}
    return RLPrograms(
        model,
        ClusterConfig(meshes, recipe.training, recipe.rollout),
        recipe.grpo,
        total_steps=total_steps,
        stop_ids=tokenizer.stop_ids,
        pause_id=None if tool is None else tool.markers.end,
        waits=bool(recipe.envs.environment or recipe.envs.tools),
        device=device,
    )


def supervised_programs(recipe: SFTRecipe, place: Mesh | jax.Device, total_steps: int) -> SFTPrograms:
    """Return the programs of the supervised training of `recipe`; arguments and errors as for `policy_programs`."""
    platform = platform_of(place if isinstance(place, Mesh) else jax.sharding.SingleDeviceSharding(place))
    model, _ = abstract_for(recipe, platform)
    return SFTPrograms(model, recipe.training, place, total_steps)


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
