"""Output of the running cell of a notebook: curves of a run, its latest completions and its latest lines.

In: rows of metrics, samples, text. Out: text, and HTML of the same that needs no script and no network. Names of
metrics and texts of the model are untrusted: they are escaped, and never read as markup.
"""

import html
import io
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console, RenderableType

from covey.display import printable
from covey.monitor.display import StepLines
from covey.monitor.formats import SampleLine, excerpt, in_unit
from covey.monitor.record import StepRecord
from covey_status.terminal import StatusView, TerminalDisplay

NOTEBOOK_LINES = 30
"""Number of lines that a notebook shows above the status."""
NOTEBOOK_INTERVAL = 0.5
"""Minimum number of seconds between two drawings of the same output of a notebook."""
CURVES = (
    "reward",
    "eval/accuracy",
    "eval/reward",
    "eval/loss",
    "completions/mean_length",
    "kl",
    "entropy",
    "loss",
    "grad_norm",
)
"""Metrics of which the first `MAX_CURVES` that a run measures are drawn; the loss of RL is 0 by construction."""
MAX_CURVES, MAX_POINTS = 4, 200
"""Largest number of curves, and of points of one of them."""
WIDTH, HEIGHT, EDGE = 240, 72, 4
"""Size of a curve and of the edge around it, in pixels."""


class NotebookOutput(io.TextIOBase):
    """Output of the running cell that is replaced as a run goes on. It is a file, whose latest lines are shown as text,
    never as markup, with the methods of rich's `Live`, whose output would fill the notebook.

    Args:
        lines: number of lines that are shown.
        status: what is drawn below them, in lines of `width` cells.

    Attributes:
        figures: curves and the latest completions, which a step adds to.
    """

    def __init__(self, lines: int, status: RenderableType = "", width: int = 80):
        self.figures = Figures()
        self._latest: deque[str] = deque(maxlen=lines)
        self._status, self._width, self._due = status, width, 0.0
        self._handle: Any = None

    def write(self, text: str) -> int:
        self._latest.extend(text.splitlines())
        self.refresh()
        return len(text)

    def start(self) -> None:
        """Do nothing: the first text makes the output."""

    def stop(self) -> None:
        """Show the last text."""
        self.refresh(now=True)

    def refresh(self, now: bool = False) -> None:
        """Show the latest text, unless one was shown very recently and `now` is not set."""
        if not now and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + NOTEBOOK_INTERVAL
        drawing = io.StringIO()
        plain_console(drawing, self._width).print(self._status)
        text = "\n".join([*self._latest, drawing.getvalue()]).rstrip("\n")
        bundle = {"text/plain": text, "text/html": f"{self.figures.to_html()}<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def plain_console(file: Any, width: int) -> Console:
    """Return a console that writes plain text to `file`."""
    return Console(file=file, width=width, color_system=None, force_jupyter=False)


class NotebookDisplay(TerminalDisplay):
    """Display in a notebook: curves and the latest completions above the latest lines, in one output."""

    def make_live(self) -> Any:
        view = StatusView(self.status, self.main_metric, self.values, moving=False)
        output = NotebookOutput(NOTEBOOK_LINES, view, self.console.width)
        self.console, self._figures = plain_console(output, self.console.width), output.figures
        return output

    def latest(self, row: Mapping[str, float], samples: Sequence[SampleLine]) -> None:
        self._figures.step(row, samples)


class NotebookLines(StepLines):
    """Observer that shows steps in a notebook: in one output, below curves and the latest completions."""

    def __init__(self, names: Iterable[str]):
        super().__init__(names)
        self._output = NotebookOutput(NOTEBOOK_LINES)

    def __call__(self, record: StepRecord) -> None:
        self._output.figures.step(record.metrics, SampleLine.of(record.groups))
        super().__call__(record)
        if record.step >= record.total:
            self._output.stop()

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        super().evaluation(name, metrics)
        self._output.stop()

    def line(self, text: str) -> None:
        self._output.write(text)


class Figures:
    """Curves of the metrics of a run and its latest completions, as HTML."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[float, float]]] = {name: [] for name in CURVES}
        self._samples: Sequence[SampleLine] = ()

    def step(self, row: Mapping[str, float], samples: Sequence[SampleLine]) -> None:
        """Add the metrics of a step; its completions replace those of the step before."""
        self._samples = samples
        for name, points in self._points.items():
            if math.isfinite(value := row.get(name, math.nan)):
                points.append((row["step"], value))

    def to_html(self) -> str:
        """Return curves and completions; "" before the first step."""
        measured = [(name, points) for name, points in self._points.items() if points]
        curves = "".join(curve(name, points) for name, points in measured[:MAX_CURVES])
        shown = f'<div style="display:flex;flex-wrap:wrap;gap:1em">{curves}</div>' if curves else ""
        return shown + samples_table(self._samples)


def curve(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Return the curve of the metric `name` by step as an SVG image with a caption, all of it escaped.

    Args:
        points: step and value, finite; at least one.
    """
    steps, values = zip(*points, strict=True)
    (first, last), (low, high) = (steps[0], steps[-1]), (min(values), max(values))
    across, down = WIDTH / ((last - first) or 1), HEIGHT / ((high - low) or 1)
    drawn = [*points[:: -(-len(points) // MAX_POINTS)], points[-1]]
    places = [(EDGE + across * (step - first), EDGE + down * (high - value)) for step, value in drawn]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    title, now = html.escape(printable(name)), html.escape(in_unit(name, values[-1]))
    span = html.escape(f"{in_unit(name, low)} to {in_unit(name, high)}, steps {first:.0f} to {last:.0f}")
    return (
        f'<figure style="margin:0"><figcaption>{title} <b>{now}</b></figcaption>'
        f'<svg width="{WIDTH + 2 * EDGE}" height="{HEIGHT + 2 * EDGE}" role="img" aria-label="{title}: {span}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f'<circle cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="2.5" fill="currentColor"/></svg>'
        f"<div><small>{span}</small></div></figure>"
    )


def samples_table(samples: Sequence[SampleLine]) -> str:
    """Return the two best and the two worst of `samples` as a table, all of it escaped; "" if there are none."""
    if not samples:
        return ""
    ranked = sorted(samples, key=lambda sample: sample.rank, reverse=True)
    rows = [
        (f"{sample.reward:+.2f}", excerpt(sample.prompt), excerpt(sample.text) or "(empty)")
        for sample in [*ranked[:2], *ranked[2:][-2:]]
    ]
    head = "".join(f"<th>{title}</th>" for title in ("reward", "prompt", "completion"))
    cell = '<td style="text-align:left;white-space:pre-wrap">'
    body = "".join(f"<tr>{''.join(f'{cell}{html.escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
