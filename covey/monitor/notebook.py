"""Output of a notebook cell that is replaced as a run goes on, so that a long run does not fill the notebook."""

import html
import time
from importlib import import_module
from typing import Any

INTERVAL = 0.5
"""Minimum number of seconds between two drawings of the same output."""


def in_notebook() -> bool:
    """Return whether this process shows its output in a notebook."""
    from rich.console import Console

    return Console().is_jupyter


class NotebookOutput:
    """One output of the running cell. The text is shown as text, never as markup."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._due = 0.0

    def show(self, text: str, now: bool = False) -> None:
        """Show `text` in place of what was shown before, unless that was drawn very recently and `now` is not set."""
        if not now and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + INTERVAL
        bundle = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
