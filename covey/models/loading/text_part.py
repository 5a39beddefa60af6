"""The text part of checkpoints of models that also read images: its config, and the names of its tensors.

Such a config.json has the text model's settings in `text_config`, and its tensors lie under one of two prefixes: that
of transformers 4.50, which checkpoints on the hub have, or that of later versions. Tensors of other parts are not read.
"""

from collections.abc import Mapping
from typing import Any

from covey.errors import WeightsError

TEXT_PARTS = {"gemma3": "gemma3_text"}
"""`model_type` of the whole → that of its text part."""

MODULE = "model.language_model"
"""Module of the text part in transformers, without its head."""

_PREFIXES = {f"{MODULE}.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_OTHERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def is_whole(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a model that has its text model as a part."""
    return config.get("model_type") in tuple(TEXT_PARTS)


def text_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of the text part; `config` itself if it is a text model's.

    Raises:
        WeightsError: there is no such part, it is of another family than the whole's, or it and the whole disagree on
            whether the head is the embedding.
    """
    if not is_whole(config):
        return config
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        raise WeightsError("the field 'text_config' is missing", want="an object", where=where)
    family = TEXT_PARTS[config["model_type"]]
    part = {"model_type": family} | dict(part)
    if part["model_type"] != family:
        raise WeightsError(f"model_type in text_config is {part['model_type']!r:.80}", want=family, where=where)
    tied = [fields.get("tie_word_embeddings", True) for fields in (config, part)]
    if tied[0] != tied[1]:
        raise WeightsError(
            f"tie_word_embeddings is {tied[0]!r}, and {tied[1]!r} in text_config", want="the same", where=where
        )
    return part


def text_name(name: str) -> str | None:
    """Return the name that a tensor or module of the whole has in the text model alone; None for one of another part.

    >>> text_name("language_model.model.norm.weight"), text_name("lm_head.weight"), text_name("vision_tower.weight")
    ('model.norm.weight', 'lm_head.weight', None)
    """
    if name.startswith(_OTHERS):
        return None
    for whole, text in _PREFIXES.items():
        if name.startswith(whole):
            return text + name.removeprefix(whole)
    return name
