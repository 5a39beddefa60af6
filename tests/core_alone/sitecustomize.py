"""Hide the plugins from every Python that starts with this folder on its path: `make test-core`.

Their packages cannot be imported, and Covey's metadata offer none of their entry points. In their place chat templates,
which are those of the tests, are rendered in the process of the test (`template_renderer`).
"""

import importlib.metadata
import sys
from typing import Any

sys.path[:] = [folder for folder in sys.path if not folder.endswith("/plugins")]
_entry_points = importlib.metadata.entry_points
TEMPLATES = importlib.metadata.EntryPoint("templates", "template_renderer:handle_request", "covey.isolation")


def entry_points(**params: Any) -> Any:
    """Return the entry points of a group or name that other packages than Covey offer."""
    found = _entry_points(**params)
    if not params:
        return found
    others = [point for point in found if point.dist is None or point.dist.name != "covey"]
    return importlib.metadata.EntryPoints([*others, TEMPLATES]).select(**params)


importlib.metadata.entry_points = entry_points
