"""Read the words of a command line by the table of commands: arguments, options, and settings of a recipe."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from covey.cli.commands import COMMANDS, Command, OptionsT
from covey.config import recipe, strict_yaml
from covey.config.base import leaves
from covey.config.overrides import apply, split
from covey.errors import CoveyError, nearest


class Line(NamedTuple):
    """The words after the name of a command.

    Attributes:
        command: the command.
        arguments: positional words.
        options: values of the command's own options by flag; a switch that is present has the value "".
        settings: the other options, settings of a recipe, as `--name=value` each.
    """

    command: Command
    arguments: list[str]
    options: Mapping[str, str]
    settings: list[str]

    def whole_number(self, flag: str) -> int | None:
        """Return the value of the option `flag` as a whole number; None if it is not given.

        Raises:
            CoveyError: the value is no whole number from 1 up.
        """
        value = self.options.get(flag)
        if value is not None and not is_count(value):
            raise CoveyError(f"{flag} is {value!r}", want="a whole number from 1 up")
        return None if value is None else int(value)


def read_line(command: Command, words: Sequence[str]) -> Line:
    """Sort `words` into arguments, options and settings of `command`.

    Raises:
        CoveyError: there are too few or too many arguments, or options that the command does not have.
    """
    if command.prefix_of:
        return Line(command, list(words), {}, [])
    _check_owners(command, before_dashes(words))
    switches = {option.flag for option in command.options if not option.value}
    valued = {option.flag for option in command.options} - switches
    arguments, pairs = split([word for word in words if word not in switches], command.most)
    pairs = [(_with_dashes(command, flag), value) for flag, value in pairs]
    if odd := next((flag for flag, _ in pairs if flag in switches), ""):
        raise CoveyError(f"{odd} takes no value", want=odd)
    settings = [f"{flag}={value}" for flag, value in pairs if flag not in valued]
    if settings and not command.classes:
        flag = settings[0].partition("=")[0]
        raise CoveyError(
            f"{command.name} has no setting {flag}",
            want=command.usage[0],
            fix=nearest(flag, command.flags) if command.flags else "",
        )
    if len(arguments) < command.least:
        raise missing_argument(command)
    options = dict.fromkeys(switches.intersection(words), "")
    return Line(command, arguments, options | {flag: value for flag, value in pairs if flag in valued}, settings)


def build_settings(cls: type[OptionsT], line: Line, source: str = "") -> OptionsT:
    """Build the settings `cls` of a command from its line.

    Args:
        cls: class of the settings.
        line: the command line.
        source: a run, which gives the default rollout settings, or a model.
    """
    document = strict_yaml.Document()
    if source and recipe.is_run(source):
        document = strict_yaml.read_file(recipe.find(source))
        if isinstance(document.tree, dict):  # else `build` reports it
            document.tree = {name: value for name, value in document.tree.items() if name == "rollout"}
    return strict_yaml.build(cls, apply(cls, document, line.settings, recipe.HIDDEN))


def before_dashes(words: Sequence[str]) -> Sequence[str]:
    """Return the words before a bare `--`; after it every word is positional."""
    return words[: words.index("--")] if "--" in words else words


def missing_argument(command: Command) -> CoveyError:
    """Return the error for a command line with too few arguments."""
    return CoveyError(
        command.missing, want=command.synopsis, fix=list_recipes(command) if "NAME_OR_YAML" in command.arguments else ""
    )


def list_recipes(command: Command) -> str:
    """Return the names of the built-in recipes that the command takes, as the fix of an error."""
    return "built-in recipes: " + ", ".join(command.recipes)


def _check_owners(command: Command, words: Sequence[str]) -> None:
    """Refuse an option of another command, which `command` does not have.

    Raises:
        CoveyError: it has none; the error names the commands that do.
    """
    for flag in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        known = flag in command.flags or _is_setting(command, flag)
        if owners := [] if known else [name for name, other in COMMANDS.items() if flag in other.flags]:
            raise CoveyError(
                f"{flag} is no option of covey {command.name}",
                want=f"covey {command.name} --help",
                fix=f"leave it out; it belongs to covey {' or '.join(owners)}",
            )


def _with_dashes(command: Command, flag: str) -> str:
    """Return `--out` for the `out` of `out=FOLDER`, if that is an option of the command and no setting."""
    option = f"--{flag}"
    return option if option in command.flags and not _is_setting(command, flag) else flag


def is_count(text: str) -> bool:
    """Return whether `text` is a whole number from 1 up."""
    return text.isascii() and text.isdigit() and int(text) > 0


def _is_setting(command: Command, flag: str) -> bool:
    """Return whether `flag` may stand for a setting of the command."""
    ending = "." + flag.removeprefix("--").replace("-", "_")
    return any(f".{path}".endswith(ending) for cls in command.classes for path in leaves(cls))
