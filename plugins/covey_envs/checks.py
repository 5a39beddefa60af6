"""Checks of the environment and the tools that a recipe names."""

from collections.abc import Iterator

from covey.cli.checks import Check
from covey.config.schema import EnvsConfig


def checks_of(envs: EnvsConfig) -> Iterator[Check]:
    """Yield the checks of environment and tools."""
    if envs.environment:
        yield Check("environment", "covey_envs.registry:resolve", (envs.environment, envs), envs.environment)
    for name in envs.tools:
        yield Check("tools", "covey_envs.checks:check_tool", (name, envs), name)


def check_tool(name: str, config: EnvsConfig) -> None:
    """Refuse a tool that does not exist, or has arguments without a description."""
    from covey_envs.registry import resolve_tool  # late, here and below: both need NumPy
    from covey_envs.tools import Tool

    Tool.of(resolve_tool(name, config.python_engine))
