"""Read a run folder into plain data, as far as it has been written.

In: the files of a run that is finished, still running or stopped: `recipe.yaml`, `metrics.jsonl`, `summary.json`,
`before.jsonl`, `after.jsonl`; `samples.jsonl` is read by `completions`. Out: `RunData`. The files are untrusted: a line
or a value of another form is left out and counted. This module does not import JAX.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from covey.config import recipe
from covey.config.recipe import flatten, read_settings
from covey.config.schema import PPOConfig
from covey.files import is_count, number, open_or_empty, parse_line
from covey.monitor.run_files import AFTER, BEFORE, METRICS, SAMPLES, SUMMARY
from covey_report.changes import errors_of_changes
from covey_report.run_files import TOKENS
from covey_status.watched_run import FINISHED, read_object, read_state

Row = Mapping[str, Any]

MAX_VALUES = 200_000
"""Maximum number of values of all series of a page: about 1.5 MB."""
MIN_POINTS = 100
"""Number of points that a series keeps at least, however many runs and metrics there are."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps.

    Attributes:
        steps: steps at which it was measured, ascending.
        values: its finite values, as many.
    """

    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class RunData:
    """Content of a run folder.

    Attributes:
        name: name of the folder.
        path: the folder.
        method: "rl" or "sft".
        settings: resolved recipe, by dotted name.
        steps: steps with a row in `metrics.jsonl`, ascending.
        seconds: seconds of training up to each of these steps, compilation included.
        series: metrics by name.
        summary: content of `summary.json`; empty when there is none yet.
        before, after: rows of the completions of held-out prompts; empty when there are none.
        unreadable: number of lines left out, by file name.
        change_errors: standard errors of the changes from the evaluation before training to that after it, by figure.
        status: one of the states of `covey_status.watched_run`.
        is_public: whether prompts, completions and paths are left out; see `covey_report.public`.
    """

    name: str
    path: Path
    method: str
    settings: Mapping[str, Any]
    steps: Sequence[int]
    seconds: Sequence[float]
    series: Mapping[str, Series]
    summary: Mapping[str, Any] = field(default_factory=dict)
    before: Sequence[Row] = ()
    after: Sequence[Row] = ()
    unreadable: Mapping[str, int] = field(default_factory=dict)
    change_errors: Mapping[str, float] = field(default_factory=dict)
    status: str = FINISHED
    is_public: bool = False

    @property
    def samples(self) -> Path:
        """Path of the completions of all steps."""
        return self.path / SAMPLES

    @property
    def tokens(self) -> Path:
        """Path of the values of tokens."""
        return self.path / TOKENS

    def evaluation(self, name: str) -> Mapping[str, float]:
        """Return the figures of the evaluation `name`, before or after training; none if there are none."""
        return numbers(self.summary.get(name))

    @property
    def state(self) -> str:
        """State as far as the files show it: finished, or the last step written."""
        return "finished" if "after" in self.summary else f"at step {self.steps[-1]}" if self.steps else "not started"


def read_run(folder: Path) -> RunData:
    """Read the run in `folder`.

    Raises:
        CoveyError: it is no run folder: it has no `recipe.yaml`, or one that is not readable as YAML.
    """
    recipe.require_run(folder)
    settings = read_settings(folder)
    unreadable: dict[str, int] = {}
    curves = Curves(read_lines(folder / METRICS, unreadable))
    summary = read_object(folder / SUMMARY) or {}
    before, after = (list(read_lines(folder / name, unreadable)) for name in (BEFORE, AFTER))
    return RunData(
        name=folder.resolve().name,
        path=folder,
        method=str(settings.get("method", "rl")),
        settings=settings,
        steps=curves.steps,
        seconds=curves.seconds,
        series=curves.series,
        summary=summary,
        before=before,
        after=after,
        unreadable=unreadable,
        change_errors=change_errors(summary, before, after),
        status=FINISHED if "after" in summary else read_state(folder),
    )


def change_errors(summary: Mapping[str, Any], before: Iterable[Row], after: Iterable[Row]) -> dict[str, float]:
    """Return `RunData.change_errors` of a run with this summary, given the rows of its evaluations."""
    return errors_of_changes(numbers(summary.get("before")), before, numbers(summary.get("after")), after)


def read_lines(file: Path, unreadable: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, if there is one; count in `unreadable` the lines that are none. An
    unfinished last line is being written, and is not counted.
    """
    with open_or_empty(file.parent, file.name) as lines:
        for line in lines:
            if (row := parse_line(line)) is not None:
                yield row
            elif line.endswith(b"\n"):
                unreadable[file.name] = unreadable.get(file.name, 0) + 1


def numbers(figures: Any) -> Mapping[str, float]:
    """Return the finite numbers of a part of `summary.json` by name; none if it is no object."""
    entries = figures.items() if isinstance(figures, Mapping) else ()
    return {name: value for name, raw in entries if (value := number(raw)) is not None}


def default_settings(method: str, algorithm: Any = None) -> Mapping[str, Any]:
    """Return the default of every setting of a recipe by dotted name, for the `algorithm` of an RL run."""
    if method == "sft":
        return flatten(asdict(recipe.SFTRecipe()))
    return flatten(asdict(recipe.Recipe(grpo=PPOConfig()) if algorithm == "ppo" else recipe.Recipe()))


@cache
def built_in_settings(name: str) -> Mapping[str, Any]:
    """Return every setting of the built-in recipe `name` by dotted name; none if there is no such recipe."""
    return flatten(asdict(recipe.read_built_in(name))) if name in recipe.names() else {}


class Curves:
    """Finite values in rows of `metrics.jsonl`, to which more rows can be added.

    Attributes:
        steps: steps that have a row, ascending.
        seconds: seconds of training up to each of them.
        series: metrics by name.
    """

    def __init__(self, rows: Iterable[Row] = ()):
        self.steps, self.seconds = array("q"), array("d")
        self.series: dict[str, Series] = {}
        self._points: dict[str, tuple[array[int], array[float]]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a row; it is left out if its step does not ascend."""
        step = row.get("step")
        if not is_count(step) or (self.steps and step <= self.steps[-1]):
            return
        passed = self.seconds[-1] if self.seconds else 0.0
        self.steps.append(step)
        self.seconds.append(passed + max(0.0, number(row.get("step_time")) or 0.0))
        for name, raw in row.items():
            if name != "step" and (value := number(raw)) is not None:
                if name not in self._points:
                    self._points[name] = array("q"), array("d")
                    self.series[name] = Series(*self._points[name])
                steps, values = self._points[name]
                steps.append(step)
                values.append(value)


def points_per_series(count: int, longest: int) -> int:
    """Return the limit of points for each of `count` series, the longest of which has `longest`.

    >>> points_per_series(60, 2000), points_per_series(60, 100_000)
    (2000, 3333)
    """
    return max(MIN_POINTS, min(longest, MAX_VALUES // max(count, 1)))


def reduce_series(series: Series, limit: int) -> Series:
    """Return at most about `limit` points of `series`: the first, the last, and the extremes of each range of steps, so
    that a spike of one step stays visible.

    >>> reduce_series(Series(range(8), [0, 0, 9, 0, 0, 0, -9, 0]), 6).values
    [0, 9, 0, -9, 0]
    """
    if len(series.values) <= limit:
        return series
    indices = extremes(series.values, max(1, (limit - 2) // 2))
    return Series([series.steps[i] for i in indices], [series.values[i] for i in indices])


def extremes(values: Sequence[float], ranges: int) -> list[int]:
    """Return the ascending indices of the first and the last value and of the lowest and highest of each range."""
    array = np.asarray(values, np.float64)
    edges = np.unique(np.linspace(0, len(array), ranges + 1).astype(int))
    indices = {0, len(array) - 1}
    for start, stop in pairwise(edges.tolist()):
        indices |= {start + int(array[start:stop].argmin()), start + int(array[start:stop].argmax())}
    return sorted(indices)


def spread(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` positions, evenly spaced, the first and the last among them.

    >>> spread(9, 3), spread(2, 5), spread(5, 1)
    ([0, 4, 8], [0, 1], [0])
    """
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, limit - 1)) for i in range(limit)})


def coarse_to_fine(count: int) -> Iterator[int]:
    """Yield 0 to count − 1: the first, the last, then the middle of each gap, so that any beginning is spread evenly.

    >>> list(coarse_to_fine(5))
    [0, 4, 2, 1, 3]
    """
    yield from range(min(count, 1))
    if count > 1:
        yield count - 1
    gaps = [(0, count - 1)]
    for first, last in gaps:
        if last - first > 1:
            middle = (first + last) // 2
            yield middle
            gaps += [(first, middle), (middle, last)]
