"""Settings of a recipe as a run uses them, each with its origin: default, preset, line of the recipe, command line."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from covey.config.algorithms import algorithm_of
from covey.config.base import flatten
from covey.config.presets import PRESETS
from covey.config.recipe import HIDDEN, Recipe, SFTRecipe

DEFAULT = "default"
SECTION = "grpo."
"""Beginning of the names of settings that a preset may set."""


class ResolvedSetting(NamedTuple):
    """One setting: its dotted name, the value that the run uses, and where that value comes from."""

    name: str
    value: Any
    origin: str


def resolve_settings(recipe: Recipe | SFTRecipe, places: Mapping[str, str]) -> Iterator[ResolvedSetting]:
    """Yield every setting of `recipe` in the order of its classes.

    Args:
        places: where the settings that are not defaults are written, as `recipe.places_of` returns it.
    """
    for name, value in flatten(asdict(recipe)).items():
        if name in HIDDEN:
            continue
        if value is None and isinstance(recipe, Recipe) and (found := _from_preset(name, recipe)):
            yield found
        else:
            yield ResolvedSetting(name, value, _place(name, places) or DEFAULT)


def _from_preset(name: str, recipe: Recipe) -> ResolvedSetting | None:
    """Return the setting `name` as the run's algorithm has it; None if that leaves it unset too."""
    field, algorithm = name.removeprefix(SECTION), recipe.grpo.algorithm
    value = vars(algorithm_of(recipe.grpo)).get(field) if name.startswith(SECTION) else None
    origin = f"preset {algorithm}" if field in PRESETS[algorithm].settings else DEFAULT
    return None if value is None else ResolvedSetting(name, value, origin)


def _place(name: str, places: Mapping[str, str]) -> str:
    """Return where `name` is written, or the first entry of a mapping under it."""
    return places.get(name) or next((at for key, at in places.items() if key.startswith(f"{name}.")), "")
