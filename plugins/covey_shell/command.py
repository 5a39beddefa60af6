"""The rows of the table of commands. The functions are imported when a command is executed."""

from covey.cli.commands import JSON, ChatOptions, Command, Option
from covey.config.base import GroupSize


class GenerateOptions(ChatOptions):
    """Settings of `covey generate`."""

    n: GroupSize = 1
    """Number of completions of the prompt."""


GENERATE = Command(
    "generate", "covey_shell.talk:generate", 'RUN_OR_MODEL "PROMPT"', "complete a prompt",
    "Completes a prompt. A run brings the rollout settings it was trained with.",
    """\
examples
  covey generate smollm2-135m "Write one short sentence about rivers that starts with the letter S."
  covey generate runs/quickstart-1 "Write one short sentence about rain." --n 4 --temperature 0.7""",
    most=2,
    settings=(GenerateOptions,),
    follows="rollout",
)  # fmt: skip
CHAT = Command(
    "chat", "covey_shell.talk:chat", "RUN_OR_MODEL", "talk to it",
    "A conversation in the terminal; Ctrl-D ends it. A server has the model already: see --server.",
    """\
examples
  covey chat runs/quickstart-1
  covey chat smollm2-135m --temperature 0.7
  covey chat --server http://127.0.0.1:8000""",
    least=0,
    options=(
        Option(
            "--server", "URL",
            "talk to the model that a server has, as RUN_OR_MODEL if it is given; the key is OPENAI_API_KEY",
        ),
    ),
    settings=(ChatOptions,),
    follows="generate",
)  # fmt: skip
VALIDATE = Command(
    "validate", "covey_shell.validate:validate", "NAME_OR_YAML",
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
    follows="chat",
)  # fmt: skip
RECIPES = Command(
    "recipes", "covey_shell.recipes:recipes", "[NAME]", "the built-in recipes, or the text of one",
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
    follows="validate",
)  # fmt: skip
COMPLETION = Command(
    "completion", "covey_shell.completion:completion", "bash|zsh|fish",
    "complete commands and settings in a shell",
    """\
Prints a script with which the shell completes commands, settings and their values. It starts no Python.

  bash    source <(covey completion bash), in ~/.bashrc
  zsh     source <(covey completion zsh), in ~/.zshrc after compinit
  fish    covey completion fish > ~/.config/fish/completions/covey.fish""",
    """\
examples
  covey completion bash""",
    follows="models",
)  # fmt: skip
