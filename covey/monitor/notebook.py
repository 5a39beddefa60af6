"""Output of the running cell of a notebook: the latest lines of a run."""

import html
import io
import time
from collections import deque
from importlib import import_module
from typing import Any

from rich.console import Console, RenderableType

NOTEBOOK_LINES = 30
"""Number of lines that a notebook shows above the status."""
NOTEBOOK_INTERVAL = 0.5
"""Minimum number of seconds between two drawings of the same output of a notebook."""


class NotebookOutput(io.TextIOBase):
    """Output of the running cell that is replaced as a run goes on. It is a file, whose latest lines are shown as text,
    never as markup, with the methods of rich's `Live`, whose output would fill the notebook.

    Args:
        lines: number of lines that are shown.
        status: what is drawn below them, in lines of `width` cells.
    """

    def __init__(self, lines: int, status: RenderableType = "", width: int = 80):
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
        bundle = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def plain_console(file: Any, width: int) -> Console:
    """Return a console that writes plain text to `file`."""
    return Console(file=file, width=width, color_system=None, force_jupyter=False)
