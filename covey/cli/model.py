"""Execute the commands that use a model without training it: eval, generate, chat, export and push."""

import re
import sys
from collections.abc import Container, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from covey.cli.checks import check_not_recipe, check_one_process, check_run, check_source
from covey.cli.commands import ChatOptions, ExportOptions, GenerateOptions
from covey.cli.parse import Line, build_settings, list_recipes, missing_argument
from covey.config import recipe
from covey.config.schema import ModelOptions
from covey.display import echo
from covey.errors import CoveyError
from covey.files import has_file
from covey.monitor.run_files import REPORT, RUN_FILES, RunFile


def evaluate(line: Line) -> None:
    """Execute `covey eval RUN_OR_MODEL [--recipe NAME] [settings]`."""
    (source,) = line.arguments
    chosen = line.options.get("--recipe") or (source if recipe.is_run(source) else None)
    settings = recipe.load_any(chosen, line.settings) if chosen else None
    check_source(source)
    if settings is None:
        raise CoveyError(
            f"no recipe is given to evaluate {source} on",
            want="covey eval MODEL --recipe NAME",
            fix=list_recipes(line.command),
        )
    if recipe.is_run(source):
        _check_own_model(source, recipe.load_any(str(chosen)).model, settings.model)
    check_run(replace(settings, model=ModelOptions(source=source)))  # that of the recipe is not loaded
    from covey import run
    from covey.parallel import distributed

    with distributed.start():
        run.evaluate(source, settings)


def _check_own_model(run: str, recorded: ModelOptions, wanted: ModelOptions) -> None:
    """Refuse other settings of the model than the recipe's: a run is loaded as its own recipe says, on any mesh."""
    before, after = (recipe.flatten(asdict(options), "model.") for options in (recorded, wanted))
    changed = [name for name, value in after.items() if value != before[name] and not name.startswith("model.mesh.")]
    if changed:
        raise CoveyError(
            f"{', '.join(changed)} beside a run, which is loaded as its own recipe says",
            fix=f"leave it out; or write the model with covey export {run} --out FOLDER, and evaluate that",
            where=run,
        )


def generate(line: Line) -> None:
    """Execute `covey generate RUN_OR_MODEL "PROMPT" [settings]`."""
    source = line.arguments[0]
    if len(line.arguments) == 1:
        check_not_recipe(source)  # it is the mistake, and not the prompt that is missing
        raise missing_argument(line.command)
    options = build_settings(GenerateOptions, line, source)
    check_one_process("covey generate")
    check_source(source)
    from covey import run

    answers = run.generate(source, line.arguments[1], options.n, options.rollout)
    for number, text in enumerate(answers, start=1):
        if len(answers) > 1:
            echo(f"--- {number} of {len(answers)}")
        echo(text, keep="\n\t")


def chat(line: Line) -> None:
    """Execute `covey chat RUN_OR_MODEL [settings]`."""
    (source,) = line.arguments
    options = build_settings(ChatOptions, line, source)
    check_one_process("covey chat")
    check_source(source)
    from covey import run

    run.chat(source, options.rollout)


def export(line: Line) -> None:
    """Execute `covey export RUN_OR_MODEL --out FOLDER [settings]`."""
    (source,), options = line.arguments, build_settings(ExportOptions, line)
    if "--out" not in line.options:
        raise CoveyError("no folder is given to export to", want=line.command.synopsis)
    if options.format == "peft" and options.dtype:
        raise CoveyError("--dtype has no meaning for adapters: they are written in float32", fix="leave it out")
    shard_bytes = options.shard_bytes
    check_source(source)
    from covey import run
    from covey.parallel import distributed

    with distributed.start():
        run.export(source, Path(line.options["--out"]).expanduser(), options.format, options.dtype, shard_bytes)


def push(line: Line) -> int:
    """Execute `covey push RUN hf:org/name`: publish the run after asking. Return 0, or 2 if the user said no.

    Raises:
        CoveyError: it is no run with a checkpoint, the question cannot be asked, or the hub refuses.
    """
    run, target = Path(line.arguments[0]), re.fullmatch(r"hf:([\w.-]+/[\w.-]+)", line.arguments[1], re.ASCII)
    if not target:
        raise CoveyError(f"{line.arguments[1]!r} names no repository", want="hf:org/name", fix=line.command.usage[0])
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
