"""Execute `covey board`: the runs of a folder as a local web page that follows them."""

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path

from covey.cli.parse import Line
from covey.display import echo
from covey.errors import CoveyError
from covey.registry import import_package

FOLDER = "runs"
"""Folder that is shown when none is named: that in which runs are made."""


def board(line: Line) -> None:
    """Execute `covey board [RUNS] [--port N] [--no-browser]`."""
    folder = Path(line.arguments[0] if line.arguments else FOLDER).expanduser()
    show_board(folder, _port(line), "--no-browser" not in line.options)


def show_board(folder: Path, port: int | None = None, browser: bool = True) -> None:
    """Show the runs of `folder`, or the run in it, until the process is interrupted.

    Args:
        port: port of the server; 0 is any free one, and None the first free one of some.
        browser: open a browser, where there is a display.

    Raises:
        CoveyError: there is no such folder, the extra `serve` is not installed, or the port is not free.
    """
    if not folder.is_dir():
        fix = "name the folder with your runs; covey train quickstart makes the folder runs"
        raise CoveyError("there is no such folder", want="a folder with runs, or a run", fix=fix, where=str(folder))
    for package in ("starlette", "uvicorn"):
        import_package(package, CoveyError, f"a board needs the package {package}", "serve")
    from covey_report.board import app  # late: it needs these packages
    from covey_report.board.folder import RunsFolder

    with app.listen(port) as listener:
        url = f"http://{app.ADDRESS}:{listener.getsockname()[1]}/"
        _announce(url, folder, browser)
        with suppress(KeyboardInterrupt):
            app.make_server(RunsFolder(folder)).run(sockets=[listener])


def _announce(url: str, folder: Path, browser: bool) -> None:
    echo(f"{folder}: {url} (this machine alone; Ctrl-C ends it)")
    if browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        webbrowser.open(url)


def _port(line: Line) -> int | None:
    text = line.options.get("--port")
    if text is not None and not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise CoveyError(f"--port is {text!r}", want="a whole number from 0 to 65535; 0 is any free port")
    return None if text is None else int(text)
