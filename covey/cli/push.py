"""Execute `covey push`: list the files that would be published, ask, and publish them on the Hugging Face hub."""

import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path

from covey.cli.checks import check_source
from covey.cli.commands import ExportOptions
from covey.cli.parse import Line, build_settings
from covey.config import recipe
from covey.display import echo
from covey.errors import CoveyError
from covey.files import has_file
from covey.monitor.run_files import REPORT, RUN_FILES, RunFile


def push(line: Line) -> int:
    """Execute `covey push RUN hf:org/name`: publish the run after asking. Return 0, or 2 if the user said no.

    Raises:
        CoveyError: it is no run with a checkpoint, the question cannot be asked, or the hub refuses.
    """
    run, target = Path(line.arguments[0]), re.fullmatch(r"hf:([\w.-]+/[\w.-]+)", line.arguments[1], re.ASCII)
    if not target:
        what = f"{line.arguments[1]!r} names no repository"
        raise CoveyError(what, want="hf:org/name", fix=line.command.usage[0])
    options = build_settings(ExportOptions, line)
    shard_bytes = options.shard_bytes
    recipe.require_run(run)
    check_source(str(run))
    records = records_of(run, line.options)
    for text in describe(run, target[1], records, options.format):
        echo(text)
    if "--yes" not in line.options and not _agrees():
        echo("nothing was published")
        return 2
    from covey.run.export import publish  # late: it needs JAX

    names = [file.name for file in records]
    publish(run, target[1], names, "--private" in line.options, options.format, options.dtype, shard_bytes)
    return 0


def records_of(run: Path, switches: Container[str]) -> list[RunFile]:
    """Return the files of the run that are published beside the model; the report is written anew.

    Raises:
        ResumeError: one of them is a link.
    """
    published = {"always": True, "unless --no-report": "--no-report" not in switches}
    published |= {"with --samples": "--samples" in switches, "never": False}
    files = [file for file in RUN_FILES if published[file.publish]]
    return [file for file in files if has_file(run, file.name) or file.name == REPORT]


def describe(run: Path, repository: str, records: Sequence[RunFile], form: str) -> list[str]:
    """Return lines that name the files to be published and their contents."""
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
