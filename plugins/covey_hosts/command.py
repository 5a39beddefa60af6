"""Parse `covey launch`: options, then a training command."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from covey.cli.checks import new_run_folder
from covey.cli.commands import ANY, Command, Option
from covey.cli.parse import Line, build_settings, missing_argument, read_line
from covey.config import recipe
from covey.display import echo
from covey.errors import CoveyError, nearest
from covey_hosts import JOBS, JobOptions, LocalOptions, launch
from covey_hosts.local import VERBS, training_command

PLACES = ("local", *JOBS)
COMMAND = Command(
    "launch", "covey_hosts.command:launch_command", "PLACE ... train",
    "train with several processes, here or on a cluster",
    """\
Trains with several processes (docs/scaling.md). 'local' starts them on this machine: process 0 writes to the terminal,
the others to a file each. When one fails, all are stopped within half a minute, the first that failed is named, and
its last lines are shown. The other places write a job file for review and say how to submit it; nothing is submitted.
In place of the recipe may be --resume RUN; 'sft' is launched as 'train' is. 'eval' divides the prompts, and 'export'
the weights. -n N is short for --processes N.""",
    """\
examples
  covey launch local -n 2 train quickstart --prompts-per-step 8
  covey launch local -n 4 --gpus-per-process 2 --max-restarts 3 train mine.yaml --out runs/mine
  covey launch slurm --nodes 2 --time 12:00:00 --dry-run train gsm8k-nanochat --data.path FOLDER --out runs/a
  covey launch k8s --nodes 4 --image IMAGE --volume data --workdir /workspace --dry-run train mine.yaml --out runs/a
  covey launch skypilot --nodes 2 --accelerator H100 --volume data --dry-run train mine.yaml --out /shared/runs/a""",
    missing="no place is given to launch on",
    options=(Option("--dry-run", help="print the job file instead of writing it"),),
    settings=(LocalOptions, JobOptions),
    usages=(
        "covey launch local [options] train NAME_OR_YAML [--setting value ...]",
        "covey launch local [options] eval RUN_OR_MODEL [--recipe NAME] [--setting value ...]",
        "covey launch local [options] export RUN_OR_MODEL --out FOLDER [--setting value ...]",
        "covey launch slurm|k8s|tpu-vm|skypilot [options] train NAME_OR_YAML --out FOLDER [--setting ...]",
    ),
    prefix_of=VERBS,
    values={"PLACE": PLACES},
)  # fmt: skip
NOT_IN_JOBS = {"eval": "RUN", "export": "RUN --out FOLDER"}
"""Command of several processes that no job file is written for → the words that it needs."""


def launch_command(line: Line) -> int | None:
    """Execute `covey launch PLACE [options] train NAME_OR_YAML [settings]`."""
    return parse(line)()


def parse(line: Line) -> Callable[[], int | None]:
    """Return the call that the words after `covey launch` describe.

    Raises:
        CoveyError: an unknown place or option, or a training command that would be refused.
    """
    if not line.arguments:
        raise missing_argument(line.command)
    place, *words = line.arguments
    if place not in PLACES:
        raise CoveyError(f"there is no place {place!r}", want=", ".join(PLACES), fix=nearest(place, PLACES))
    start = next((n for n, word in enumerate(words) if word in VERBS and _is_command(words, n)), len(words))
    options = ["--processes" if word == "-n" else word for word in words[:start] if word != "--"]
    command = [word for word in words[start:] if word != "--"]
    most = 1 if command else ANY  # without a command the first word that is none is told
    before = read_line(line.command._replace(prefix_of=(), most=most), [place, *options])
    if not command:
        _require_verb(before)
    return _local(before, command) if place == "local" else _job(before, command)


def _require_verb(before: Line) -> None:
    """Refuse options without a command, such as a recipe alone.

    Raises:
        CoveyError: a word is neither an option nor the value of an option.
    """
    for word in before.arguments[1:2]:
        known = word in recipe.names() or Path(word).suffix in (".yaml", ".yml")
        command = f"{recipe.COMMANDS[recipe.kind_of(word).method]} {word}".removeprefix("covey ") if known else ""
        fix = f"covey launch {' '.join([before.arguments[0], *before.options, command])}"
        raise CoveyError(
            f"{word!r} is no command to launch",
            want=before.command.usage[0],
            fix=fix if known else nearest(word, VERBS),
        )


def _is_command(words: Sequence[str], n: int) -> bool:
    """Return whether word `n` begins the training command and is not the value of an option before it."""
    return n == 0 or not words[n - 1].startswith("--") or words[n - 1] in ("--", "--dry-run") or "=" in words[n - 1]


def _local(before: Line, words: Sequence[str]) -> Callable[[], int]:
    """Return the call that starts the command on this machine."""
    if "--dry-run" in before.options:
        raise CoveyError("--dry-run has no meaning for processes on this machine", fix="leave it out")
    options, command = build_settings(LocalOptions, before), training_command(words)
    if command.run is None:
        folder = str(new_run_folder(recipe.load_any(words[1])))
        command = replace(command, words=(*command.words, "--out", folder), run=folder)
    return partial(launch, command, options)


def _job(before: Line, words: Sequence[str]) -> Callable[[], None]:
    """Return the call that writes the job file of the command."""
    place, options = before.arguments[0], build_settings(JobOptions, before)
    if words and words[0] in NOT_IN_JOBS:
        what = f"{words[0]} {NOT_IN_JOBS[words[0]]}"
        raise CoveyError(
            f"covey {words[0]} is not launched on {place}",
            want=f"covey launch local … {words[0]}, or a training command",
            fix=f"COVEY_DISTRIBUTED=auto covey {what}, by the cluster's own command that starts processes",
        )
    job = JOBS[place]
    text = job.text(training_command(words), options)
    file = Path(options.file or job.file)
    if "--dry-run" in before.options:
        return partial(echo, text.rstrip("\n"), keep="\n")
    return partial(_write, file, text, job.submit)


def _write(file: Path, text: str, submit: str) -> None:
    try:
        with file.open("x") as out:  # which follows no link
            out.write(text)
    except FileExistsError:
        raise CoveyError("this file is already there", fix="--file ANOTHER, or remove it", where=str(file)) from None
    echo(f"wrote {file}; read it, then submit it with: {submit.format(file=shlex.quote(str(file)))}")
