"""Metrics of a run as the rules of the diagnosis read them.

In: rows of `metrics.jsonl`, or a run that was read from its folder. Out: one array per metric, aligned by row, with NaN
where a row lacks the metric. A run that was resumed has one history: its file continues. This module does not import
JAX.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from covey.report.run_data import RunData
from covey.train.json_lines import is_count, number

MIN_WINDOW, MAX_WINDOW = 3, 50
"""Smallest and largest number of steps that are averaged."""
WINDOWS = 4
"""Number of windows in a run of usual length."""
LARGEST_COUNT = 10**9
"""Largest number of prompts and of completions that is read from a recipe."""


@dataclass(frozen=True)
class RunHistory:
    """Metrics of a run by row.

    Attributes:
        method: "rl" or "sft".
        settings: resolved recipe, by dotted name.
        steps: optimizer step of each row, ascending.
        columns: values of each metric by row; NaN where it was not measured.
        before, after: figures of the evaluations before and after training; empty when there are none.
        samples: file of the completions; None when it cannot be read.
    """

    method: str
    settings: Mapping[str, Any]
    steps: Int[np.ndarray, "n"]
    columns: Mapping[str, Float[np.ndarray, "n"]]
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    samples: Path | None = None
    _noise: dict[str, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, run: RunData) -> "RunHistory":
        """Return the history of a run that was read from its folder."""
        steps = np.array(run.steps, np.int64)
        columns = {}
        for name, series in run.series.items():
            columns[name] = np.full(len(steps), np.nan)
            columns[name][np.searchsorted(steps, np.array(series.steps, np.int64))] = series.values
        before, after = (_figures(run.summary.get(name)) for name in ("before", "after"))
        return cls(run.method, run.settings, steps, columns, before, after, run.samples)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        method: str = "rl",
        settings: Mapping[str, Any] | None = None,
        before: Mapping[str, float] | None = None,
    ) -> "RunHistory":
        """Return the history of rows of `metrics.jsonl`. A row whose step does not ascend is left out."""
        kept: list[Mapping[str, Any]] = []
        for row in rows:
            if is_count(row.get("step")) and (not kept or row["step"] > kept[-1]["step"]):
                kept.append(row)
        names = dict.fromkeys(name for row in kept for name in row if name != "step")
        columns = {name: np.array([_value(row.get(name)) for row in kept], np.float64) for name in names}
        steps = np.array([row["step"] for row in kept], np.int64)
        return cls(method, settings or {}, steps, columns, before or {})

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.steps)

    @property
    def window(self) -> int:
        """Number of rows that are averaged: a quarter of the run, from 3 to 50."""
        return max(MIN_WINDOW, min(MAX_WINDOW, round(len(self) / WINDOWS)))

    def column(self, name: str) -> Float[np.ndarray, "n"]:
        """Return the values of the metric `name` by row; NaN in all rows if it was never measured."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Return whether the metric `name` was measured in any row."""
        return bool(np.isfinite(self.column(name)).any())

    def numeric_setting(self, name: str, default: float) -> float:
        """Return the setting `name` as a number; `default` if the recipe has none."""
        value = number(self.settings.get(name))
        return default if value is None else value

    def noise(self, name: str) -> float:
        """Return the noise of the metric `name` in the whole run, as the function `noise` does."""
        if name not in self._noise:
            column = self.column(name)
            self._noise[name] = noise(column[np.isfinite(column)])
        return self._noise[name]

    @property
    def group_size(self) -> int:
        """Number of completions per prompt; 0 if unknown."""
        return self._count("grpo.num_generations")

    @property
    def groups_per_step(self) -> int:
        """Number of prompts in a step; 0 if unknown."""
        return self._count("training.prompts_per_step")

    @property
    def samples_per_step(self) -> int:
        """Number of completions that a row stands for, at least; 0 if unknown."""
        return self.groups_per_step * self.group_size

    def _count(self, name: str) -> int:
        return int(min(max(self.numeric_setting(name, 0), 0), LARGEST_COUNT))

    @property
    def has_critic(self) -> bool:
        """Whether the advantages come from a critic, which learns from groups of equal rewards too."""
        return self.settings.get("grpo.algorithm") == "ppo" or self.settings.get("grpo.advantage") == "gae"

    def functions(self) -> list[str]:
        """Return the names of the reward functions. The penalty of `grpo.overlong_buffer` is none."""
        parts = [name.split("/") for name in self.columns if name.startswith("rewards/") and name.endswith("/mean")]
        return [part[1] for part in parts if len(part) == 3 and part[1] != "overlong"]

    def evaluations(self, name: str) -> list[tuple[int, float]]:
        """Return the step and value of the figure `name` in every evaluation, the first (step 0) and the last
        included."""
        values = self.column(f"eval/{name}")
        found = {int(self.steps[i]): float(values[i]) for i in np.flatnonzero(np.isfinite(values))}
        found |= {0: self.before[name]} if name in self.before else {}
        found |= {int(self.steps[-1]): self.after[name]} if name in self.after and len(self) else {}
        return sorted(found.items())


def noise(values: Float[np.ndarray, "n"]) -> float:
    """Return the standard deviation of one value around a slow trend, from the median of the successive differences.

    >>> noise(np.arange(5.0)) < noise(np.array([0.0, 3, 0, 3, 0]))
    True
    """
    if values.size < 2:
        return 0.0
    return float(np.median(np.abs(np.diff(values))) / (0.6745 * math.sqrt(2)))


def _figures(evaluation: Any) -> dict[str, float]:
    entries: Iterable[tuple[str, Any]] = evaluation.items() if isinstance(evaluation, Mapping) else ()
    return {name: value for name, raw in entries if (value := number(raw)) is not None}


def _value(raw: Any) -> float:
    """Return a value of a row as a number; NaN where it is none.

    >>> _value(0.5), _value(None), _value(float("inf"))
    (0.5, nan, nan)
    """
    found = number(raw)
    return math.nan if found is None or not math.isfinite(found) else found
