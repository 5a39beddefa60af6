"""The rows of the table of commands. The functions are imported when a command is executed."""

from covey.cli.commands import JSON, Command, Option

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
