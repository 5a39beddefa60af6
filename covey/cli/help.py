"""Print `--help` and `covey recipes`. The settings and their explanations come from the config classes."""

import json
import textwrap
from collections.abc import Sequence

from covey.cli import settings_help
from covey.cli.options import ChatOptions, ExportOptions, GenerateOptions, PushOptions, ReportOptions
from covey.config import recipe, strict_yaml
from covey.display import make_console

OVERVIEW = """\
covey: improve a language model by comparing its own answers (GRPO, in JAX)

  covey train NAME_OR_YAML       train as a recipe says
  covey sft NAME_OR_YAML         train on given answers instead: supervised
  covey train --resume RUN       go on with a run that was stopped; covey sft --resume RUN likewise
  covey eval RUN_OR_MODEL        measure it on held-out prompts
  covey rollout NAME_OR_YAML     play a few episodes of a recipe before it is trained
  covey generate RUN_OR_MODEL "PROMPT"
  covey chat RUN_OR_MODEL        talk to it
  covey export RUN_OR_MODEL      write it for transformers, PEFT or llama.cpp
  covey validate NAME_OR_YAML    check a recipe, its data and its rewards, without running it
  covey rewards NAME_OR_YAML     is there a learning signal? scores samples of the untouched model
  covey plan NAME_OR_YAML        what a run needs, on this or another machine
  covey launch PLACE ... train   train with several processes, here or on a cluster
  covey report RUN [RUN ...]     one HTML page of a run, or of several compared
  covey watch RUN                a run that trains elsewhere, from its folder
  covey compare RUN RUN          what differs between runs, and their results, in the terminal
  covey push RUN hf:org/name     publish a run on the Hugging Face hub
  covey recipes [NAME]           the built-in recipes, or the text of one
  covey completion bash          complete commands and settings in bash, zsh or fish
  covey doctor                   what this machine has, and what is missing

covey COMMAND --help says more, covey --help grpo lists the settings of a section. Start with: covey train quickstart
"""

TRAIN = """\
covey train NAME_OR_YAML [--dry-run] [--setting value ...]
covey train --resume RUN [--setting value ...]

Trains as a recipe says. A recipe is one of the built-in ones (covey recipes) or a YAML file.
Any of its settings can be changed: --grpo.beta 0.1, --grpo.beta=0.1 and grpo.beta=0.1 are the same,
and the end of a name is enough where only one setting ends so. Of a setting that is given twice the last value counts,
and the parts of a list are joined: --rewards a --rewards b. Beside --resume the settings change the run's recipe,
as far as it stays the same run; --max-steps trains a finished one longer. --help grpo lists the settings of a section,
--help beta explains one, and --help all lists all.

With --dry-run nothing is written and no update is made: it shows every setting with its origin, the first prompt and
its tokens, tokens and number of steps, memory, and the files of the run; --json prints that as one line of JSON. As
every run, it imports the modules that the recipe names (module:function), which executes them.

examples
  covey train quickstart
  covey train quickstart --dry-run
  covey train quickstart --max-steps 20 --seed 1 --out runs/longer
  covey train gsm8k-smollm2 --data.path FOLDER --lora.rank 16
  covey recipes quickstart > mine.yaml && covey train mine.yaml
"""

SFT = """\
covey sft NAME_OR_YAML [--dry-run] [--setting value ...]
covey sft --resume RUN [--setting value ...]

Supervised training: imitates the answers of a file (or of a built-in task), as a recipe with method: sft says.
Only the answer of a row is learnt, its stop token included. A row of the file is of one of these forms:

FORMS

Functions that judge the answers (module:function) are imported, and so executed, also with --dry-run.

examples
  covey sft sft-arithmetic
  covey sft sft-smollm2 --data.path mine.jsonl --num-epochs 3
  covey sft sft-smollm2 --data.path mine.jsonl --lora.rank 0 --learning-rate 1e-5
  covey train quickstart --model.source runs/sft-smollm2-1
"""

EVAL = """\
covey eval RUN_OR_MODEL [--recipe NAME_OR_YAML] [--setting value ...]

Measures a trained run, or a model, on a recipe's held-out prompts. A run brings its own recipe.
Under a recipe for covey sft that is the loss on held-out examples, and a few answers.

examples
  covey eval runs/quickstart-1
  covey eval smollm2-135m --recipe quickstart --evaluation.samples 4

The settings are those of covey train; the section evaluation matters here.
"""

ROLLOUT = """\
covey rollout NAME_OR_YAML [--episodes N] [--setting value ...]

Samples a few prompts of a recipe with the model that it begins with, and prints the conversations, turn by turn:
what the model and the environment say, the reward, and how each episode ended. Nothing is trained or written.

  --episodes N             number of episodes, each for another prompt; 4 when not given

examples
  covey rollout quickstart
  covey rollout guess-tiny --episodes 8 --rollout.temperature 0.5

The settings are those of covey train.
"""

GENERATE = """\
covey generate RUN_OR_MODEL "PROMPT" [--setting value ...]

Completes a prompt. A run brings the rollout settings it was trained with.

examples
  covey generate smollm2-135m "Write one short sentence about rivers that starts with the letter S."
  covey generate runs/quickstart-1 "Write one short sentence about rain." --n 4 --temperature 0.7
"""

CHAT = """\
covey chat RUN_OR_MODEL [--setting value ...]

A conversation in the terminal; Ctrl-D ends it.

examples
  covey chat runs/quickstart-1
  covey chat smollm2-135m --temperature 0.7
"""

EXPORT = """\
covey export RUN_OR_MODEL --out FOLDER [--format hf|peft|gguf] [--setting value ...]

Writes a model for others to use: a Hugging Face folder with the adapters merged, a PEFT adapter, or a GGUF file.
What was written is read back, and its logits are compared with those of the model, before it is put in place.

examples
  covey export runs/quickstart-1 --out exported
  covey export runs/quickstart-1 --out exported --dtype bfloat16 --shard-size 2GB
  covey export runs/gsm8k-smollm2-1 --out adapter --format peft
  covey export smollm2-135m --out for-llama-cpp --format gguf
"""

VALIDATE = """\
covey validate NAME_OR_YAML [--no-import] [--json] [--setting value ...]

Checks everything that needs no model: names, values and contradictions of the settings, the paths, every line and the
columns of local data, the reward functions, the run folder. It lists all mistakes; the exit code is 2 if there is one.
It imports the modules that the recipe names (module:function), which executes them: of a recipe from others, use
--no-import.

  --no-import              import no module that the recipe names, and leave out the checks that need it
  --json                   the same as one line of JSON

examples
  covey validate mine.yaml
  covey validate gsm8k-smollm2 --data.path FOLDER --json

The settings are those of covey train and covey sft.
"""

REWARDS = """\
covey rewards NAME_OR_YAML [--samples FILE] [--prompts N] [--json] [--setting value ...]

Scores completions of the untouched model with the recipe's reward functions and says whether there is a learning
signal: mean of each function, spread within groups, share of groups with different scores, failures, a few examples;
and where there is none, the setting to change. Groups whose completions all score alike teach nothing.

  --samples FILE           score recorded completions instead: JSON lines as in samples.jsonl. No model is loaded
  --prompts N              number of prompts; 16 when not given, all of a file
  --json                   the same as one line of JSON

examples
  covey rewards quickstart
  covey rewards mine.yaml --prompts 32 --grpo.num-generations 16
  covey rewards quickstart --samples runs/quickstart-1/samples.jsonl --rewards first_letter

The settings are those of covey train. A reward model is not asked, and the penalty for long completions
(grpo.overlong_buffer) is not added; the output says so for a recipe that has them.
"""

PLAN = """\
covey plan NAME_OR_YAML [--on MACHINE] [--json] [--here] [--quick] [--setting value ...]

Says what a run of a recipe needs, without its weights: memory by part, flops and bytes by phase, the least and the
expected seconds of a step, what moves between devices, and the first setting to change where it does not fit.
What follows from shapes alone is printed first: the arrays on a device, tokens of a step, checkpoints on the disk. Then
all programs of the run are compiled for the machine, which need not be there; a large model takes minutes.

  --on MACHINE             cpu (this one), v5e:2x4, v5p:2x2x2, v6e:2x4 or h100:8. TPUs need the extra 'plan',
                           H100s the plugin for CUDA. The recipe's mesh must have as many devices
  --json                   the same as one line of JSON
  --quick                  stop after what follows from shapes, and compile nothing
  --here                   run two steps too, and compare this machine's memory with the plan's
  --prompt-tokens N        mean length of a prompt; the longest allowed when not given
  --completion-tokens N    mean length of a completion; 35 % of the longest allowed when not given

examples
  covey plan quickstart
  covey plan quickstart --quick
  covey plan quickstart --here
  covey plan gsm8k-gemma2 --on v5e:2x2
  covey plan gsm8k-gemma2 --on h100:1 --mesh.tp 1 --model.source FOLDER
  covey plan sft-smollm2 --data.path mine.jsonl --lora.rank 0 --json

The settings are those of covey train and covey sft. Of the model only its config.json, its tokenizer and the names in
its files are read.
"""

REPORT = """\
covey report RUN [RUN ...] [--out FILE]

Writes a run as one HTML page that needs no network: curves, held-out results before and after, completions, recipe.
Several runs share their charts, and the page lists the settings that differ. A run that trains writes its own report;
this command writes it again at any time. The page holds the prompts and completions of the run.

examples
  covey report runs/quickstart-1
  covey report runs/quickstart-1 runs/longer --out comparison.html
"""

WATCH = """\
covey watch RUN [--once] [--json]

Shows a run that trains in another terminal or on another machine, from the files of its folder alone: its steps, a bar,
the time left without compilation, memory, the phase and the program being compiled. It ends when the run ends, and says
so when the run seems to be dead: no process holds the folder's lock, and the run has not said that it ended.
A run on another machine seems to be dead when its heartbeat.json is not written any more.

  --once                   show the present state and end
  --json                   print each new state as one line of JSON

The exit code is 0 when the run is finished (with --once: or goes on), and 75 when it ended too early.

examples
  covey watch runs/quickstart-1
  covey watch runs/quickstart-1 --once --json
"""

LAUNCH = """\
covey launch local [options] train NAME_OR_YAML [--setting value ...]
covey launch local [options] eval RUN_OR_MODEL [--recipe NAME] [--setting value ...]
covey launch local [options] export RUN_OR_MODEL --out FOLDER [--setting value ...]
covey launch slurm|k8s|tpu-vm|skypilot [options] train NAME_OR_YAML --out FOLDER [--setting value ...]

Trains with several processes (docs/scaling.md). 'local' starts them on this machine: process 0 writes to the terminal,
the others to a file each. When one fails, all are stopped within half a minute, the first that failed is named, and
its last lines are shown. The other places write a job file for review and say how to submit it; nothing is submitted.
In place of the recipe may be --resume RUN; 'sft' is launched as 'train' is. 'eval' divides the prompts, and 'export'
the weights.

local
  --processes N, -n N      number of processes (2)
  --max-restarts N         go on from the last checkpoint after a failure, so many times (0)
  --min-processes N        a restart leaves out the process that failed, and its GPUs, down to N; all when not set
  --gpus-per-process N     give each process so many GPUs of its own; all see all GPUs when not set
  --logs FOLDER            for the output of processes 1 and up; FOLDER-logs beside the run folder when not set

job files
  --dry-run                print the file instead of writing it
  --file FILE              where to write it: covey-job.sh or covey-job.yaml when not set
  --name NAME              name of the job (covey); for tpu-vm the name of the TPU VM
  --nodes N                number of machines (1); a TPU VM has its own
  --gpus-per-node N        number of GPUs of each machine (8); 0 for machines without
  --cpus-per-task N        slurm, k8s: CPU cores of each process
  --mem M                  slurm, k8s: memory of each machine, as in 64G
  --workdir FOLDER         where the command runs (.); for k8s where the shared volume is mounted
  --setup COMMAND          run first, as in 'source .venv/bin/activate'
  --max-restarts N         as for local
  --time T, --partition P  slurm: longest time, as in 12:00:00, and partition
  --account A              slurm: account that is charged
  --lines [--qos=high]     slurm: list of further options of sbatch, each a line of the script
  --image I, --volume V    k8s: container image with Covey in it, and claim of a volume that all pods share
  --tpus-per-node N        k8s: TPU chips of each machine in place of GPUs, with --accelerator and
  --topology T             the topology of the slice, as in 4x4
  --zone Z                 tpu-vm: zone of the cloud
  --accelerator A          skypilot: kind of accelerator, as in H100; k8s: of TPU, as in tpu-v5-lite-podslice
  --volume V, --mount M    skypilot: volume or gs://BUCKET that all machines share, and its path (/shared)

examples
  covey launch local -n 2 train quickstart --prompts-per-step 8
  covey launch local -n 4 --gpus-per-process 2 --max-restarts 3 train mine.yaml --out runs/mine
  covey launch slurm --nodes 2 --time 12:00:00 --dry-run train gsm8k-nanochat --data.path FOLDER --out runs/a
  covey launch k8s --nodes 4 --image IMAGE --volume data --workdir /workspace --dry-run train mine.yaml --out runs/a
  covey launch skypilot --nodes 2 --accelerator H100 --volume data --dry-run train mine.yaml --out /shared/runs/a
"""

COMPARE = """\
covey compare RUN RUN [RUN ...] [--json]

Prints a table of the settings that differ between runs, and of their results: held-out figures before and after, the
final and the best value of each curve, each with its standard error where that is known. The runs may be going on.

  --json                   the same as one line of JSON

examples
  covey compare runs/quickstart-1 runs/longer
"""

PUSH = """\
covey push RUN hf:org/name [--yes] [--private] [--samples] [--setting value ...]

Publishes a run on the Hugging Face hub: the trained model with its card, recipe.yaml, metrics.jsonl, summary.json and
report.html. The report holds prompts, so text of your data, and completions of the model: all of it is published. It
says so and asks first. It needs the extra 'hub' and a login (hf auth login).

  --yes                    do not ask, as scripts need it
  --private                make the repository private, if it is new
  --samples                publish samples.jsonl too: every completion, with its prompt
  --no-report              do not publish report.html

examples
  covey push runs/quickstart-1 hf:me/covey-quickstart --private
  covey push runs/quickstart-1 hf:me/covey-quickstart --yes --no-report --format peft
"""

RECIPES = """\
covey recipes [NAME]
covey recipes copy NAME FILE
covey recipes --json

Lists the built-in recipes, prints the text of one, or copies it to a new file, to be changed. --json lists them as one
line of JSON.

examples
  covey recipes quickstart
  covey recipes copy quickstart mine.yaml
"""

COMPLETION = """\
covey completion bash|zsh|fish

Prints a script with which the shell completes commands, settings and their values. It starts no Python.

  bash    source <(covey completion bash), in ~/.bashrc
  zsh     source <(covey completion zsh), in ~/.zshrc after compinit
  fish    covey completion fish > ~/.config/fish/completions/covey.fish

examples
  covey completion bash
"""

DOCTOR = """\
covey doctor

Says what this machine has (Python, JAX and its devices, memory, disk, optional packages),
and how to get what is missing.
"""


def show(command: str, words: Sequence[str] = ()) -> None:
    """Print the help of `command`.

    Args:
        words: the other words of the command line: a built-in recipe, whose values are shown; after --help a topic,
            which is a section, a setting, or `all`.

    Raises:
        CoveyError: there is no such topic.
    """
    text, settings = PAGES[command]
    choices = recipe.names(settings) if settings and issubclass(settings, recipe.AnyRecipe) else []
    named = next((word for word in words if word in choices), "")
    topic = _topic(words, choices) if choices else ""
    if not topic:
        print(_with_forms(text) if command == "sft" else text, end="")
    if settings:
        shown = strict_yaml.build(settings, _read(named)) if named else settings()
        heading = f"The settings, with {f'the values of {named}' if named else 'their defaults'}:"
        settings_help.show_settings(shown, heading if topic else f"\n{heading}", topic, f"covey {command}")


def _topic(words: Sequence[str], recipes: Sequence[str]) -> str:
    """Return the word after --help, if that is no recipe."""
    at = next((number for number, word in enumerate(words) if word in ASKING), len(words))
    return next((word for word in words[at + 1 :] if word not in (*ASKING, *recipes)), "")


def _with_forms(text: str) -> str:
    from covey.data import rows  # late: no other page needs it

    return text.replace("FORMS", textwrap.indent(rows.format_forms(), "  "))


def print_recipes_as_json() -> None:
    """Print the built-in recipes as one line of JSON: name, command, description, needs and expectation of each."""
    listed = []
    for name in recipe.names():
        about = {key: _read(name).value[key].value for key in ("description", "needs", "expect")}
        listed.append({"name": name, "command": recipe.COMMANDS[recipe.kind_of(name).method], **about})
    print(json.dumps(listed))


def show_recipes() -> None:
    """Print the table of built-in recipes."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold")
    for heading in ("recipe", "what", "needs", "expect"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "recipe")
    for name in recipe.names():
        about = _read(name).value
        table.add_row(name, *(escape(about[key].value) for key in ("description", "needs", "expect")))
    console = make_console()
    console.print(table)
    by_sft = ", ".join(recipe.names(recipe.SFTRecipe))
    console.print("covey recipes NAME prints one · covey train NAME runs it", highlight=False)
    console.print(f"covey sft NAME runs: {by_sft}", highlight=False)


def _read(name: str) -> strict_yaml.Item:
    return strict_yaml.read(recipe.find(name).read_text(encoding="utf-8"), name)


ASKING = ("-h", "--help")
"""Words that ask for help."""
PAGES: dict[str, tuple[str, type | None]] = {
    "train": (TRAIN, recipe.Recipe),
    "sft": (SFT, recipe.SFTRecipe),
    "eval": (EVAL, None),
    "rollout": (ROLLOUT, None),
    "generate": (GENERATE, GenerateOptions),
    "chat": (CHAT, ChatOptions),
    "export": (EXPORT, ExportOptions),
    "validate": (VALIDATE, None),
    "rewards": (REWARDS, None),
    "plan": (PLAN, None),
    "report": (REPORT, ReportOptions),
    "watch": (WATCH, None),
    "launch": (LAUNCH, None),
    "compare": (COMPARE, None),
    "push": (PUSH, PushOptions),
    "recipes": (RECIPES, None),
    "completion": (COMPLETION, None),
    "doctor": (DOCTOR, None),
}
"""Map from command to its text and the settings listed below it."""
