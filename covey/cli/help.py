"""Print the help: the overview of all commands, the page of a command, and its settings in layers.

Everything comes from the table of commands and from the config classes. This module does not import JAX.
"""

import ast
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from covey.cli.commands import COMMANDS, Command
from covey.config import recipe, strict_yaml
from covey.config.base import Config, classes_in
from covey.config.kinds import describe
from covey.errors import CoveyError, nearest

ASKING = ("-h", "--help")
"""Words that ask for help."""
ALL = "all"
"""Topic that shows every setting."""
COLUMN = 36
"""Column at which explanations begin."""
PLAIN = ("a whole number", "a finite number", "true or false", "text")
"""Descriptions of values that the shown value makes clear."""
WIDTH = 100
"""Width of the lines where no terminal is."""
PAGE_WIDTH = 120
"""Width of the lines of a page."""
OVERVIEW = """\
covey: improve a language model by comparing its own answers (GRPO, in JAX)

{}

covey train --resume RUN goes on with a run that was stopped; covey sft --resume RUN likewise.
covey COMMAND --help says more, covey --help grpo lists the settings of a section. Start with: covey train quickstart
"""

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
"""Settings on the first page of a training command: most runs change them."""


class Setting(NamedTuple):
    """One setting: its dotted name, its value, and an explanation with the values that it takes."""

    path: str
    value: Any
    text: str


class Section(NamedTuple):
    """One section of settings: its dotted name ("" outside all sections), a summary, and its settings."""

    path: str
    summary: str
    settings: Sequence[Setting]


def show_overview() -> None:
    """Print each command with its purpose on one line."""
    rows = [f"  {command.synopsis:<30}  {command.summary}" for command in COMMANDS.values()]
    print(OVERVIEW.format("\n".join(rows)), end="")


def show(command: Command, words: Sequence[str] = ()) -> None:
    """Print the help of `command`.

    Args:
        command: the command.
        words: the other words of the command line: a built-in recipe, whose values are shown; after --help a topic,
            which is a section, a setting, or `all`.

    Raises:
        CoveyError: there is no such topic.
    """
    trains = any(issubclass(cls, recipe.AnyRecipe) for cls in command.settings)
    recipes = command.recipes if trains else ()
    named = next((word for word in words if word in recipes), "")
    topic = _topic(words, recipes) if trains else ""
    if not topic:
        print(page(command))
    for cls in command.settings:
        settings = recipe.load_any(named) if named else cls()
        heading = f"The settings, with {f'the values of {named}' if named else 'their defaults'}:"
        show_settings(settings, heading if topic else f"\n{heading}", topic, f"covey {command.name}")


def page(command: Command) -> str:
    """Return the page of `command` without its settings."""
    options = "\n".join(
        textwrap.fill(
            option.help,
            PAGE_WIDTH,
            initial_indent=f"  {option.label:<25}",
            subsequent_indent=f"{'':27}",
        )
        for option in command.options
        if option.help
    )
    about = command.about
    if "FORMS" in about:
        from covey.data import rows  # late: no other page needs it

        about = about.replace("FORMS", textwrap.indent(rows.format_forms(), "  "))
    usage = "\n".join(textwrap.fill(line, PAGE_WIDTH, break_on_hyphens=False) for line in command.usage)
    return "\n\n".join(filter(None, (usage, about, options, command.examples)))


def _topic(words: Sequence[str], recipes: Sequence[str]) -> str:
    """Return the word after --help, if that is no recipe."""
    at = next((number for number, word in enumerate(words) if word in ASKING), len(words))
    return next((word for word in words[at + 1 :] if word not in (*ASKING, *recipes)), "")


def sections_of(settings: Config, path: str = "", named: type[Config] | None = None) -> Iterator[Section]:
    """Yield the section with the settings directly in `settings`, then those of the sections in it.

    Args:
        settings: a tree of settings.
        path: dotted name of the section.
        named: class whose docstring describes it, if not that of `settings`.
    """
    cls, prefix = type(settings), f"{path}." if path else ""
    docs, inner = explanations(cls), [name for name, kind in cls.kinds.items() if classes_in(kind)]
    names = [name for name in cls.kinds if name not in inner and prefix + name not in recipe.HIDDEN]
    rows = [Setting(prefix + n, getattr(settings, n), _explain(docs.get(n, ""), cls.kinds[n])) for n in names]
    yield Section(path, ((named or cls).__doc__ or "").strip().partition("\n")[0].rstrip("."), rows)
    for name in inner:
        kind = cls.kinds[name]
        yield from sections_of(_complete(kind, getattr(settings, name)), prefix + name, classes_in(kind)[0])


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
    common = () if topic else COMMON.get(type(settings), ())
    by_path = {setting.path: setting for section in sections for setting in section.settings}
    rows, shown = [by_path[path] for path in common], sections
    if topic and topic != ALL:
        rows, shown = _find_topic(topic, sections)
    print(heading)
    if rows:
        print()
        _print_rows(rows)
    if common:
        _print_contents(sections, more)
        return
    for section in shown:
        print(f"\n{section.path or 'general'}  ({section.summary})")
        _print_rows(section.settings)


def _find_topic(topic: str, sections: Sequence[Section]) -> tuple[list[Setting], list[Section]]:
    """Return the settings and the sections that `topic` names."""
    name = topic.removeprefix("--").replace("-", "_")
    inside = [section for section in sections if f".{name}." in f".{section.path}."]
    settings = [setting for section in sections for setting in section.settings]
    rows = [setting for setting in settings if f".{setting.path}".endswith(f".{name}")]
    if not (inside or rows):
        known = [ALL, *(section.path for section in sections if section.path), *(setting.path for setting in settings)]
        raise CoveyError(
            f"there is no section or setting {topic!r}",
            fix=nearest(name, [*known, *{path.rpartition(".")[2] for path in known}]),
        )
    return rows, inside


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
        flag = f"  --{row.path.replace('_', '-')} {_format_value(row.value)}"
        lines = textwrap.wrap(row.text, max(width - COLUMN, 20)) or [""]
        if len(flag) >= COLUMN and lines[0]:
            lines.insert(0, "")
        for left, line in zip_longest([flag], lines, fillvalue=""):
            print(f"{left:{COLUMN}}{line}".rstrip())


def explanations(cls: type[Config]) -> dict[str, str]:
    """Return the string under each field of a class of settings, inherited ones included."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Config):
            texts |= _in_body(_class_definitions(base.__module__)[base.__qualname__])
    return texts


@cache
def _class_definitions(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax tree of each class in the source of `module`."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _in_body(cls: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(str(after.value.value).split())
        for field, after in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _explain(text: str, kind: Any) -> str:
    values = describe(kind)
    return text + ("" if values.removesuffix(" (or null)") in PLAIN else f" ({values})")


def _complete(kind: Any, settings: Config) -> Config:
    """Return the settings of a section as the widest class that a field of type `kind` may hold."""
    cls = classes_in(kind)[-1]
    return settings if isinstance(settings, cls) else cls.from_checked(vars(settings))


def _format_value(value: Any) -> str:
    """Return the value as a recipe writes it, cut where it is long."""
    if value is None or isinstance(value, bool | int):  # the writer of YAML takes a tenth of a second for all settings
        return json.dumps(value)
    if isinstance(value, str) and re.fullmatch("[a-z][a-z0-9_]*-[a-z0-9-]+|[a-z]+_[a-z_]+", value):
        return value
    text = strict_yaml.dump({"x": list(value) if isinstance(value, tuple) else value})[3:].strip()
    return text if len(text) <= 2 * COLUMN else text[: 2 * COLUMN] + " …"
