"""Encode JSON for a script element, where no text can end the element or begin another.

A page may have a hundred thousand texts. `text_json` and `number_json` encode one value each; what they return is
joined by the callers, because to build such a tree and encode it as a whole takes three times as long.
"""

import json
import re
from json.encoder import encode_basestring
from typing import Any

ESCAPED = re.compile(
    "[<>&\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
"""Pattern of characters that are escaped: those of markup, and invisible ones."""


def script_json(value: Any) -> str:
    r"""Encode `value`: its text can neither end the element nor begin another.

    >>> script_json("</script>\u2028")
    '"\\u003c/script\\u003e\\u2028"'
    """
    return _escape(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def text_json(text: str) -> str:
    """Encode one text, as `script_json` does."""
    encoded: str = encode_basestring(text)
    return _escape(encoded)


def number_json(value: float | None) -> str:
    """Encode a finite number with four significant digits; None is null.

    >>> number_json(0.123456), number_json(None), number_json(1e-7)
    ('0.1235', 'null', '1e-07')
    """
    return "null" if value is None else f"{value:.4g}"


def size_of(encoded: str) -> int:
    """Return the number of bytes of an encoded value in UTF-8."""
    return len(encoded) if encoded.isascii() else len(encoded.encode("utf-8"))


def _escape(text: str) -> str:
    return ESCAPED.sub(_as_escape, text) if ESCAPED.search(text) else text


def _as_escape(found: re.Match[str]) -> str:
    character = found[0]
    return f"\\u{ord(character):04x}" if ord(character) < 128 else json.dumps(character)[1:-1]
