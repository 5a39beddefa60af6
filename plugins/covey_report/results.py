"""Settings of runs compared with the defaults and each other, and results of runs.

Every figure that has a standard error brings it. The best of many noisy steps is biased upward, so that it says less
than the figures of the end.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from covey.config.metrics import metric
from covey.monitor.formats import JUDGED
from covey_report.run_data import RunData, built_in_settings, default_settings

NAMES = ("name", "description", "needs", "expect", "out", "method")
"""Settings that describe a run and do not change it; they do not count as differences."""
LAST_SHARE = 0.1
"""Share of the steps at the end whose mean is the final value of a metric."""
HELD_OUT = (
    "accuracy", "partial_accuracy", "format_accuracy", "reward", *JUDGED, "loss", "perplexity", "mean_length",
)  # fmt: skip
"""Metrics of evaluations that are compared, in this order."""
CURVES = ("reward", "eval/accuracy", "eval/reward", "eval/loss", "loss", "kl", "entropy", "completions/mean_length")
"""Metrics of steps that are compared, in this order."""
ERRORS = {"reward": "reward_error", "eval/accuracy": "eval/error"}
"""Metric → metric of its standard error."""


def settings_table(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return every setting of the runs: its name, default, value in the built-in recipe of the first run's name, value
    per run, and whether it differs.

    `changed` is whether a run has another value than the default, `edited` another one than the built-in recipe of its
    name, and `differs` whether the runs have different values; one that a run lacks differs where another run has set
    it to something else than its default. A setting that this version of Covey lacks has the default null, and one that
    a run lacks has the value null.
    """
    recipes = [built_in_settings(str(run.settings.get("name"))) for run in runs]
    defaults = [default_settings(run.method, run.settings.get("grpo.algorithm")) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = []
    for name in names:
        values = [as_text(run.settings[name]) if name in run.settings else None for run in runs]
        standard = [as_text(known[name]) if name in known else None for known in defaults]
        built_in = [as_text(known[name]) if name in known else None for known in recipes]
        counts = name not in NAMES
        rows.append(
            {
                "name": name,
                "default": standard[0],
                "values": values,
                "built_in": built_in[0],
                "edited": counts and any(old not in (None, new) for old, new in zip(built_in, values, strict=True)),
                "changed": counts and values != standard,
                "differs": counts
                and len(set(values)) > 1
                and len({text for pair in zip(values, standard, strict=True) if pair[0] is not None for text in pair})
                > 1,
            }
        )
    return rows


def as_text(value: Any) -> str:
    """Return a value as text: as in JSON, and text itself without quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


class Figure(NamedTuple):
    """One figure of a run.

    Attributes:
        value: the figure; a whole number is a count.
        error: its standard error; None if it is not known.
        step: the step at which it was measured, for the best value of a curve; None otherwise.
    """

    value: float
    error: float | None = None
    step: int | None = None


def results_table(runs: Sequence[RunData]) -> dict[str, list[Figure | None]]:
    """Return the figures of each run by name, where at least one run has the figure; None for the others."""
    rows = {name: [figure(run) for run in runs] for name, figure in FIGURES.items()}
    return {name: row for name, row in rows.items() if any(row)}


def _held_out(name: str, when: str, run: RunData) -> Figure | None:
    figures = run.evaluation(when)
    error = figures.get("error") if name == "accuracy" else None
    return Figure(figures[name], error) if name in figures else None


def _final(name: str, run: RunData) -> Figure | None:
    """Return the mean over the last steps, with the standard error that follows from the errors of these steps. All
    evaluations ask the same prompts: their mean is as uncertain as one of them.
    """
    if (series := run.series.get(name)) is None:
        return None
    count = max(1, round(LAST_SHARE * len(series.values)))
    errors = [error for step in series.steps[-count:] if (error := _error_at(run, name, step)) is not None]
    error = (sum(errors) if name.startswith("eval/") else math.hypot(*errors)) / count if len(errors) == count else None
    return Figure(sum(series.values[-count:]) / count, error)


def _best(name: str, run: RunData) -> Figure | None:
    """Return the best value of a metric of which one direction is better."""
    series, row = run.series.get(name), metric(name)
    better = row and (row.lower_is_better or row.unit == "reward" or name == "eval/accuracy")
    if series is None or row is None or not better or name in ("kl", "loss"):
        return None
    sign = -1 if row.lower_is_better else 1
    step, value = max(zip(series.steps, series.values, strict=True), key=lambda point: sign * point[1])
    return Figure(value, _error_at(run, name, step), step)


def _error_at(run: RunData, name: str, step: int) -> float | None:
    errors = run.series.get(ERRORS.get(name, ""))
    return errors.values[list(errors.steps).index(step)] if errors and step in errors.steps else None


FIGURES: dict[str, Callable[[RunData], Figure | None]] = {
    **{f"{name} {when}": partial(_held_out, name, when) for name in HELD_OUT for when in ("before", "after")},
    **{f"{which} {name}": partial(of, name) for name in CURVES for which, of in (("final", _final), ("best", _best))},
    "steps": lambda run: Figure(run.steps[-1]) if run.steps else None,
    "seconds": lambda run: Figure(run.seconds[-1]) if run.steps else None,
    "tokens/s": partial(_final, "tokens_per_second"),
}
"""Figures of a run by name, in the order of the table."""
