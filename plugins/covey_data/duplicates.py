"""Duplicates among rows, held-out rows that are training rows, and prompts with several answers, counted by four hashes
a row.

Of a row only the hashes are kept: 32 bytes. Python's hash of text has 64 bits and a key of the process, so among a
million rows two different ones are taken for equal with a probability of 3e-8.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from covey.config.recipe import Recipe, SFTRecipe
from covey.data.loader import stable_text
from covey.data.rows import Row

if TYPE_CHECKING:
    import numpy as np

PROMPT, EXAMPLE = ("prompt",), ("prompt", "completion")
"""Columns that a model is trained on: by reinforcement learning, and by supervised training."""
ANSWERS = (
    "answer", "answers", "completion", "solution", "final_answer", "ground_truth", "reference", "target", "label"
)  # fmt: skip
"""Names of columns that hold the answer to a prompt."""
KINDS = ("every column", "what is trained on", "the same, but for case and space")
"""Parts of rows whose equality makes them duplicates, from the whole row to the least."""
ENCODER = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=stable_text)


class Duplicates(NamedTuple):
    """Rows that are equal in one respect.

    Attributes:
        equal_in: entry of `KINDS`.
        distinct: number of different training rows.
        repeated: number of training rows that are equal to an earlier one.
        most: how often the most frequent training row occurs.
        place: index of its first occurrence in the order of reading.
        held_out: number of held-out rows that are equal to a training row.
        held_out_place: index of the first of them among the held-out rows; None if there is none.
    """

    equal_in: str
    distinct: int
    repeated: int
    most: int
    place: int
    held_out: int
    held_out_place: int | None


class RowHashes:
    """Hashes of rows in the order in which they were added.

    Args:
        columns: names of the columns that are trained on; None for all, as an environment reads them.
    """

    def __init__(self, columns: Sequence[str] | None, rows: Iterable[Row] = ()):
        self._columns, self._hashes = columns, array("q")
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a row."""
        used = _encode(row, self._columns)
        whole = used if self._columns is None else _encode(row, None)
        names = ANSWERS if self._columns == PROMPT else PROMPT
        other = _encode(row, names) if any(row.get(name) not in (None, "") for name in names) else ""
        self._hashes.extend((hash(whole), hash(used), hash(_fold(used)), hash(_fold(other))))

    def table(self) -> "np.ndarray":
        """Return the hashes, int64 [rows, 4]: in the order of `KINDS`, then that of the answers, or in supervised
        training that of the prompt; 0 if there is none.
        """
        import numpy as np  # late: mistakes are answered without it

        return np.frombuffer(self._hashes, np.int64).reshape(-1, len(KINDS) + 1)


def count_duplicates(train: "np.ndarray", held_out: "np.ndarray") -> list[Duplicates]:
    """Count duplicates in tables of hashes, one entry for each of `KINDS`."""
    return [_count(kind, train[:, i], held_out[:, i]) for i, kind in enumerate(KINDS)]


def compare_rows(recipe: Recipe | SFTRecipe, train: Iterable[Row], held_out: Iterable[Row]) -> list[Duplicates]:
    """Count the duplicates among the rows of a run of `recipe`."""
    hashes = [RowHashes(trained_columns(recipe), rows).table() for rows in (train, held_out)]
    return count_duplicates(*hashes)


def data_counts(recipe: Recipe | SFTRecipe, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, int]:
    """Return the numbers of rows and of different ones, but for case and white space, for the summary of a run.

    They are those of the last entry of `compare_rows`; a run, which begins with them, computes no other hashes.
    """
    columns = trained_columns(recipe)
    learnt, tested = ([hash(_fold(_encode(row, columns))) for row in rows] for rows in (train, held_out))
    distinct = set(learnt)
    return {
        "rows": len(train),
        "distinct": len(distinct),
        "held_out": len(held_out),
        "held_out_in_training": sum(one in distinct for one in tested),
    }


def describe_repeated(duplicates: Sequence[Duplicates]) -> str:
    """Describe the repeated training rows; "" if there are none."""
    _, exact, folded = duplicates
    but = "" if exact.repeated == folded.repeated else f" ({exact.distinct:,} with case and white space)"
    rows = folded.distinct + folded.repeated
    return f"{rows:,} training rows, {folded.distinct:,} distinct{but}" if folded.repeated else ""


def describe_overlap(duplicates: Sequence[Duplicates], held_out: int) -> str:
    """Describe the held-out rows that are training rows; "" if there are none."""
    _, exact, folded = duplicates
    but = "" if exact.held_out == folded.held_out else f" ({exact.held_out:,} exactly)"
    return f"{folded.held_out:,} of {held_out:,} held-out rows are training rows{but}" if folded.held_out else ""


def trained_columns(recipe: Recipe | SFTRecipe) -> Sequence[str] | None:
    """Return the columns that a run of `recipe` is trained on, for `RowHashes`."""
    if isinstance(recipe, SFTRecipe):
        return EXAMPLE
    return None if recipe.envs.environment else PROMPT


def _encode(row: Row, columns: Sequence[str] | None) -> str:
    """Encode these columns of a row as JSON text; the whole row if they are None."""
    return ENCODER.encode(row if columns is None else [row.get(name) for name in columns])


def _fold(text: str) -> str:
    """Fold case and white space in JSON text: a run of it, also of escapes, is one space, and none begins or ends a
    string.
    """
    for escape in ("\\n", "\\r", "\\t"):
        text = text.replace(escape, " ")
    return " ".join(text.casefold().split()).replace('" ', '"').replace(' "', '"')


def _count(kind: str, train: "np.ndarray", held_out: "np.ndarray") -> Duplicates:
    import numpy as np

    values, first, counts = np.unique(train, return_index=True, return_counts=True)
    most = int(counts.argmax()) if values.size else 0
    shared = np.flatnonzero(np.isin(held_out, values))
    frequent = (int(counts[most]), int(first[most])) if values.size else (0, 0)
    place = int(shared[0]) if shared.size else None
    return Duplicates(kind, values.size, train.size - values.size, *frequent, shared.size, place)
