"""The renderer of chat templates of `covey_sandbox`, by its file alone: the package is hidden."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "plugins" / "covey_sandbox" / "template_child.py"
_spec = importlib.util.spec_from_file_location("template_child", FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
handle_request = _module.handle_request
