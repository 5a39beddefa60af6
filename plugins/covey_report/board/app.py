"""Answer the page that shows all runs of a folder: an application of Starlette, and a server on this machine alone.

It reads and never writes, and listens on the loopback address only. A request must name this machine as its host,
because a page of another site could otherwise reach the server under a name that it lets point here (DNS rebinding).
The Content-Security-Policy allows the script, the style and the requests of this server, and nothing else.
"""

import json
import socket
from bisect import bisect_right
from contextlib import suppress
from functools import cache, partial
from importlib.resources import files
from threading import Lock
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from covey.display import mask_secrets, secret_mask
from covey.errors import CoveyError
from covey.monitor.run_files import SAMPLES
from covey_report.board.folder import BoardRun, RunsFolder
from covey_report.completions import MAX_BYTES, encode_groups
from covey_report.http import server_config
from covey_report.page import UPLOT, clocks_of, findings_data, page_data
from covey_report.run_data import RunData, Series
from covey_report.sections import BOARD, asset, elements_of, join_scripts
from covey_report.texts import script_json

ADDRESS, PORT, PORTS = "127.0.0.1", 8421, 20
"""Address and first port of the server, and number of ports that are tried where none is asked for."""
HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine that a request may have, also through a tunnel."""
MOST_CONNECTIONS, MAX_DIGITS = 64, 16
"""Maximum number of connections at a time, and of digits of a step."""
MOST_RUNS = 8
"""Maximum number of runs that are shown together: as many as there are colours."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Board:
    """Answers to the requests of the page. They are computed one after the other, because they read and extend the same
    runs.

    Args:
        runs: the runs of the folder.
    """

    def __init__(self, runs: RunsFolder):
        self.runs, self._lock = runs, Lock()

    def list_runs(self, request: Request) -> Response:
        """Return the row of each run, and whether some are not read yet."""
        with self._lock:
            more = self.runs.look()
            rows = [run.row() for run in self.runs.runs.values()]
        return _json({"folder": str(self.runs.folder), "runs": mask_secrets(rows), "more": more})

    def show(self, request: Request) -> Response:
        """Return the data of a report of the chosen runs, without completions."""
        with self._lock:
            chosen = self._chosen(request)
            return _json(page_data([run.data() for run in chosen], [run.findings for run in chosen]))

    def points(self, request: Request) -> Response:
        """Return the points of the chosen runs after the steps `after`, and the present findings."""
        with self._lock:
            chosen, after = self._chosen(request), request.query_params.getlist("after")
            if len(after) != len(chosen) or not all(map(_is_step, after)):
                raise HTTPException(400, "there must be one step `after` for each run")
            runs = [run.data() for run in chosen]
            grown = [_behind(run, int(step)) for run, step in zip(runs, after, strict=True)]
            findings, marks = findings_data(runs, [run.findings for run in chosen])
            return _json({"runs": grown, "findings": mask_secrets(findings), "marks": mask_secrets(marks)})

    def completions(self, request: Request) -> Response:
        """Return the completions of the chosen runs at the step `step`, or at the last one that all of them have."""
        with self._lock:
            chosen, wanted = self._chosen(request), request.query_params.get("step", "")
            indices = [run.groups() for run in chosen]
            steps = [{group.step for group in index} for index in indices]
            known = sorted(set().union(*steps))
            step = int(wanted) if _is_step(wanted) else max(set.intersection(*steps) or known, default=0)
            room, mask = MAX_BYTES // len(chosen), secret_mask()
            texts = [
                encode_groups(run.folder / SAMPLES, [group for group in index if group.step == step], room, mask)
                for run, index in zip(chosen, indices, strict=True)
            ]
        return _respond(f'{{"steps":{script_json(known)},"step":{step},"runs":[{",".join(texts)}]}}')

    def _chosen(self, request: Request) -> list[BoardRun]:
        """Return the runs that the request names, as far as they have been written."""
        names = request.query_params.getlist("run")
        if not 0 < len(names) <= MOST_RUNS:
            raise HTTPException(400, f"{len(names)} runs are chosen; 1 to {MOST_RUNS} can be shown together")
        if lacking := [name for name in names if name not in self.runs.runs]:
            raise HTTPException(404, f"there is no run {lacking[0]!r}")
        runs = [self.runs.runs[name] for name in names]
        for run in runs:
            if run.look():
                run.read()
        return runs


def make_app(runs: RunsFolder) -> Starlette:
    """Return the application that shows `runs`. Every route answers GET and HEAD alone."""
    board = Board(runs)
    answers = {"runs": board.list_runs, "data": board.show, "points": board.points, "completions": board.completions}
    routes = [Route(f"/{name}", answer) for name, answer in answers.items()]
    routes += [Route(path, partial(_answer_file, *file)) for path, file in _page_files().items()]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts], exception_handlers={CoveyError: _refuse, OSError: _refuse})


def listen(port: int | None = None) -> socket.socket:
    """Return a socket that listens on this machine alone.

    Args:
        port: the port; 0 is any free one, and None the first free one from `PORT`.

    Raises:
        CoveyError: the ports are in use, or are not for this user.
    """
    ports = range(PORT, PORT + PORTS) if port is None else range(port, port + 1)
    for number in ports:
        with suppress(OSError):  # in use, or for the administrator alone
            return socket.create_server((ADDRESS, number))
    raise CoveyError(f"port {ports[0]} is in use, or not for this user", fix="--port 0 takes a free one")


def make_server(runs: RunsFolder) -> uvicorn.Server:
    """Return a server of `runs`; its `run(sockets=[listen()])` answers requests until the process is interrupted."""
    return uvicorn.Server(server_config(make_app(runs), MOST_CONNECTIONS))


def _behind(run: RunData, step: int) -> dict[str, Any]:
    """Return the curves of `run` after `step`, in the form of a report's data."""

    def points(series: Series) -> list[list[float]]:
        start = bisect_right(series.steps, step)
        return [list(series.steps[start:]), list(series.values[start:])]

    return {
        "steps": [len(run.steps), run.steps[-1] if run.steps else 0],
        "seconds": run.seconds[-1] if run.seconds else 0.0,
        "clocks": {name: points(clock) for name, clock in clocks_of(run).items()},
        "series": {name: points(series) for name, series in run.series.items()},
    }


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < MAX_DIGITS


@cache
def _page_files() -> dict[str, tuple[str, str]]:
    """Return the files of the page by path, each with its type."""
    folder = files("covey_report.board") / "assets"
    own = {name: (folder / f"board.{name}").read_text("utf-8") for name in ("html", "js", "css")}
    return {
        "/": (own["html"].replace("@SECTIONS@", elements_of(BOARD)), "text/html"),
        "/board.js": (f"{asset(f'{UPLOT}.min.js')}\n{join_scripts(BOARD, own['js'])}", "text/javascript"),
        "/board.css": (asset(f"{UPLOT}.min.css") + asset("page.css") + own["css"], "text/css"),
    }


def _answer_file(text: str, media_type: str, request: Request) -> Response:
    return _respond(text, media_type)


def _json(content: Any) -> Response:
    return _respond(json.dumps(content, allow_nan=False))


def _respond(text: str, media_type: str = "application/json", status: int = 200) -> Response:
    return Response(text, status, HEADERS, media_type)


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer with an error of a run folder: it may be gone, or something else than a run may be there."""
    return _respond(str(error), "text/plain", 409)
