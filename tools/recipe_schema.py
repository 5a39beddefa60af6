"""Write docs/recipe.schema.json, by which editors complete and check recipes, from the config classes.

    python tools/recipe_schema.py           # write it
    python tools/recipe_schema.py --print   # print it

The schema says what a single setting may be. That settings do not contradict each other is checked by `covey` alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from covey.cli.help import explanations
from covey.config import recipe
from covey.config.base import Config, classes_in

FILE = Path(__file__).parents[1] / "docs" / "recipe.schema.json"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of recipes: `then` is that of supervised training, `else` of reinforcement learning."""
    supervised = {"properties": {"method": {"const": "sft"}}, "required": ["method"]}
    rl, sft = (section(kind, kind()) for kind in (recipe.Recipe, recipe.SFTRecipe))
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Covey recipe", "type": "object"} | {
        "if": supervised, "then": sft, "else": rl,
    }  # fmt: skip


def section(cls: type[Config], values: Config, path: str = "") -> dict[str, Any]:
    """Return the schema of the section `path`, whose settings have the defaults `values`."""
    properties, texts = {}, explanations(cls)
    for name, kind in cls.kinds.items():
        default = getattr(values, name, None)
        if inner := classes_in(kind):
            properties[name] = section(inner[-1], default, f"{path}{name}.") | {"type": ["object", "null"]}
        elif path + name not in recipe.HIDDEN:
            properties[name] = setting(kind) | {"description": texts[name], "default": default}
    summary = str(cls.__doc__).partition("\n")[0]
    return {"description": summary, "properties": properties, "additionalProperties": False}


def setting(kind: Any) -> dict[str, Any]:
    """Return the schema of a value of type `kind`."""
    return TypeAdapter(kind).json_schema()


def text() -> str:
    """Return the content of the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(text(), end="")
    else:
        FILE.write_text(text(), encoding="utf-8")
