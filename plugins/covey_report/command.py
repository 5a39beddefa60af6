"""The rows of the table of commands. The functions are imported when a command is executed."""

from covey.cli.commands import ANY, JSON, Command, Option

DATA = Command(
    "data", "covey_report.cli.data:show_data", "NAME_OR_YAML",
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
    follows="validate",
)  # fmt: skip
REWARDS = Command(
    "rewards", "covey_report.cli.rewards:show_signal", "NAME_OR_YAML",
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
    follows="data",
)  # fmt: skip
REPORT = Command(
    "report", "covey_report.cli.compare:report", "RUN ...", "one HTML page of a run, or of several compared",
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
    follows="rewards",
)  # fmt: skip
WATCH = Command(
    "watch", "covey_report.cli.watch:watch_command", "RUN", "a run that trains elsewhere, from its folder",
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
    follows="report",
)  # fmt: skip
BOARD = Command(
    "board", "covey_report.cli.board:board", "[RUNS]", "all runs of a folder, live, as a local web page",
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
    follows="watch",
)  # fmt: skip
COMPARE = Command(
    "compare", "covey_report.cli.compare:compare", "RUN RUN ...",
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
    follows="board",
)  # fmt: skip
