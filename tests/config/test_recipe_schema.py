"""docs/recipe.schema.json is written from the settings, and the built-in recipes name it and are valid under it."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from covey.config import recipe, strict_yaml
from covey.config.base import leaves

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "recipe.schema.json").read_text())
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip


def mistakes(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Places at which `value` is not valid, by the keywords that our schema uses."""
    if "if" in schema:
        wanted = schema["if"]["properties"]["method"]["const"]
        return mistakes(value, schema["then" if value.get("method") == wanted else "else"])
    if "anyOf" in schema:
        return min((mistakes(value, one, path) for one in schema["anyOf"]), key=len)
    if not is_of_type(value, schema.get("type", "object")) or not is_allowed(value, schema):
        return [path]
    if isinstance(value, list):
        return [place for one in value for place in mistakes(one, schema["items"], path)]
    if not isinstance(value, dict):
        return []
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    inside = {name: known.get(name, others) for name in value}
    return [
        place
        for name, kind in inside.items()
        for place in (mistakes(value[name], kind, f"{path}.{name}") if kind else [f"{path}.{name}"])
    ]


def is_of_type(value: Any, kinds: str | list[str]) -> bool:
    expected = [one for kind in ([kinds] if isinstance(kinds, str) else kinds) for one in TYPES[kind]]
    return isinstance(value, tuple(expected)) and (bool in expected or not isinstance(value, bool))


def is_allowed(value: Any, schema: dict[str, Any]) -> bool:
    chosen = value in schema.get("enum", [value]) and value == schema.get("const", value)
    if not isinstance(value, (int, float)):
        return chosen
    closed = schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return (
        chosen
        and closed
        and schema.get("exclusiveMinimum", value - 1) < value < schema.get("exclusiveMaximum", value + 1)
    )


def read(text: str) -> Any:
    return strict_yaml.read(text, "r.yaml").tree


def test_the_schema_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "recipe_schema.py"))
    assert tool["FILE"].read_text() == tool["text"](), "make schema writes it again"


@pytest.mark.parametrize("name", recipe.names())
def test_a_built_in_recipe_names_the_schema_and_is_valid_under_it(name: str) -> None:
    text = recipe.find(name).read_text()
    named = text.partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
    assert (recipe.find(name).parent / named).resolve() == ROOT / "docs" / "recipe.schema.json"
    assert mistakes(read(text), SCHEMA) == []


@pytest.mark.parametrize("made", [recipe.Recipe(), recipe.SFTRecipe()], ids=["rl", "sft"])
def test_defaults_are_valid_and_each_setting_is_described(made: Any) -> None:
    assert mistakes(read(recipe.to_yaml(made)), SCHEMA) == []
    top = SCHEMA["then" if made.method == "sft" else "else"]
    for path in leaves(type(made)).keys() - recipe.HIDDEN.keys():
        one = top
        for part in path.split("."):
            one = one["properties"][part]
        assert one["description"]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("grpo: {beta: -1}", ".grpo.beta"),
        ("grpo: {num_generations: 1.5}", ".grpo.num_generations"),
        ("grpo: {algorithm: drgrpo}", ".grpo.algorithm"),
        ("grpo: {epsilonn: 0.1}", ".grpo.epsilonn"),
        ("rewards: [1]", ".rewards"),
        ("reward_safety: {on_error_of: {judge: no}}", ".reward_safety.on_error_of.judge"),
        ("rollout: {seed: 1}", ".rollout.seed"),
        ("method: sft\ntraining: {prompts_per_step: 2}", ".training.prompts_per_step"),
        ("training: {batch_size: 2}", ".training.batch_size"),
    ],
)
def test_a_mistake_in_a_setting_is_marked(text: str, at: str) -> None:
    assert mistakes(read(text), SCHEMA) == [at]
