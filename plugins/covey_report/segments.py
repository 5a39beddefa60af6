"""Segments of an encoded prompt: the tokens of each message, and of the chat template between them."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from covey.text.chat_template import unused_mark
from covey.text.tokenizer import Tokenizer
from covey.types import Message, Prompt
from covey_report.token_texts import token_texts

TEMPLATE, TEXT = "template", "prompt"
"""Roles of tokens that the chat template adds, and of a prompt that is text or whose messages are not found in it."""
Span = tuple[int, int]


class Segment(NamedTuple):
    """Consecutive tokens of one role.

    Attributes:
        role: role of the message, `TEMPLATE` or `TEXT`.
        texts: the text of each token.
    """

    role: str
    texts: list[str]


def prompt_segments(tokenizer: Tokenizer, encode: Callable[[Prompt], np.ndarray], prompt: Prompt) -> list[Segment]:
    """Split the tokens of a prompt by role.

    Args:
        tokenizer: decodes the tokens.
        encode: encodes the prompt; with tools it adds their list, which belongs to the template then.
        prompt: text or chat messages.
    """
    decode = partial(tokenizer.decode, skip_special=False)
    texts = token_texts(decode, encode(prompt).tolist())
    if isinstance(prompt, str):
        return [Segment(TEXT, texts)]
    mark = unused_mark(prompt)
    pieces = decode(encode([{**message, "content": mark} for message in prompt])).split(mark)
    spans = _find_messages("".join(texts), [message["content"] for message in prompt], pieces)
    return [Segment(TEXT, texts)] if spans is None else _by_role(texts, prompt, spans)


def _find_messages(text: str, contents: Sequence[str], pieces: Sequence[str]) -> list[Span] | None:
    """Return where the content of each message begins and ends in `text`; None if the template changes it.

    Args:
        text: the rendered prompt.
        contents: content of the messages; many templates strip it.
        pieces: texts of the template before, between and after them.
    """
    if len(pieces) != len(contents) + 1 or not text.startswith(pieces[0]):
        return None
    spans, at = [], len(pieces[0])
    for content, piece in zip(contents, pieces[1:], strict=True):
        forms = (form for form in (content, content.strip()) if text.startswith(form + piece, at))
        if (form := next(forms, None)) is None:
            return None
        spans.append((at, at + len(form)))
        at += len(form) + len(piece)
    return spans if at == len(text) else None


def _by_role(texts: Sequence[str], messages: Sequence[Message], spans: Sequence[Span]) -> list[Segment]:
    """Join the tokens that begin in the same message, or in the same piece of the template."""
    roles = [
        next((m["role"] for m, (begin, end) in zip(messages, spans, strict=True) if begin <= at < end), TEMPLATE)
        for at in accumulate(map(len, texts[:-1]), initial=0)
    ]
    groups = groupby(zip(roles, texts, strict=True), key=lambda pair: pair[0])
    return [Segment(role, [text for _, text in pairs]) for role, pairs in groups]
