"""The table of commands. The parser, the help, the completion and the suggestions for mistakes are made from it.

Installed packages add rows to it by entry points of the group `covey.commands`, each a `Command`. A row names its
function as `module:function`, which is imported when the command is executed, so that help and mistakes are answered at
once.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from covey.config import recipe
from covey.config.base import Config, GroupSize, NonNegativeInt, leaves
from covey.config.schema import RolloutConfig
from covey.errors import CoveyError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
ANY = 10_000
"""Largest number of arguments of a command that takes any number."""


class ChatOptions(Config):
    """Settings of `covey chat`."""

    seed: NonNegativeInt = 0
    """Seed of the samples drawn."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", self.rollout.with_seed(self.seed))


class GenerateOptions(ChatOptions):
    """Settings of `covey generate`."""

    n: GroupSize = 1
    """Number of completions of the prompt."""


class ExportOptions(Config):
    """Settings of `covey export` and `covey push`."""

    format: Literal["hf", "peft", "gguf"] = "hf"
    """hf: a Hugging Face folder, adapters merged. peft: the adapters alone. gguf: one file for llama.cpp, adapters
    merged.
    """
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights written; that of the run when not set."""
    shard_size: str = "5GB"
    """hf: largest size of a file of weights: 500MB, 5GB, or a number of bytes."""

    @property
    def shard_bytes(self) -> int:
        """Return `shard_size` in bytes.

        Raises:
            CoveyError: it is not a size.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)?", self.shard_size.strip(), re.IGNORECASE)
        size = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
        if size < 1:
            raise CoveyError(f"--shard-size is {self.shard_size!r}", want="bytes, as in 500MB or 5GB")
        return size


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
    """Commands by name: Covey's own in the order of the overview, then those of installed packages, which are imported
    when a name that is not Covey's own is looked up.
    """

    def __init__(self, own: Iterable[Command]):
        self._own = {command.name: command for command in own}

    @cached_property
    def _all(self) -> dict[str, Command]:
        return self._own | {point.name: point.load() for point in entry_points(group="covey.commands")}

    def __getitem__(self, name: str) -> Command:
        return self._own[name] if name in self._own else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


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
            "eval", "covey.cli.model:evaluate", "RUN_OR_MODEL", "measure it on held-out prompts",
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
        Command(
            "generate", "covey.cli.model:generate", 'RUN_OR_MODEL "PROMPT"', "complete a prompt",
            "Completes a prompt. A run brings the rollout settings it was trained with.",
            """\
examples
  covey generate smollm2-135m "Write one short sentence about rivers that starts with the letter S."
  covey generate runs/quickstart-1 "Write one short sentence about rain." --n 4 --temperature 0.7""",
            most=2,
            settings=(GenerateOptions,),
        ),
        Command(
            "chat", "covey.cli.model:chat", "RUN_OR_MODEL", "talk to it",
            "A conversation in the terminal; Ctrl-D ends it.",
            """\
examples
  covey chat runs/quickstart-1
  covey chat smollm2-135m --temperature 0.7""",
            settings=(ChatOptions,),
        ),
        Command(
            "export", "covey.cli.model:export", "RUN_OR_MODEL --out FOLDER",
            "write it for transformers, PEFT or llama.cpp",
            """\
Writes a model for others to use: a Hugging Face folder with the adapters merged, a PEFT adapter, or a GGUF file.
What was written is read back, and its logits are compared with those of the model, before it is put in place.""",
            """\
examples
  covey export runs/quickstart-1 --out exported
  covey export runs/quickstart-1 --out exported --dtype bfloat16 --shard-size 2GB
  covey export runs/gsm8k-smollm2-1 --out adapter --format peft
  covey export smollm2-135m --out for-llama-cpp --format gguf""",
            options=(Option("--out", "FOLDER", "folder to write: a new or an empty one. No file is ever replaced"),),
            settings=(ExportOptions,),
        ),
        Command(
            "validate", "covey.cli.checks:validate", "NAME_OR_YAML",
            "check a recipe, its data and its rewards, without running it",
            """\
Checks everything that needs no model: names, values and contradictions of the settings, the paths, every line and the
columns of local data, the reward functions, the run folder. It lists all mistakes; the exit code is 2 if there is one.
It imports the modules that the recipe names (module:function), which executes them: of a recipe from others, use
--no-import.""",
            """\
examples
  covey validate mine.yaml
  covey validate gsm8k-smollm2 --data.path FOLDER --json

The settings are those of covey train and covey sft.""",
            missing="no recipe is given to validate",
            options=(
                Option(
                    "--no-import",
                    help="import no module that the recipe names, and leave out the checks that need it",
                ),
                JSON,
            ),
            settings_of=("train", "sft"),
        ),
        Command(
            "data", "covey.cli.data:show_data", "NAME_OR_YAML",
            "look at the data of a recipe before a run",
            """\
Reads the data of a recipe row by row, as a run does, and shows what a run would get: a few rows as the chat template
renders them, with the tokens of each role; the lengths of prompts (of prompt and completion for covey sft) against the
limit; equal rows, exactly and but for case and white space; held-out rows that are training rows; malformed rows, rows
that are too long, and what becomes of them; the columns, and the functions that read them. The exit code is 2 if a run
would refuse the data. It imports the modules that the recipe names (module:function), which executes them.
A million rows fit in memory. Of more than 20,000, the tokens of every second, fourth, eighth ... row are counted.""",
            """\
examples
  covey data quickstart
  covey data gsm8k-smollm2 --data.path FOLDER --html data.html
  covey data sft-smollm2 --data.path chats.jsonl --rows 10
  covey data mine.yaml --json

The settings are those of covey train and covey sft. Of the model only its config.json and its tokenizer are read.""",
            missing="no recipe is given",
            options=(
                Option("--rows", "N", "number of training rows to show, the first ones; 3 when not given"),
                Option(
                    "--html",
                    "FILE",
                    "write one HTML page that needs no network, in place of the text. It holds the rows shown",
                ),
                JSON,
            ),
            settings_of=("train", "sft"),
        ),
        Command(
            "rewards", "covey.cli.rewards:show_signal", "NAME_OR_YAML",
            "is there a learning signal? scores samples of the untouched model",
            """\
Scores completions of the untouched model with the recipe's reward functions and says whether there is a learning
signal: mean of each function, spread within groups, share of groups with different scores, failures, a histogram, the
best and the worst completion by each; correlations with each other, with the length and the emptiness of completions;
and where there is no signal, the setting to change. Groups whose completions all score alike teach nothing. Of a recipe
with an environment or tools it plays episodes. --completion scores one answer that you write, without a model.""",
            """\
examples
  covey rewards quickstart
  covey rewards mine.yaml --prompts 32 --grpo.num-generations 16
  covey rewards quickstart --samples runs/quickstart-1/samples.jsonl --rewards first_letter
  covey rewards arithmetic-smollm2 --completion "20" --row 3

The settings are those of covey train. A reward model is not asked, and the penalty for long completions
(grpo.overlong_buffer) is not added; the output says so for a recipe that has them.""",
            missing="no recipe is given",
            options=(
                Option(
                    "--samples",
                    "FILE",
                    "score recorded completions instead: JSON lines as in samples.jsonl. No model is loaded",
                ),
                Option("--prompts", "N", "number of prompts; 16 when not given, all of a file"),
                Option("--completion", "TEXT", "score this completion alone. No model is loaded"),
                Option("--row", "N", "the training row that it answers, as covey data numbers them; 1 when not given"),
                JSON,
            ),
            settings_of=("train",),
        ),
        Command(
            "report", "covey.cli.compare:report", "RUN ...", "one HTML page of a run, or of several compared",
            """\
Writes a run as one HTML page that needs no network: curves, held-out results before and after, completions, recipe.
Several runs share their charts, and the page lists the settings that differ. A run that trains writes its own report;
this command writes it again at any time. The page holds the prompts and completions of the run.""",
            """\
examples
  covey report runs/quickstart-1
  covey report runs/quickstart-1 runs/longer --out comparison.html
  covey report runs/quickstart-1 --public""",
            most=ANY,
            missing="no run is given to report on",
            options=(
                Option(
                    "--out",
                    "FILE",
                    "file to write; report.html in the folder of a single run, or here for several",
                ),
                Option(
                    "--public",
                    help="leave out prompts, completions, paths, names of runs, and what the user wrote in settings; "
                    "the file is report-public.html here",
                ),
            ),
        ),
        Command(
            "watch", "covey.cli.watch:watch_command", "RUN", "a run that trains elsewhere, from its folder",
            """\
Shows a run that trains in another terminal or on another machine, from the files of its folder alone: its steps, a bar,
the time left without compilation, memory, the phase and the program being compiled. It ends when the run ends, and says
so when the run seems to be dead: no process holds the folder's lock, and the run has not said that it ended.
A run on another machine seems to be dead when its heartbeat.json is not written any more.""",
            """\
The exit code is 0 when the run is finished (with --once: or goes on), and 75 when it ended too early.

examples
  covey watch runs/quickstart-1
  covey watch runs/quickstart-1 --once --json
  covey watch runs/quickstart-1 --web""",
            options=(
                Option("--once", help="show the present state and end"),
                Option("--json", help="print each new state as one line of JSON"),
                Option("--web", help="show it as a local web page instead, as covey board does, until Ctrl-C"),
            ),
        ),
        Command(
            "board", "covey.cli.board:board", "[RUNS]", "all runs of a folder, live, as a local web page",
            """\
Shows the runs of a folder (runs, when none is named) as a local web page that follows them: which go on, are finished
or failed, and what the diagnosis found; curves of several runs over each other by step, tokens or time; completions
of the same prompt side by side. Only this machine can ask for the page, and it changes nothing. It asks for nothing
from elsewhere. Ctrl-C ends it. It needs the extra 'serve'.""",
            """\
examples
  covey board
  covey board experiments --port 9000 --no-browser""",
            least=0,
            options=(
                Option("--port", "N", "port of the page; 8421 or the next free one when not given, any free one for 0"),
                Option("--no-browser", help="open no browser; the address is printed in any case"),
            ),
        ),
        Command(
            "compare", "covey.cli.compare:compare", "RUN RUN ...",
            "what differs between runs, and their results, in the terminal",
            """\
Prints a table of the settings that differ between runs, and of their results: held-out figures before and after, the
final and the best value of each curve, each with its standard error where that is known. The runs may be going on.""",
            """\
examples
  covey compare runs/quickstart-1 runs/longer""",
            least=2,
            most=ANY,
            missing="there are not two runs to compare",
            options=(JSON,),
        ),
        Command(
            "push", "covey.cli.model:push", "RUN hf:org/name", "publish a run on the Hugging Face hub",
            """\
Publishes a run on the Hugging Face hub: the trained model with its card, recipe.yaml, metrics.jsonl, summary.json and
report.html. The report holds prompts, so text of your data, and completions of the model: all of it is published. It
says so and asks first. It needs the extra 'hub' and a login (hf auth login).""",
            """\
examples
  covey push runs/quickstart-1 hf:me/covey-quickstart --private
  covey push runs/quickstart-1 hf:me/covey-quickstart --yes --no-report --format peft""",
            least=2,
            most=2,
            options=(
                Option("--yes", help="do not ask, as scripts need it"),
                Option("--private", help="make the repository private, if it is new"),
                Option("--samples", help="publish samples.jsonl too: every completion, with its prompt"),
                Option("--no-report", help="do not publish report.html"),
            ),
            settings=(ExportOptions,),
        ),
        Command(
            "recipes", "covey.cli.recipes:recipes", "[NAME]", "the built-in recipes, or the text of one",
            """\
Lists the built-in recipes, prints the text of one, or copies it to a new file, to be changed. --json lists them as one
line of JSON.""",
            """\
examples
  covey recipes quickstart
  covey recipes copy quickstart mine.yaml""",
            least=0,
            most=3,
            options=(Option("--json"),),
            usages=("covey recipes [NAME]", "covey recipes copy NAME FILE", "covey recipes --json"),
        ),
        Command(
            "models", "covey.cli.models:models", "[SOURCE]", "the known models, or the facts of one",
            """\
Lists models that are known by name: family, number of weights, licence, chat template, tools, whether it was trained
here, and the memory that training needs at least. With a source (a folder, a .gguf file, hf:org/name, a run) it tells
the facts of that model, from its config and its tokenizer.""",
            """\
examples
  covey models
  covey models smollm2-135m
  covey models runs/quickstart-1 --json""",
            least=0,
            options=(JSON,),
        ),
        Command(
            "completion", "covey.cli.completion:completion", "bash|zsh|fish",
            "complete commands and settings in a shell",
            """\
Prints a script with which the shell completes commands, settings and their values. It starts no Python.

  bash    source <(covey completion bash), in ~/.bashrc
  zsh     source <(covey completion zsh), in ~/.zshrc after compinit
  fish    covey completion fish > ~/.config/fish/completions/covey.fish""",
            """\
examples
  covey completion bash""",
        ),
        Command(
            "doctor", "covey.cli.doctor:doctor", "", "what this machine has, and what is missing",
            """\
Says what this machine has (Python, JAX and its devices, memory, disk, optional packages),
and how to get what is missing.""",
            least=0,
            most=0,
        ),
    )
)  # fmt: skip
