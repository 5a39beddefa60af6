"""What `covey doctor` says of the Python tool."""

from collections.abc import Iterator

from covey.cli.doctor import Finding
from covey.errors import RecipeError
from covey_sandbox.python_tool import tool


def programs() -> Iterator[Finding]:
    """Yield the engine of the Python tool, with the protections of this system from the programs of a model."""
    try:
        engine = tool.choose_engine()
    except RecipeError as error:
        yield Finding("programs", error.what, error.fix)
        return
    held = ", ".join(tool.protections()) or "none"
    lacking = f"; without {', '.join(missing)}" if (missing := tool.missing_protections()) else ""
    yield Finding("programs", f"the Python tool's engine {engine}; protections of a process: {held}{lacking}")
