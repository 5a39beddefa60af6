"""Changes with their standard errors: of held-out figures between two evaluations, and of curves from the first to the
last steps of a run.

Both evaluations ask the same prompts. The error is that of the mean difference by prompt, which leaves out how much the
prompts differ among themselves: it is smaller than that of two independent evaluations.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from covey.config.metrics import Metric
from covey.files import number
from covey.report.diagnosis import RunHistory
from covey.report.run_data import Row, RunData
from covey.types import FinishReason

Questions = Mapping[str, Sequence[Row]]
"""Completions of held-out prompts, by prompt."""
TRENDS = ("reward", "loss", "completions/mean_length")
"""Metrics of steps whose change is among the first figures of a page."""


def direction(name: str, row: Metric | None) -> int:
    """Return 1 if a higher value of the metric is better, -1 if a lower one is, and 0 if neither is known to be."""
    if row and row.lower_is_better:
        return -1
    return int("accuracy" in name or "pass@" in name or (row is not None and row.unit == "reward"))


def trends(run: RunData) -> dict[str, list[Any]]:
    """Return `[early mean, late mean, change, standard error or None, early steps, late steps]` of curves, as the
    diagnosis compares them.
    """
    history = RunHistory.of(run)
    changes = {name: history.metric(name).change for name in TRENDS if name in run.series}
    return {
        name: [early.mean, late.mean, change.difference, number(change.error) or None, early.span, late.span]
        for name, change in changes.items()
        if change and (early := change.early).last < (late := change.late).first
    }


def error_of_change(name: str, before: Questions, after: Questions) -> float | None:
    """Return the standard error of the change of the figure `name` between two evaluations of the same prompts; None if
    the rows do not tell it.
    """
    old, new = (_means(questions, _reader(name)) for questions in (before, after))
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
    return readers.get(name, lambda row: _verdict(row.get("correct"), name))


def _verdict(correct: Any, name: str) -> float | None:
    verdict = correct.get(name) if isinstance(correct, Mapping) else None
    return float(verdict) if isinstance(verdict, bool) else None
