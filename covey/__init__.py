"""Covey: group-relative reinforcement learning for language models, in JAX.

The public names stand in `__init__.pyi`, which type checkers read too. Each is imported at its first use, so that
`import covey` costs nothing.
"""

from functools import cache
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_modules())
    if name not in _modules():
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    from covey import errors, registry  # late, here and below: most commands ask for no public name

    return getattr(
        registry.import_package(_modules()[name], errors.CoveyError, f"covey.{name} cannot be imported"), name
    )


def __dir__() -> list[str]:
    return [*globals(), *_modules()]


@cache
def _modules() -> dict[str, str]:
    """Return {public name: module that defines it}."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}
