"""Compare the settings of runs with the defaults and with each other, and their results.

Every figure that has a standard error brings it. The best of many noisy steps is biased upward, so that it says less
than the figures of the end.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from covey.config.metrics import metric
from covey.report.run_data import RunData, Series, built_in_settings, default_settings
from covey.train.json_lines import number

NAMES = ("name", "description", "needs", "expect", "out", "method")
"""Settings that describe a run and do not change it; they do not count as differences."""
LAST_SHARE = 0.1
"""Share of the steps at the end whose mean is the final value of a metric."""
HELD_OUT = ("accuracy", "partial_accuracy", "format_accuracy", "reward", "loss", "perplexity", "mean_length")
"""Metrics of evaluations that are compared, in this order."""
CURVES = ("reward", "eval/accuracy", "eval/reward", "eval/loss", "loss", "kl", "entropy", "completions/mean_length")
"""Metrics of steps that are compared, in this order."""
ERRORS = {"reward": "reward_error", "eval/accuracy": "eval/error"}
"""Map from a metric to that of its standard error."""


def settings_table(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return every setting of the runs: its name, default, value in the built-in recipe of the first run's name, value
    per run, and whether it differs.

    `changed` is whether a run has another value than the default, `edited` another one than the built-in recipe of its
    name, and `differs` whether the runs have different values. A setting that this version of Covey lacks has the
    default null, and one that a run lacks has the value null.
    """
    recipes = [built_in_settings(str(run.settings.get("name"))) for run in runs]
    defaults = [default_settings(run.method, run.settings.get("grpo.algorithm")) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = []
    for name in names:
        values = [_shown(run.settings[name]) if name in run.settings else None for run in runs]
        standard = [_shown(known[name]) if name in known else None for known in defaults]
        built_in = [_shown(known[name]) if name in known else None for known in recipes]
        counts = name not in NAMES
        rows.append(
            {
                "name": name,
                "default": standard[0],
                "values": values,
                "built_in": built_in[0],
                "edited": counts and any(old not in (None, new) for old, new in zip(built_in, values, strict=True)),
                "changed": counts and values != standard,
                "differs": counts and len(set(values)) > 1,
            }
        )
    return rows


def _shown(value: Any) -> str:
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
    columns = [dict(_figures(run)) for run in runs]
    names = dict.fromkeys(name for name in _names() if any(name in column for column in columns))
    return {name: [column.get(name) for column in columns] for name in names}


def _names() -> Iterable[str]:
    yield from (f"{name} {when}" for name in HELD_OUT for when in ("before", "after"))
    yield from (f"{which} {name}" for name in CURVES for which in ("final", "best"))
    yield from ("steps", "seconds", "tokens/s")


def _figures(run: RunData) -> Iterable[tuple[str, Figure]]:
    for when in ("before", "after"):
        found = run.summary.get(when)
        if isinstance(found, Mapping):
            yield from _held_out(found, when)
    for name in CURVES:
        if name in run.series:
            yield from _curve(name, run.series)
    if run.steps:
        yield "steps", Figure(run.steps[-1])
        yield "seconds", Figure(run.seconds[-1])
    if "tokens_per_second" in run.series:
        yield "tokens/s", _final(run.series["tokens_per_second"], None)


def _held_out(found: Mapping[str, Any], when: str) -> Iterable[tuple[str, Figure]]:
    for name in HELD_OUT:
        if (value := number(found.get(name))) is not None:
            error = number(found.get("error")) if name == "accuracy" else None
            yield f"{name} {when}", Figure(value, error)


def _curve(name: str, series: Mapping[str, Series]) -> Iterable[tuple[str, Figure]]:
    """Yield the final and, where one direction is better, the best value of a metric."""
    errors = series.get(ERRORS.get(name, ""))
    yield f"final {name}", _final(series[name], errors)
    row = metric(name)
    better = row is not None and (row.lower_is_better or row.unit == "reward" or name == "eval/accuracy")
    if better and name not in ("kl", "loss") and row is not None:
        sign = -1 if row.lower_is_better else 1
        at, value = max(zip(series[name].steps, series[name].values, strict=True), key=lambda pair: sign * pair[1])
        yield f"best {name}", Figure(value, _error_at(errors, at), at)


def _final(series: Series, errors: Series | None) -> Figure:
    """Return the mean over the last steps, with the standard error that follows from the errors of these steps."""
    count = max(1, round(LAST_SHARE * len(series.values)))
    values, steps = series.values[-count:], series.steps[-count:]
    known = [error for step in steps if (error := _error_at(errors, step)) is not None]
    error = math.hypot(*known) / count if len(known) == count else None
    return Figure(sum(values) / count, error)


def _error_at(errors: Series | None, step: int) -> float | None:
    if errors is None or step not in errors.steps:
        return None
    return errors.values[list(errors.steps).index(step)]
