"""Execute `covey recipes`: list the built-in recipes, print one, or copy it to a new file."""

import json
import re
from pathlib import Path
from shutil import get_terminal_size

from covey.cli.parse import Line
from covey.config import recipe, strict_yaml
from covey.config.overrides import split
from covey.display import echo, make_console
from covey.errors import CoveyError

ABOUT = ("description", "needs", "expect")
"""Settings of a recipe that describe it."""
WIDTH = 120
"""Columns of the table in files and pipes, where COLUMNS is not set."""


def recipes(line: Line) -> None:
    """Execute `covey recipes [NAME]`, `covey recipes copy NAME FILE` or `covey recipes --json`."""
    if line.arguments[:1] == ["copy"]:
        if len(line.arguments) < 3:
            raise CoveyError("an argument is missing", want="covey recipes copy NAME FILE")
        copy_recipe(line.arguments[1], Path(line.arguments[2]).expanduser())
        return
    if settings := split(line.arguments, 1)[1]:
        raise CoveyError(f"recipes has no setting {settings[0][0]}", want=line.command.usage[0])
    if "--json" in line.options:
        print(json.dumps(list_recipes()))
    elif line.arguments:
        echo(text_to_copy(line.arguments[0]).removesuffix("\n"), keep="\n\t")
    else:
        show_recipes()


def list_recipes() -> list[dict[str, str]]:
    """Return name, command, description, needs and expected result of each built-in recipe."""
    return [
        {"name": name, "command": recipe.COMMANDS[recipe.kind_of(name).method], **_about(name)}
        for name in recipe.names()
    ]


def show_recipes() -> None:
    """Print the table of built-in recipes."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold")
    for heading in ("recipe", "what", "needs", "expect"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "recipe")
    for name in recipe.names():
        table.add_row(name, *map(escape, _about(name).values()))
    console = make_console(wrap=True, width=get_terminal_size((WIDTH, 24)).columns)
    console.print(table)
    by_sft = ", ".join(recipe.names(recipe.SFTRecipe))
    console.print("covey recipes NAME prints one · covey train NAME runs it", highlight=False)
    console.print(f"covey sft NAME runs: {by_sft}", highlight=False)


def _about(name: str) -> dict[str, str]:
    """Return the description of a built-in recipe, without checking its settings."""
    written = strict_yaml.read_file(recipe.find(name)).tree
    return {key: written[key] for key in ABOUT}


def text_to_copy(source: str | Path) -> str:
    """Return the text of a recipe for another folder: its first line names the JSON Schema by an absolute path."""
    path = recipe.find(source)
    text = strict_yaml.text_of(path)
    relative = re.match(r"# yaml-language-server: \$schema=(\.\S+)", text)
    return text.replace(relative[1], str((path.parent / relative[1]).resolve()), 1) if relative else text


def copy_recipe(name: str, file: Path) -> None:
    """Copy the built-in recipe `name` to a new file, and print how to train with it.

    Raises:
        CoveyError: the file exists, or its folder does not.
    """
    text = text_to_copy(name)
    try:
        with file.open("x", encoding="utf-8") as out:  # a file that exists is never replaced
            out.write(text)
    except FileExistsError:
        raise CoveyError("something is already here", want="a new file", where=str(file)) from None
    except FileNotFoundError:
        raise CoveyError("there is no such folder", fix=f"mkdir -p {file.parent}", where=str(file.parent)) from None
    command = recipe.COMMANDS[recipe.kind_of(file).method]
    echo(f"{file}: change it, then {command} {file}")
