"""Loading of the models of a run from sources, each in the way that its role needs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

from covey.models.loading.weights import DecoderOptions, LoadedModel, load
from covey.models.value_model import load_value_model
from covey.rl.roles import ClusterConfig, Role
from covey.text.tokenizer import Tokenizer


def load_models(
    models: Mapping[Role, Any], config: ClusterConfig, **options: Unpack[DecoderOptions]
) -> tuple[dict[Role, Any], Tokenizer | None]:
    """Replace each source among `models` by the model that it names, on the mesh of its role.

    Args:
        models: model or source by role; models and None stay as they are.
        config: meshes.
        options: see `models.loading.weights.load`.

    Returns:
        the models, and the tokenizer of the actor's source; None when the actor was given as a model.

    Raises:
        WeightsError: a source is unavailable, incomplete, or not a supported model.
    """
    loaded = {
        role: LOADERS[role](source, mesh=config.mesh(role), **options)
        for role, source in models.items()
        if isinstance(source, str)
    }
    tokenizer = loaded[Role.ACTOR].tokenizer if Role.ACTOR in loaded else None
    return {**models, **{role: found.model for role, found in loaded.items()}}, tokenizer


LOADERS: dict[Role, Callable[..., LoadedModel[Any]]] = {
    Role.ACTOR: load,
    Role.REFERENCE: load,
    Role.CRITIC: partial(load_value_model, new_head=True),
    Role.REWARD: load_value_model,
}
