"""Parse `covey launch`: options, then a training command behind them."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from covey.cli.checks import new_run_folder
from covey.cli.parse import Line
from covey.config import recipe, strict_yaml
from covey.config.overrides import apply, split
from covey.display import echo
from covey.errors import CoveyError, nearest
from covey.launch import JOBS, JobOptions, LocalOptions, launch
from covey.launch.command import VERBS, training_command

OptionsT = TypeVar("OptionsT", LocalOptions, JobOptions)
USAGE = "covey launch local|slurm|k8s|tpu-vm|skypilot [--option value ...] train NAME_OR_YAML [--setting value ...]"
NOT_IN_JOBS = {"eval": "RUN", "export": "RUN --out FOLDER"}
"""Command of several processes that no job file is written for → the words that it needs."""


def launch_command(line: Line) -> int | None:
    """Execute `covey launch PLACE [options] train NAME_OR_YAML [settings]`."""
    return parse(line.arguments)()


def parse(words: Sequence[str]) -> Callable[[], int | None]:
    """Return the call that the words behind `covey launch` describe.

    Raises:
        CoveyError: an unknown place or option, or a training command that would be refused.
    """
    if not words:
        raise CoveyError("no place is given to launch on", want=USAGE)
    place, *rest = words
    if place != "local" and place not in JOBS:
        raise CoveyError(f"there is no place {place!r}", want=USAGE, fix=nearest(place, ("local", *JOBS)))
    start = next((n for n, word in enumerate(rest) if word in VERBS and _is_command(rest, n)), len(rest))
    options, command = rest[:start], [word for word in rest[start:] if word != "--"]
    if not command:
        _require_verb(place, options)
    dry_run = "--dry-run" in options
    if place == "local":
        return _local(_build(LocalOptions, options), command)
    return _job(place, _build(JobOptions, [word for word in options if word != "--dry-run"]), command, dry_run)


def _require_verb(place: str, options: Sequence[str]) -> None:
    """Refuse words without a command behind the options, such as a recipe alone.

    Raises:
        CoveyError: there is a word that is neither an option nor the value of one.
    """
    words = [word for word in options if word != "--dry-run"]
    for word in split(words, len(words))[0][:1]:
        known = word in recipe.names() or Path(word).suffix in (".yaml", ".yml")
        command = f"{recipe.COMMANDS[recipe.kind_of(word).method]} {word}".removeprefix("covey ") if known else ""
        switches = ["--dry-run"] if "--dry-run" in options else []
        fix = f"covey launch {' '.join([place, *switches, command])}" if known else nearest(word, VERBS)
        raise CoveyError(f"{word!r} is no command to launch", want=USAGE, fix=fix)


def _is_command(words: Sequence[str], n: int) -> bool:
    """Return whether word `n` begins the training command and is not the value of an option before it."""
    return n == 0 or not words[n - 1].startswith("--") or words[n - 1] in ("--", "--dry-run") or "=" in words[n - 1]


def _build(cls: type[OptionsT], words: Sequence[str]) -> OptionsT:
    _, pairs = split(
        [word.replace("-n", "--processes", 1) if word == "-n" else word for word in words if word != "--"], 0
    )
    item = apply(cls, strict_yaml.Document(), [f"{flag}={value}" for flag, value in pairs])
    return strict_yaml.build(cls, item)


def _local(options: LocalOptions, words: Sequence[str]) -> Callable[[], int]:
    command = training_command(words)
    if command.run is None:
        folder = str(new_run_folder(recipe.load_any(words[1])))
        command = replace(command, words=(*command.words, "--out", folder), run=folder)
    return partial(launch, command, options)


def _job(place: str, options: JobOptions, words: Sequence[str], dry_run: bool) -> Callable[[], None]:
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
    return partial(echo, text.rstrip("\n"), keep="\n") if dry_run else partial(_write, file, text, job.submit)


def _write(file: Path, text: str, submit: str) -> None:
    try:
        with file.open("x") as out:  # which follows no link
            out.write(text)
    except FileExistsError:
        raise CoveyError("this file is already there", fix="--file ANOTHER, or remove it", where=str(file)) from None
    echo(f"wrote {file}; read it, then submit it with: {submit.format(file=shlex.quote(str(file)))}")
