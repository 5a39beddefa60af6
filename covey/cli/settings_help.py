"""Print the settings of a command in layers: the common ones, one section or setting, or all.

The settings and their explanations come from the config classes. This module does not import JAX.
"""

import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from covey.config import recipe, strict_yaml
from covey.config.base import Config, classes_in, defaults, describe, explanations, without_check
from covey.errors import CoveyError, nearest

ALL = "all"
"""Topic that shows every setting."""
COLUMN = 36
"""Column at which explanations begin."""
PLAIN = ("a whole number", "a finite number", "true or false", "text")
"""Descriptions of values that the shown value makes clear."""
WIDTH = 100
"""Width of the lines where no terminal is."""

COMMON: dict[type[Config], tuple[str, ...]] = {
    recipe.Recipe: (
        "model.source", "model.lora.rank", "data.task", "data.path", "data.test_path", "rewards",
        "rollout.max_prompt_length", "rollout.max_new_tokens", "rollout.temperature", "rollout.slots",
        "grpo.algorithm", "grpo.num_generations", "grpo.num_iterations", "grpo.beta",
        "training.max_steps", "training.num_epochs", "training.prompts_per_step",
        "training.actor_optimizer.learning_rate", "training.train_micro_batch_size",
        "training.checkpoint_every_n_steps", "training.eval_every_n_steps",
        "evaluation.prompts", "evaluation.accuracy", "seed", "out",
    ),
    recipe.SFTRecipe: (
        "model.source", "model.dtype", "model.lora.rank", "model.lora.alpha", "data.task", "data.path",
        "data.test_path", "data.prompt_column", "data.completion_column", "data.system",
        "training.max_steps", "training.num_epochs", "training.batch_size", "training.optimizer.learning_rate",
        "training.optimizer.schedule", "training.optimizer.warmup_ratio", "training.completion_only",
        "training.max_length", "training.too_long", "training.checkpoint_every_n_steps",
        "training.eval_every_n_steps", "evaluation.prompts", "evaluation.answers", "seed", "out",
    ),
}  # fmt: skip
"""Settings that the first page of a training command shows: those that most runs change."""


class Setting(NamedTuple):
    """One setting: its dotted name, its value, and an explanation with the values that it takes."""

    path: str
    value: Any
    text: str


class Section(NamedTuple):
    """One section of settings: its dotted name ("" for those outside all sections), a summary, and its settings."""

    path: str
    summary: str
    settings: Sequence[Setting]


def sections_of(settings: Config, path: str = "", named: type[Config] | None = None) -> Iterator[Section]:
    """Yield the section with the settings directly in `settings`, then those of the sections in it.

    Args:
        path: dotted name of the section.
        named: class whose docstring describes it, if not that of `settings`.
    """
    cls, prefix = type(settings), f"{path}." if path else ""
    docs, inner = explanations(cls), [name for name, kind in cls.kinds.items() if classes_in(kind)]
    names = [name for name in cls.kinds if name not in inner and prefix + name not in recipe.HIDDEN]
    found = [Setting(prefix + n, getattr(settings, n), _explain(docs.get(n, ""), cls.kinds[n])) for n in names]
    yield Section(path, ((named or cls).__doc__ or "").strip().partition("\n")[0].rstrip("."), found)
    for name in inner:
        kind = cls.kinds[name]
        yield from sections_of(_whole(kind, getattr(settings, name)), prefix + name, classes_in(kind)[0])


def show_settings(settings: Config, heading: str, topic: str = "", more: str = "") -> None:
    """Print settings with their values.

    Args:
        settings: a tree of settings with the values to show.
        heading: line above them.
        topic: `all`, a section, or a setting; "" for the common settings, where `COMMON` lists some.
        more: beginning of the command that shows a topic.

    Raises:
        CoveyError: there is no such topic.
    """
    sections = list(sections_of(settings))
    common = COMMON.get(type(settings), ())
    by_path = {one.path: one for section in sections for one in section.settings}
    rows = [by_path[path] for path in common]
    if topic == ALL or not (topic or common):
        rows = []
    elif topic:
        rows, sections = _find_topic(topic, sections)
    print(heading)
    if rows:
        print()
        _print_rows(rows)
    if topic or not common:
        _print_sections(sections)
    else:
        _print_contents(sections, more)


def _find_topic(topic: str, sections: Sequence[Section]) -> tuple[list[Setting], list[Section]]:
    """Return the settings and the sections that `topic` names."""
    name = topic.removeprefix("--").replace("-", "_")
    inside = [section for section in sections if f".{name}." in f".{section.path}."]
    rows = [one for section in sections for one in section.settings if f".{one.path}".endswith(f".{name}")]
    if not (inside or rows):
        known = [ALL, *(one.path for one in sections if one.path), *(o.path for s in sections for o in s.settings)]
        ends = {path.rpartition(".")[2] for path in known}
        raise CoveyError(f"there is no section or setting {topic!r}", fix=nearest(name, [*known, *ends]))
    return rows, inside


def _print_sections(sections: Sequence[Section]) -> None:
    for section in sections:
        print(f"\n{section.path or 'general'}  ({section.summary})")
        _print_rows(section.settings)


def _print_contents(sections: Sequence[Section], more: str) -> None:
    total = sum(len(section.settings) for section in sections)
    print(f"\nThese are the common ones of {total} settings. The others, by section:\n")
    for section in sections:
        if section.path and "." not in section.path:
            print(f"  {more} --help {section.path:<14} {section.summary}")
    print(f"  {more} --help {ALL:<14} Every setting")


def _print_rows(rows: Sequence[Setting]) -> None:
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, 2 * WIDTH)
    for row in rows:
        flag = f"  --{row.path.replace('_', '-')} {_shown(row.value)}"
        lines = textwrap.wrap(row.text, max(width - COLUMN, 20)) or [""]
        if len(flag) >= COLUMN and lines[0]:
            lines.insert(0, "")
        for left, line in zip_longest([flag], lines, fillvalue=""):
            print(f"{left:{COLUMN}}{line}".rstrip())


def _explain(text: str, kind: Any) -> str:
    values = describe(kind)
    return text + ("" if values.removesuffix(" (or null)") in PLAIN else f" ({values})")


def _whole(kind: Any, settings: Config) -> Config:
    """Return the settings of a section with those of all classes that a field of type `kind` may hold."""
    cls = classes_in(kind)[-1]
    return settings if isinstance(settings, cls) else without_check(cls, defaults(cls) | vars(settings))


def _shown(value: Any) -> str:
    """Return the value as it would be written in a recipe, truncated when long."""
    if value is None or isinstance(value, bool | int):  # the writer of YAML takes a tenth of a second for all settings
        return json.dumps(value)
    if isinstance(value, str) and re.fullmatch("[a-z][a-z0-9_]*-[a-z0-9-]+|[a-z]+_[a-z_]+", value):
        return value
    text = strict_yaml.dump({"x": list(value) if isinstance(value, tuple) else value})[3:].strip()
    return text if len(text) <= 2 * COLUMN else text[: 2 * COLUMN] + " …"
