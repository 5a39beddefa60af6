"""Checks of the environment and the tools that a recipe names, and of this machine for programs of a model."""

from collections.abc import Iterator

from covey.cli.checks import Check
from covey.cli.doctor import Finding
from covey.config.schema import EnvsConfig
from covey.errors import RecipeError


def checks_of(envs: EnvsConfig) -> Iterator[Check]:
    """Yield the checks of environment and tools."""
    if envs.environment:
        yield Check("environment", "covey_envs.registry:resolve", (envs.environment, envs), envs.environment)
    for name in envs.tools:
        yield Check("tools", "covey_envs.checks:check_tool", (name, envs), name)


def check_tool(name: str, config: EnvsConfig) -> None:
    """Refuse a tool that does not exist, or whose arguments cannot be described."""
    from covey_envs.registry import resolve_tool  # late, here and below: both need NumPy
    from covey_envs.tools import Tool

    Tool.of(resolve_tool(name, config.python_engine))


def programs() -> Iterator[Finding]:
    """Yield the engine of the Python tool, with the protections of this system from the programs of a model."""
    from covey_envs import python_tool

    try:
        engine = python_tool.choose_engine()
    except RecipeError as error:
        yield Finding("programs", error.what, error.fix)
        return
    held = ", ".join(python_tool.protections()) or "none"
    lacking = f"; without {', '.join(missing)}" if (missing := python_tool.missing_protections()) else ""
    yield Finding("programs", f"the Python tool's engine {engine}; protections of a process: {held}{lacking}")
