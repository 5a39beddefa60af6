"""Write the schemas that transformers gives the functions of `tool_functions.py` to `golden/tool_schemas.json`.

Run by `make parity`, in an environment with the extra `[parity]`, from the repository's root.
"""

import json
import runpy
from pathlib import Path

from transformers import __version__
from transformers.utils import get_json_schema

if __name__ == "__main__":
    here = Path(__file__).parent
    functions = runpy.run_path(str(here / "tool_functions.py"))["FUNCTIONS"]
    found = {"transformers": __version__, "schemas": [get_json_schema(function) for function in functions]}
    path = here / "golden" / "tool_schemas.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
