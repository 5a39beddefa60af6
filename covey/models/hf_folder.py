"""Settings of a Hugging Face folder: all of its files but the weights, written for a model and its tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner
from tokenizers import processors

from covey.models import families
from covey.models.config import ModelConfig
from covey.models.loading.config_fields import with_older_rope
from covey.models.loading.hf_config import Fields
from covey.text.tokenizer import Tokenizer


def write_settings(described: ModelConfig, tokenizer: Tokenizer, folder: Path, dtype: str) -> None:
    """Write config, tokenizer and generation config into `folder`, config.json last.

    Args:
        described: the architecture.
        dtype: type of the weights.

    Raises:
        WeightsError: the family's config.json cannot describe the model.
    """
    config = new_config(described, tokenizer, dtype)
    write_tokenizer(tokenizer, folder)
    write_json(folder / "config.json", config)


def new_config(described: ModelConfig, tokenizer: Tokenizer, dtype: str) -> Fields:
    """Return the config.json of a model with this tokenizer; see `write_settings`."""
    fields = for_older_readers(families.write_config(described), described)
    return fields | special_token_ids(tokenizer) | {"dtype": dtype}


def for_older_readers(fields: Fields, described: ModelConfig) -> Fields:
    """Return the `fields` of a config.json, with its rotary settings also in the form of transformers 4 if that version
    has the family.
    """
    family = families.find_family(described.family)
    return with_older_rope(fields) if family is None or family.has_older_form else fields


def special_token_ids(tokenizer: Tokenizer) -> Fields:
    """Return the ids of BOS, of all stop tokens and of padding."""
    stops = [tokenizer.eos_id, *(token for token in tokenizer.stop_ids if token != tokenizer.eos_id)]
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": tokenizer.pad_id,
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of the tokenizer, and a generation_config.json with its special tokens."""
    _with_bos(tokenizer).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    write_json(folder / "generation_config.json", special_token_ids(tokenizer))


def _with_bos(tokenizer: Tokenizer) -> Inner:
    """Return the tokenizer as transformers expects it: BOS, if any, is prepended by its post-processor."""
    inner = Inner.from_str(tokenizer.inner.to_str())
    if tokenizer.add_bos and tokenizer.bos_id is not None and inner.encode("").ids[:1] != [tokenizer.bos_id]:
        bos = tokenizer.inner.id_to_token(tokenizer.bos_id)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
        )
    return inner


def tokenizer_config(tokenizer: Tokenizer) -> Fields:
    """Return the tokenizer_config.json of `tokenizer`."""
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    texts = {role: tokenizer.inner.id_to_token(token) for role, token in roles.items() if token is not None}
    fields: Fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
    }
    template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
    return fields | texts | template


def write_json(file: Path, value: Any) -> None:
    """Write `value` as a JSON file."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
