"""Execute `covey train` and `covey sft`: begin a run, or resume one."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from covey.cli.checks import (
    check_not_model,
    check_run,
    has_checkpoint,
    new_run_folder,
    reserve_run_folder,
    resume_command,
)
from covey.cli.parse import Line, missing_argument
from covey.config import recipe
from covey.display import echo
from covey.errors import CoveyError
from covey.registry import offered


def train(line: Line) -> None:
    """Execute `covey train NAME_OR_YAML [--dry-run] [settings]` or `covey train --resume RUN [settings]`; `covey sft`
    takes the same words.
    """
    kind: Any = recipe.METHODS["sft" if line.command.name == "sft" else "rl"]  # one of the two
    folder = line.options.get("--resume")
    if "--dry-run" in line.options:
        offered("covey.switches", "dry-run")(kind, line)
    elif "--json" in line.options:
        raise CoveyError("--json without --dry-run", fix="leave it out: a run writes metrics.jsonl and summary.json")
    elif folder is not None:
        if line.arguments:
            raise CoveyError(
                f"--resume RUN and the recipe {line.arguments[0]}", fix="leave it out: a run keeps its recipe"
            )
        _resume(kind, folder, line.settings)
    elif line.arguments:
        check_not_model(line.arguments[0], kind)
        _begin(recipe.load(line.arguments[0], line.settings, kind))
    else:
        raise missing_argument(line.command)


def _begin(settings: recipe.Recipe | recipe.SFTRecipe) -> None:
    out = new_run_folder(settings)  # first: it takes less time than the other checks
    check_run(settings)
    from covey import run
    from covey.parallel import channel, distributed

    with distributed.start(), ExitStack() as stack:
        if distributed.is_first():
            out = stack.enter_context(reserve_run_folder(settings))
        out = channel.broadcast(out, "run folder")
        stack.enter_context(print_resume_command(settings.method, out))
        run.train(settings, out)


def _resume(kind: type[recipe.AnyRecipe], folder: str, changes: Sequence[str]) -> None:
    recipe.require_run(folder)
    if recipe.kind_of(folder) is not kind:
        raise CoveyError("this run was trained by the other command", fix=resume_command(folder), where=folder)
    if recipe.load_any(folder, changes).out != recipe.load_any(folder).out:
        raise CoveyError("--out beside --resume", fix="leave it out: a run goes on in its own folder", where=folder)
    from covey import run
    from covey.parallel import distributed

    with distributed.start(), print_resume_command(kind.method, Path(folder)):
        run.resume(Path(folder), changes)


@contextmanager
def print_resume_command(method: str, run: Path) -> Iterator[None]:
    """Print the command that resumes `run` if the context is interrupted after a checkpoint. The path in it is relative
    to the working directory at the start.
    """
    here = Path.cwd()
    try:
        yield
    except KeyboardInterrupt:
        if has_checkpoint(here / run):
            echo(f"\ngo on with: {recipe.COMMANDS[method]} --resume {run}", keep="\n", file=sys.stderr)
        raise
