"""Write what transformers makes of tools to `golden/tool_schemas.json`: the schemas of the functions of
`tool_functions.py`, and digests of conversations with all of them under the templates in
`plugins/covey_envs/tests/templates`.

Run by `make parity`, in an environment with the extra `[parity]`, from the repository's root.
"""

import hashlib
import json
import runpy
from pathlib import Path

from transformers import __version__
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
TEMPLATES = (
    "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "GLM-4.6", "HuggingFaceTB-SmolLM3-3B",
    "mistralai-Mistral-Nemo-Instruct-2407", "mistralai-Ministral-3-14B-Reasoning-2512", "Qwen3-Coder",
)  # fmt: skip

if __name__ == "__main__":
    given = runpy.run_path(str(HERE / "tool_functions.py"))
    schemas = [get_json_schema(function) for function in given["FUNCTIONS"]]
    digests = {}
    for name in TEMPLATES:
        template = (HERE.parents[1] / "plugins" / "covey_envs" / "tests" / "templates" / f"{name}.jinja").read_text()
        variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
        (text,), _ = render_jinja_template([given["CHAT"]], tools=schemas, chat_template=template, **variables)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    found = {"transformers": __version__, "schemas": schemas, "digests": digests}
    (HERE / "golden" / "tool_schemas.json").write_text(json.dumps(found, indent=1) + "\n")
