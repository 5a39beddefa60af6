"""The `tokenizers` library held to one encoding a text and to errors that can be told."""

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
    """Leave one way to encode a text: BPE dropout (Provilkov et al., 2020) skips merges at random."""
    model = inner.model
    if dropout := getattr(model, "dropout", None):
        model.dropout = None  # the model itself: the library hands out a reference
        log.warning("the tokenizer's BPE dropout of %g is switched off: one text has one encoding", dropout)


def unknown_id(inner: tokenizers.Tokenizer) -> int | None:
    """The token that stands for characters which the vocabulary lacks."""
    if isinstance(inner.model, tokenizers.models.Unigram):  # its object does not tell
        found: int | None = json.loads(inner.to_str())["model"].get("unk_id")
        return found
    text = getattr(inner.model, "unk_token", None)
    return None if text is None else inner.token_to_id(text)
