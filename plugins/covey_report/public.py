"""The public part of runs: without prompts, completions, paths, names of folders and texts of their users.

Numbers stay, and texts of Covey: choices of settings, and values of the built-in recipes. All other texts
are left out, so that nothing depends on recognising a secret.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from covey.config import recipe
from covey.config.base import leaves
from covey.config.kinds import choices
from covey_report.run_data import RunData, built_in_settings, default_settings

LEFT_OUT = "(left out)"
"""Text in the place of one that a public page does not have."""
ORIGIN = re.compile(r"(pypi:|scratch:)[\w.=@-]+|checkpoint \d+ of a run, sha256 [0-9a-f]+")
"""Pattern of the origins of a model that name neither a path nor an owner."""
PLAIN = re.compile(r"[\w .,:+()×-]{0,80}")
"""Pattern of a version, a device or a digest."""
FACTS = ("data", "data_digest", "environment", "programs", "best")
"""Entries of the summary with numbers, versions and digests."""
FIGURES = ("before", "after", "seconds")
"""Entries of the summary of which only numbers are shown."""


def public_runs(runs: Sequence[RunData]) -> list[RunData]:
    """Return the public part of `runs`. A single one is named after its built-in recipe, and several are numbered."""
    shown = [_public_run(run) for run in runs]
    if len(shown) > 1:
        return [replace(run, name=f"run {number}") for number, run in enumerate(shown, 1)]
    return [replace(run, name=run.settings.get("name") or "run") for run in shown]


def _public_run(run: RunData) -> RunData:
    settings = {name: _public_setting(name, value) for name, value in run.settings.items()}
    settings["name"] = settings.get("name", "").replace(LEFT_OUT, "")
    facts = {name: _plain(run.summary[name]) for name in FACTS if name in run.summary}
    facts |= {name: run.summary[name] for name in FIGURES if name in run.summary}
    if ORIGIN.fullmatch(model := str(run.summary.get("model"))):
        facts["model"] = model
    return replace(run, settings=settings, summary=facts, is_public=True)


def _public_setting(name: str, value: Any) -> Any:
    """Return the value of a setting; `out` is a path in the built-in recipes too."""
    return value if name != "out" and all(text in _known_texts(name) for text in _texts(value)) else LEFT_OUT


@cache
def _known_texts(name: str) -> frozenset[str]:
    """Return the texts that Covey brings for a setting."""
    known = [default_settings("sft"), default_settings("rl", "ppo"), *map(built_in_settings, recipe.names())]
    texts = [text for settings in known for text in _texts(settings.get(name))]
    kinds = (leaves(cls).get(name) for cls in (recipe.Recipe, recipe.SFTRecipe))
    return frozenset([*texts, *(str(choice) for kind in kinds for choice in choices(kind))])


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value; numbers are none."""
    parts = value if isinstance(value, list | tuple) else [value]
    yield from (str(part) for part in parts if part is not None and not isinstance(part, int | float))


def _plain(value: Any) -> Any:
    """Return `value` with every text left out that could be a path or a sentence."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items() if PLAIN.fullmatch(str(key))}
    return value if value is None or PLAIN.fullmatch(str(value)) else LEFT_OUT
