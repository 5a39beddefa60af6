"""The command `covey serve`."""

from covey.cli.checks import check_one_process, check_source
from covey.cli.commands import Command
from covey.cli.parse import Line, build_settings
from covey.errors import CoveyError
from covey.registry import import_package
from covey_serve.options import ServeOptions

COMMAND = Command(
    "serve", "covey_serve.command:serve", "RUN_OR_MODEL", "sample and train it over HTTP: OpenAI's API, Tinker's API",
    """\
Answers the requests of OpenAI's API (chat and completions), so that clients and harnesses for it use the model or run,
and those of Tinker's training API, so that its client trains adapters on it. It prints
'listening on http://127.0.0.1:8000' when it is ready. Requests that come while others are sampled join them.
Only this machine can ask, unless --host and --key-file say otherwise. Ctrl-C ends it. It needs the extra 'serve'.""",
    """\
examples
  covey serve runs/quickstart-1
  covey serve smollm2-135m --port 9000 --slots 16 --state served
  covey serve smollm2-135m --host 0.0.0.0 --key-file ~/covey.key""",
    settings=(ServeOptions,),
    follows="chat",
)  # fmt: skip


def serve(line: Line) -> None:
    """Execute `covey serve RUN_OR_MODEL [settings]`.

    Raises:
        CoveyError: the extra `serve` is not installed, or as for `covey_serve.server.serve`.
    """
    (source,) = line.arguments
    options = build_settings(ServeOptions, line, source)
    check_one_process("covey serve")
    check_source(source)
    for package in ("starlette", "uvicorn", "google.protobuf"):
        import_package(package, CoveyError, f"a server needs the package {package}", "serve")
    from covey_serve import server  # late: it needs these packages

    server.serve(source, options)
