"""Tokens that a Hugging Face folder declares outside tokenizer.json, added as transformers 5 does it, with its ids.

tokenizer_config.json declares them in `added_tokens_decoder`, `extra_special_tokens`, `additional_special_tokens`, and
by names as `pad_token`. Where it has no `added_tokens_decoder`, the files special_tokens_map.json and added_tokens.json
of older versions count too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from covey.text.tokenizers_library import Growth, library_errors

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that any tokenizer may have, in the order in which they are added."""
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
"""Names of the lists of further special tokens, in transformers 5 and before; the first may give each a name."""


def add_declared_tokens(
    inner: Tokenizer, settings: Mapping[str, Any], read: Callable[[str], Mapping[str, Any]], growth: Growth, where: str
) -> dict[str, str]:
    """Add to `inner` the declared tokens that it lacks; return the text of each special token that has a name.

    Args:
        settings: content of tokenizer_config.json.
        read: function from the name of an older file to its content, {} if there is no such file.
        growth: growth of a text by the normalizer, which the library applies to added tokens.

    Raises:
        WeightsError: a file declares something else than tokens.
    """
    with library_errors("the tokens declared beside tokenizer.json cannot be added", where):
        known, declared = inner.get_added_tokens_decoder(), settings.get("added_tokens_decoder")
        named, others = _special_tokens(settings, read("special_tokens_map.json") if declared is None else {})
        special = {token.content for token in (*named.values(), *others)}
        older = read("added_tokens.json") if declared is None else {}
        numbered = {index: _token(text, special=text in special) for text, index in older.items()} | known
        numbered |= {int(index): _token(value) for index, value in (declared or {}).items()}
        added = [token for _, token in sorted(numbered.items())]
        contents = {token.content for token in (*known.values(), *added)}
        added += [token for token in (*named.values(), *others) if token.content not in contents]
        growth.require_room(max((token.content for token in added), key=len, default=""), where)
        inner.add_tokens(added)
    return {name: token.content for name, token in named.items()}


def _special_tokens(
    settings: Mapping[str, Any], older: Mapping[str, Any]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return the special tokens of tokenizer_config.json and the older special_tokens_map.json: by name, and others.

    A role in the older file counts more. Of the lists of one file one counts.
    """
    merged = dict(settings)
    merged |= {EXTRA: merged.pop(ADDITIONAL)} if not merged.get(EXTRA) and ADDITIONAL in merged else {}
    named, extra = _pop_names(merged, str) | _pop_dict(merged), merged.get(EXTRA) or []
    merged |= {**older, EXTRA: [*extra, *older[EXTRA]]} if isinstance(older.get(EXTRA), list) else older
    named = {role: merged.get(role) for role in ROLES} | _pop_names(merged, str | dict) | named | _pop_dict(merged)
    others = merged.get(EXTRA, merged.get(ADDITIONAL)) or []
    return {name: _token(value, special=True) for name, value in named.items() if value}, list(map(_token, others))


def _pop_names(settings: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Remove special tokens with names of this tokenizer's own, as `image_token`; return the names of a kind."""
    own = [name for name in settings if name.endswith("_token") and name not in ROLES]
    return {name: settings.pop(name) for name in own if isinstance(settings[name], kind)}


def _pop_dict(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove and return further special tokens that have names."""
    return dict(settings.pop(EXTRA)) if isinstance(settings.get(EXTRA), dict) else {}


def _token(value: Any, **flags: bool) -> AddedToken:
    fields = {} if isinstance(value, str) else {key: value[key] for key in value if key not in ("content", "__type")}
    return AddedToken(value if isinstance(value, str) else value["content"], **{"special": True} | fields | flags)
