"""Standard errors of the changes of held-out figures between two evaluations, for reports, boards and the diagnosis.

Both evaluations ask the same prompts. The error is taken over the differences by prompt, so that differences among
prompts do not count: it is smaller than for two independent evaluations.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from covey.config.metrics import Metric
from covey.files import number
from covey.types import FinishReason

Row = Mapping[str, Any]
Questions = Mapping[str, Sequence[Row]]
"""Completions of held-out prompts, by prompt."""
Figures = Mapping[str, float]
"""Figures of an evaluation by name."""


def direction(name: str, row: Metric | None) -> int:
    """Return 1 if a higher value of the metric is better, -1 if a lower one is, and 0 if neither is known to be."""
    if row and row.lower_is_better:
        return -1
    return int("accuracy" in name or "pass@" in name or (row is not None and row.unit == "reward"))


def errors_of_changes(old: Figures, before: Iterable[Row], new: Figures, after: Iterable[Row]) -> dict[str, float]:
    """Return the standard errors of the changes from one evaluation to another of the same prompts, by figure: those of
    the mean differences by prompt. Where the rows do not tell it, the accuracy has that of independent evaluations.

    Args:
        old, new: figures of the evaluations by name.
        before, after: their completions; not used where they are not all of them.
    """
    both = [(figures, [*rows] if old and new else []) for figures, rows in ((old, before), (new, after))]
    questions = [questions_of(rows) if figures.get("samples") == len(rows) else {} for figures, rows in both]
    independent = {"accuracy": math.hypot(old["error"], new["error"])} if "error" in old and "error" in new else {}
    paired = {name: _paired_error(_reader(name), *questions) for name in old.keys() & new.keys()}
    return independent | {name: error for name, error in paired.items() if error is not None}


def _paired_error(read: Callable[[Row], float | None], before: Questions, after: Questions) -> float | None:
    """Return the standard error of the mean difference by prompt; None of fewer than two prompts."""
    old, new = (_means(questions, read) for questions in (before, after))
    differences = np.array([new[key] - old[key] for key in old.keys() & new.keys()])
    return float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else None


def questions_of(rows: Iterable[Row]) -> Questions:
    """Return rows by prompt: `group` numbers may differ between evaluations of different sizes."""
    questions: dict[str, list[Row]] = {}
    repeated: Counter[str] = Counter()
    for (_, prompt), group in groupby(rows, key=lambda row: (row.get("group"), str(row.get("prompt", "")))):
        repeated[prompt] += 1
        questions[f"{repeated[prompt]} {prompt}"] = list(group)
    return questions


def _means(questions: Questions, read: Callable[[Row], float | None]) -> dict[str, float]:
    values = {key: [value for row in rows if (value := read(row)) is not None] for key, rows in questions.items()}
    return {key: sum(some) / len(some) for key, some in values.items() if some}


def _reader(name: str) -> Callable[[Row], float | None]:
    """Return the function that reads the value of one completion from which the figure `name` is the mean."""
    readers: Mapping[str, Callable[[Row], float | None]] = {
        "reward": lambda row: number(row.get("reward")),
        "mean_length": lambda row: number(row.get("length")),
        "clipped_ratio": lambda row: float(FinishReason.recorded(row.get("finish")).was_cut),
    }
    return readers.get(name, lambda row: verdict(row, name))


def verdict(row: Row, name: str = "accuracy") -> bool | None:
    """Return whether the completion of `row` is right by the function of this name; None if that is not recorded."""
    correct = row.get("correct")
    judged = correct.get(name) if isinstance(correct, Mapping) else None
    return judged if isinstance(judged, bool) else None
