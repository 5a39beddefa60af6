"""Byte-pair vocabularies of SentencePiece (Kudo and Richardson, 2018) as tokenizers of the `tokenizers` library.

SentencePiece has a score for each piece, and no list of merges. It joins adjacent pieces as long as some join gives a
piece, each time the pair whose joint piece has the highest score; of equal pairs the leftmost. The library joins the
pair that stands first in a list of merges. So the list has each way to join two pieces to one, best score first.
Characters that no piece has become tokens for their bytes. A space is written as U+2581.

The two differ where one text has two ways to the same piece: SentencePiece takes the leftmost pair, the library the way
that stands first. They stand in the order of transformers, by the tokens of the two parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

SPACE = "\u2581"
"""Character that stands for a space in a piece."""
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
"""Tokens for single bytes."""
MAX_PIECE = 256
"""Maximum characters of a piece: work and memory grow with their square."""


def find_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return each way to join two pieces to a third, in the order in which they are preferred.

    Args:
        scores: score of each piece, in the order of their tokens.

    >>> find_merges({"ab": -2.0, "abc": -1.0, "a": -3.0, "b": -4.0, "c": -5.0})
    [('ab', 'c'), ('a', 'b')]
    """
    token = {piece: index for index, piece in enumerate(scores)}
    ways = [
        (-scores[piece], token[piece], token[left], token[right])
        for piece in scores
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in token and (right := piece[cut:]) in token
    ]
    pieces = list(scores)
    return [(pieces[left], pieces[right]) for *_, left, right in sorted(ways)]


def rank_pieces(pieces: Sequence[str], saved: Mapping[str, Any]) -> dict[str, float] | None:
    """Return scores of `pieces` that give the merges of a tokenizer again: minus the place of the first merge to each.

    Args:
        pieces: pieces in the order of their tokens.
        saved: the tokenizer as tokenizer.json describes it; only merges of `pieces` count.

    Returns:
        None if no scores give these merges, or the tokenizer changes a text in other ways than SPACE.
    """
    known = set(pieces)
    merges = [(left, right) for left, right in saved["model"]["merges"] if {left, right, left + right} <= known]
    places: dict[str, int] = {}
    for left, right in merges:
        places.setdefault(left + right, len(places))
    scores = {piece: -float(places.get(piece, len(places))) for piece in pieces}
    plain = saved["normalizer"] == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return scores if plain and find_merges(scores) == merges else None


def build(
    tokens: Sequence[str], merges: list[tuple[str, str]], unknown: int | None = None
) -> tokenizers.Tokenizer | None:
    """Return the tokenizer with `tokens`, by id; None if a byte has no token. `unknown` is the token for what no token
    can write.
    """
    vocab = {text: index for index, text in enumerate(tokens)}
    if not vocab.keys() >= set(BYTES):
        return None
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Replace(" ", SPACE)
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return inner
