"""Text of each token of a completion."""

from collections.abc import Callable, Sequence

MAX_BYTES = 4
"""Number of bytes of the longest character in UTF-8, and of the tokens that may share it."""
REPLACEMENT = "\ufffd"
"""Character that a decoder gives for bytes that are no whole character."""


def token_texts(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """Split a completion's text by token: return the text that each token adds to those before it.

    A character whose bytes several tokens share is the text of the last of them, and the others have none. Each token
    is decoded behind the one before it, because some tokenizers leave out a space at the beginning of a text. Joined,
    the texts are the text of all tokens, unless bytes of the completion are no text.

    Args:
        decode: function from tokens to text, control tokens included.
        tokens: ids of a completion, [n].
    """
    texts: list[str] = []
    context = done = 0
    for end in range(1, len(tokens) + 1):
        before, now = decode(tokens[context:done]), decode(tokens[context:end])
        unfinished = now.endswith(REPLACEMENT) and end < len(tokens) and end - done < MAX_BYTES
        if unfinished:
            texts.append("")
            continue
        texts.append(now.removeprefix(before) if now.startswith(before) else decode(tokens[done:end]))
        context, done = done, end
    return texts
