"""Protections around the `tokenizers` library: its errors as `WeightsError`, deterministic encoding, and a bound on how
long a tokenizer's own rules can make a text.

tokenizer.json comes with a model and is not trusted. Each of its `Replace` rules may make every character of a text
longer, and the next rule works on the result: ten rules of ten characters would make gigabytes of a word, within one
call of the library. So the size is bounded before the call, from the rules alone, in bytes of UTF-8.
"""

import base64
import binascii
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import tokenizers

from covey.errors import CoveyError, WeightsError

log = logging.getLogger(__name__)

MAX_BYTES = 2**27
"""Maximum size of a text after a tokenizer's rules: the library needs about 17 times as much memory."""
UNICODE_FACTORS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 12, "ByteLevel": 2}
"""Largest growth of UTF-8 by a normal form (Unicode, UAX 15, table 8), and by rules that are made of such forms."""


@contextmanager
def library_errors(what: str, where: str = "") -> Iterator[None]:
    """Turn whatever the `tokenizers` library raises into a `WeightsError` that begins with `what`.

    The library raises bare Exception, and a panic of its Rust code is a BaseException, which would pass for Ctrl-C.
    """
    try:
        yield
    except CoveyError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise WeightsError(
            f"{what}: {str(error)[:500]}", fix="its tokenizer may be damaged: fetch it again", where=where
        ) from error


def switch_dropout_off(inner: tokenizers.Tokenizer) -> None:
    """Switch off BPE dropout (Provilkov et al., 2020), which skips merges at random, so encoding is deterministic."""
    model = inner.model
    if dropout := getattr(model, "dropout", None):
        model.dropout = None  # changes the tokenizer itself: `inner.model` is a reference
        log.warning("the tokenizer's BPE dropout of %g is switched off: one text has one encoding", dropout)


def unknown_id(inner: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token for characters that the vocabulary lacks."""
    if isinstance(inner.model, tokenizers.models.Unigram):  # its object has no such attribute
        token: int | None = json.loads(inner.to_str())["model"].get("unk_id")
        return token
    text = getattr(inner.model, "unk_token", None)
    return None if text is None else inner.token_to_id(text)


class Growth(NamedTuple):
    """Bound on the size of a text after some rules: `factor` × its bytes + `added`."""

    factor: int = 1
    added: int = 0

    def of(self, size: int) -> int:
        """Return the bound for a text of `size` bytes.

        >>> Growth(3, 2).of(10)
        32
        """
        return self.factor * size + self.added

    def require_room(self, text: str, where: str = "") -> None:
        """Check that the rules cannot make a text too long.

        Raises:
            WeightsError: the bound is above `MAX_BYTES`.
        """
        if self != Growth() and (bound := self.of(_size(text))) > MAX_BYTES:
            raise WeightsError(
                f"the tokenizer's rules may turn a text of {_size(text):,} bytes into {bound:,}",
                want=f"at most {MAX_BYTES:,} bytes",
                fix="use a tokenizer from a source that you trust; if you do, divide the text",
                where=where,
            )


def growth_of(rules: Any) -> Growth:
    """Compute the growth by a normalizer or a decoder of tokenizer.json.

    >>> growth_of({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    Growth(factor=3, added=0)
    """
    if not isinstance(rules, Mapping):
        return Growth()
    if rules.get("type") == "Sequence":
        growth = Growth()
        for rule in (*_listed(rules.get("normalizers")), *_listed(rules.get("decoders"))):
            factor, added = growth_of(rule)
            growth = Growth(growth.factor * factor, growth.added * factor + added)
        return growth
    return _growth_of_rule(rules)


def _growth_of_rule(rule: Mapping[str, Any]) -> Growth:
    kind = str(rule.get("type"))
    if kind == "Replace":
        return _growth_of_replace(rule.get("pattern"), _size(rule.get("content")))
    if kind == "Prepend":
        return Growth(1, _size(rule.get("prepend")))
    if kind == "Precompiled":
        return Growth(_longest_replacement(rule.get("precompiled_charsmap")))
    return Growth(UNICODE_FACTORS.get(kind, 1))


def _growth_of_replace(pattern: Any, content: int) -> Growth:
    """Compute the growth by a replacement of `content` bytes; a regular expression may match between all characters."""
    text = _size(pattern.get("String")) if isinstance(pattern, Mapping) else 0
    return Growth(max(1, -(-content // text))) if text else Growth(content + 1, content)


def _longest_replacement(charsmap: Any) -> int:
    """Find the size of the longest replacement in a SentencePiece map, in bytes: behind the trie, whose size comes
    first, the replacements stand one after the other, each with a zero at its end.
    """
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return 1  # the library refuses it
    replacements = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *map(len, replacements.split(b"\0")))


def _listed(rules: Any) -> list[Any]:
    return rules if isinstance(rules, list) else []


def _size(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
