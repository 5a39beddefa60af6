"""Hide the plugins from every Python that starts with this folder on its path: `make test-core`.

Their packages cannot be imported, and Covey's metadata offer none of their entry points.
"""

import importlib.metadata
import sys
from typing import Any

sys.path[:] = [folder for folder in sys.path if not folder.endswith("/plugins")]
_entry_points = importlib.metadata.entry_points


def entry_points(**params: Any) -> Any:
    """Return the entry points of a group or name that other packages than Covey offer."""
    found = _entry_points(**params)
    if not params:
        return found
    return importlib.metadata.EntryPoints(point for point in found if point.dist is None or point.dist.name != "covey")


importlib.metadata.entry_points = entry_points
