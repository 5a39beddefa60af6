"""The Python tool: `tool` offers it, `sandbox` executes programs in one of two child processes."""

from covey_sandbox.python_tool.tool import ENGINES, python, python_with_limits

__all__ = ["ENGINES", "python", "python_with_limits"]
