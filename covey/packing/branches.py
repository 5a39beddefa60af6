"""Branches of a completion, whose tokens stand one branch after the other: positions, predecessors and subtrees.

Each branch continues the sequence so far, from which it drops some tokens at the end. So a completion is a tree whose
tokens are in depth-first order, and the descendants of a token are those behind it up to the first branch that drops
it.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from covey.types import Branch


def token_positions(prompt: int, length: int, branches: Sequence[Branch]) -> Int[np.ndarray, "n"]:
    """Return the position in its sequence of each of the `length` tokens of a completion after `prompt` tokens.

    >>> token_positions(3, 5, [Branch(start=2, kept=4)]).tolist()
    [3, 4, 4, 5, 6]
    """
    positions = prompt + np.arange(length)
    for start, kept in branches:
        positions[start:] = kept + np.arange(length - start)
    return positions


def predecessors(prompt: int, positions: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Return the token before each token in its sequence: its index in the completion, or below 0, counted from the end
    of the prompt. In depth-first order it is the latest token at the position before.

    >>> predecessors(3, np.array([3, 4, 4, 5, 2])).tolist()
    [-1, 0, 0, 2, -2]
    """
    latest = {position: position - prompt for position in range(prompt)}
    found = []
    for index, position in enumerate(positions.tolist()):
        found.append(latest.get(position - 1, -prompt))
        latest[position] = index
    return np.array(found, np.int64)


def subtree_ends(
    positions: Int[np.ndarray, "n"], length: int, branches: Sequence[Branch], first: int = 0
) -> Int[np.ndarray, "n"]:
    """Return the index in the completion behind the last descendant of each token.

    Args:
        positions: positions of the tokens, which begin at index `first` of the completion.
        length: number of tokens of the completion.

    >>> subtree_ends(np.array([3, 4, 4, 5, 6]), 5, [Branch(start=2, kept=4)]).tolist()
    [5, 2, 5, 5, 5]
    """
    ends = np.full(len(positions), length)
    for start, kept in reversed(branches):
        dropped = (positions >= kept) & (first + np.arange(len(positions)) < start)
        ends[dropped] = start
    return ends


def drops_prompt(prompt: int, branches: Sequence[Branch]) -> bool:
    """Return whether a branch drops tokens of the prompt."""
    return any(branch.kept < prompt for branch in branches)
