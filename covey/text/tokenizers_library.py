"""Helpers for the `tokenizers` library: deterministic encoding, and library errors as `WeightsError`."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers

from covey.errors import CoveyError, WeightsError

log = logging.getLogger(__name__)


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
        found: int | None = json.loads(inner.to_str())["model"].get("unk_id")
        return found
    text = getattr(inner.model, "unk_token", None)
    return None if text is None else inner.token_to_id(text)
