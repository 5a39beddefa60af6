"""The table of commands. Parser, help, completion and suggestions for mistakes are made from it.

Installed packages add rows by entry points of the group `covey.commands`, each a `Command`. A row names its function as
`module:function`; it is imported when the command runs, so that help and mistakes are answered at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from covey.config import recipe
from covey.config.base import Config, NonNegativeInt, leaves
from covey.config.schema import RolloutConfig
from covey.errors import CoveyError
from covey.registry import all_offered

ANY = 10_000
"""Largest number of arguments of a command that takes any number."""


class ChatOptions(Config):
    """Settings of `covey chat`."""

    seed: NonNegativeInt = 0
    """Seed of the samples drawn."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", self.rollout.with_seed(self.seed))


OptionsT = TypeVar("OptionsT", bound=Config)


class Option(NamedTuple):
    """An option that belongs to a command and not to a recipe.

    Attributes:
        flag: its name, with the dashes.
        value: placeholder of its value; "" for a switch, which takes none.
        help: explanation; "" if the text of the command explains it.
    """

    flag: str
    value: str = ""
    help: str = ""

    @property
    def label(self) -> str:
        """The flag with the placeholder of its value."""
        return f"{self.flag} {self.value}".rstrip()


class Command(NamedTuple):
    """One command.

    Attributes:
        name: the word behind `covey`.
        function: `module:function`, which is called with the `Line` and returns the exit code or None.
        arguments: placeholders of the positional words.
        summary: purpose in a few words, for the overview.
        about: paragraphs of the help above the options.
        examples: paragraphs of the help below the options.
        least: smallest number of positional words.
        most: largest number of positional words.
        missing: what is wrong with fewer words.
        options: the command's own options.
        settings: classes of the settings that it takes and that its help lists.
        settings_of: commands whose settings it takes too.
        usages: lines of usage, where they are not simply the arguments, options and settings.
        prefix_of: commands of which one follows with its options.
        values: values of placeholders in the usage that stand for no files, for completion.
        follows: command after which the overview lists one of an installed package; the last one if it is "".
    """

    name: str
    function: str
    arguments: str
    summary: str
    about: str
    examples: str = ""
    least: int = 1
    most: int = 1
    missing: str = "an argument is missing"
    options: tuple[Option, ...] = ()
    settings: tuple[type[Config], ...] = ()
    settings_of: tuple[str, ...] = ()
    usages: tuple[str, ...] = ()
    prefix_of: tuple[str, ...] = ()
    values: Mapping[str, Sequence[str]] = MappingProxyType({})
    follows: str = ""

    @property
    def synopsis(self) -> str:
        """The command with its arguments."""
        return f"covey {self.name} {self.arguments}".rstrip()

    @property
    def usage(self) -> Sequence[str]:
        """Lines of usage."""
        options = [option.label for option in self.options if option.flag not in self.arguments]
        settings = ["[--setting value ...]"] if self.classes else []
        return self.usages or (" ".join([self.synopsis, *(f"[{label}]" for label in options), *settings]),)

    @property
    def classes(self) -> Sequence[type[Config]]:
        """Classes of all settings that the command takes."""
        return (*self.settings, *(cls for name in self.settings_of for cls in COMMANDS[name].settings))

    @property
    def recipes(self) -> Sequence[str]:
        """Names of the built-in recipes that the command takes."""
        kinds = [cls for cls in self.classes if issubclass(cls, recipe.AnyRecipe)]
        return recipe.names(kinds[0] if len(kinds) == 1 else recipe.AnyRecipe)

    @property
    def flags(self) -> Sequence[str]:
        """Flags of the command's own options."""
        paths = (path for cls in self.settings if self.prefix_of for path in leaves(cls))
        return (*(option.flag for option in self.options), *("--" + path.replace("_", "-") for path in paths))


class Commands(Mapping[str, Command]):
    """Commands by name in the order of the overview: Covey's own, each followed by those of installed packages, which
    are imported when a name that is not Covey's own is looked up.
    """

    def __init__(self, own: Iterable[Command]):
        self._own = {command.name: command for command in own}

    @cached_property
    def _all(self) -> dict[str, Command]:
        offered: dict[str, Command] = {}
        for name, load in all_offered("covey.commands").items():
            with suppress(CoveyError):  # told when the command is named
                offered[name] = load()
        rows = self._own | offered
        offered = {name: row if row.follows in rows else row._replace(follows="") for name, row in offered.items()}
        order: list[str] = []
        for name in (*self._own, ""):
            _append_with_followers(order, name, offered)
        return {name: rows[name] for name in order if name}

    def __getitem__(self, name: str) -> Command:
        """Return a command.

        Raises:
            KeyError: there is none of this name.
            CoveyError: the package to which it belongs cannot be imported.
        """
        return self._own[name] if name in self._own else all_offered("covey.commands")[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _append_with_followers(order: list[str], name: str, commands: Mapping[str, Command]) -> None:
    """Append `name` to `order`, then each command that follows it, with its followers."""
    order.append(name)
    for follower in (other.name for other in commands.values() if other.follows == name):
        _append_with_followers(order, follower, commands)


JSON = Option("--json", help="the same as one line of JSON")

COMMANDS = Commands(
    (
        Command(
            "train", "covey.cli.train:train", "NAME_OR_YAML", "train as a recipe says",
            """\
Trains as a recipe says. A recipe is one of the built-in ones (covey recipes) or a YAML file.
Any of its settings can be changed: --grpo.beta 0.1, --grpo.beta=0.1 and grpo.beta=0.1 are the same,
and the end of a name is enough where only one setting ends so. Of a setting that is given twice the last value counts,
and the parts of a list are joined: --rewards a --rewards b. Beside --resume the settings change the run's recipe,
as far as it stays the same run; --max-steps trains a finished one longer. --help grpo lists the settings of a section,
--help beta explains one, and --help all lists all.

With --dry-run nothing is written and no update is made: it shows every setting with its origin, the first prompt and
its tokens, tokens and number of steps, memory, and the files of the run; --json prints that as one line of JSON. As
every run, it imports the modules that the recipe names (module:function), which executes them.""",
            """\
examples
  covey train quickstart
  covey train quickstart --dry-run
  covey train quickstart --max-steps 20 --seed 1 --out runs/longer
  covey train gsm8k-smollm2 --data.path FOLDER --lora.rank 16
  covey recipes quickstart > mine.yaml && covey train mine.yaml""",
            least=0,
            missing="no recipe is given to train",
            options=(Option("--dry-run"), Option("--json"), Option("--resume", "RUN")),
            settings=(recipe.Recipe,),
            usages=(
                "covey train NAME_OR_YAML [--dry-run] [--setting value ...]",
                "covey train --resume RUN [--setting value ...]",
            ),
        ),
        Command(
            "sft", "covey.cli.train:train", "NAME_OR_YAML", "train on given answers instead: supervised",
            """\
Supervised training: imitates the answers of a file (or of a built-in task), as a recipe with method: sft says.
Only the answer of a row is learnt, its stop token included. A row of the file is of one of these forms:

FORMS

Functions that judge the answers (module:function) are imported, and so executed, also with --dry-run.""",
            """\
examples
  covey sft sft-arithmetic
  covey sft sft-smollm2 --data.path mine.jsonl --num-epochs 3
  covey sft sft-smollm2 --data.path mine.jsonl --lora.rank 0 --learning-rate 1e-5
  covey train quickstart --model.source runs/sft-smollm2-1""",
            least=0,
            missing="no recipe is given to train",
            options=(Option("--dry-run"), Option("--json"), Option("--resume", "RUN")),
            settings=(recipe.SFTRecipe,),
            usages=(
                "covey sft NAME_OR_YAML [--dry-run] [--setting value ...]",
                "covey sft --resume RUN [--setting value ...]",
            ),
        ),
        Command(
            "eval", "covey.cli.evaluate:evaluate", "RUN_OR_MODEL", "measure it on held-out prompts",
            """\
Measures a trained run, or a model, on a recipe's held-out prompts. A run brings its own recipe.
Under a recipe for covey sft that is the loss on held-out examples, and a few answers.""",
            """\
examples
  covey eval runs/quickstart-1
  covey eval smollm2-135m --recipe quickstart --evaluation.samples 4

The settings are those of covey train; the section evaluation matters here.""",
            options=(Option("--recipe", "NAME_OR_YAML"),),
            settings_of=("train", "sft"),
        ),
    )
)  # fmt: skip
