"""Implement `covey push`: say what would be published, ask, and publish it on the Hugging Face hub."""

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from covey.cli.checks import check_source
from covey.cli.options import PushOptions
from covey.cli.words import join_pairs, split_exactly, take_switches
from covey.config import recipe, strict_yaml
from covey.config.overrides import apply
from covey.display import echo
from covey.errors import CoveyError
from covey.files import has_file
from covey.monitor.run_files import REPORT, RUN_FILES, RunFile

USAGE = "covey push RUN hf:org/name [--yes] [--private] [--samples] [--no-report]"
SWITCHES = ("--yes", "--private", "--samples", "--no-report")


def parse(words: Sequence[str]) -> Callable[[], int]:
    """Parse `covey push RUN hf:org/name [--yes] [--private] [--samples] [--no-report] [settings]`."""
    switches, words = take_switches(words, SWITCHES)
    (run, target), pairs = split_exactly(2, words, USAGE)
    found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)", target, re.ASCII)
    if not found:
        raise CoveyError(f"{target!r} names no repository", want="hf:org/name", fix=USAGE)
    options = strict_yaml.build(PushOptions, apply(PushOptions, strict_yaml.Item({}, run), join_pairs(pairs)))
    return partial(push, Path(run), found[1], switches, options, options.shard_bytes)


def push(run: Path, repository: str, switches: set[str], options: PushOptions, shard_bytes: int) -> int:
    """Publish `run` after asking; return the exit code: 0, or 2 if the user said no.

    Raises:
        CoveyError: it is no run with a checkpoint, the question cannot be asked, or the hub refuses.
    """
    if not recipe.is_run(run):
        raise CoveyError("this is no run folder: it has no recipe.yaml", want="the folder of a run", where=str(run))
    check_source(str(run))
    records = records_of(run, switches)
    for line in describe(run, repository, records, options.format):
        echo(line)
    if "--yes" not in switches and not _agrees():
        echo("nothing was published")
        return 2
    from covey.run.export import publish  # late: it needs JAX

    names = [file.name for file in records]
    publish(run, repository, names, "--private" in switches, options.format, options.dtype, shard_bytes)
    return 0


def records_of(run: Path, switches: set[str]) -> list[RunFile]:
    """Return the files of the run that are published beside the model; the report is written anew.

    Raises:
        ResumeError: one of them is a link.
    """
    chosen = {"always": True, "unless --no-report": "--no-report" not in switches}
    chosen |= {"with --samples": "--samples" in switches, "never": False}
    listed = [file for file in RUN_FILES if chosen[file.publish]]
    return [file for file in listed if has_file(run, file.name) or file.name == REPORT]


def describe(run: Path, repository: str, records: Sequence[RunFile], form: str) -> list[str]:
    """Return lines that say what would be published, and what is in it."""
    lines = [f"{run} would be published as hf:{repository}", f"  the trained model ({form}) and its card README.md"]
    lines += [f"  {file.name}: {file.content}" for file in records]
    data = [file.name for file in records if file.publish != "always"]
    if data:
        lines.append(f"text of your data and of the model becomes public, in {' and '.join(data)}")
        lines.append("  --no-report leaves the report out")
    return lines


def _agrees() -> bool:
    if not sys.stdin.isatty():
        raise CoveyError("nobody is there to be asked whether to publish this", fix="--yes, if that is meant")
    try:
        return input("publish this? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
