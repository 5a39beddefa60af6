"""Implement the command `covey`: arguments in, a call of `covey.run` out.

`parse` turns the arguments into a call without making it; it reads recipes but imports nothing that needs JAX, so help
and errors appear at once. Exit codes: 0 done, 1 a bug in Covey (with its traceback), 2 a mistake in the user's input,
75 a run was stopped by a signal and can resume from a checkpoint, 130 stopped with Ctrl-C, 143 by SIGTERM, without a
checkpoint to resume from.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from covey import __version__
from covey.cli import help
from covey.cli.checks import (
    check_not_recipe,
    check_run,
    check_source,
    has_checkpoint,
    new_run_folder,
    refuse_model,
    refuse_processes,
    reserve_run_folder,
    resume_command,
)
from covey.cli.options import ChatOptions, ExportOptions, GenerateOptions, OptionsT, ReportOptions
from covey.cli.words import join_pairs, list_recipes, parse_count, split_exactly, take_options, take_switches
from covey.config import recipe, strict_yaml
from covey.config.overrides import apply, split
from covey.config.processes import LAUNCHER, PEER_LOST
from covey.display import printable
from covey.errors import CoveyError, Stopped, nearest

Action = Callable[[], int | None]
"""Call that a command line describes. It returns the exit code; None is success."""

_ANOTHER_PLACE = "another place (--out FOLDER says where a run or an export goes), or the right to read and write there"
_ROOM = "make room; a run that has a checkpoint goes on with --resume"
OUTSIDE: dict[int | None, str] = {
    errno.EROFS: _ANOTHER_PLACE,
    errno.EACCES: _ANOTHER_PLACE,
    errno.EPERM: _ANOTHER_PLACE,
    errno.ENOTDIR: "another path: one of its folders is a file",
    errno.EISDIR: "another path, or move the folder: a file is needed there",
    errno.ENAMETOOLONG: "a shorter name",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
}
"""Fixes for system errors that are not caused by a bug in Covey; the others keep their traceback."""

DEFAULT_EPISODES = 4
"""Number of episodes that `covey rollout` plays."""

STOPPED = 75
"""Exit code of a run that was stopped by a signal: EX_TEMPFAIL of sysexits.h, try again later."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (the process's own when not given); return the exit code."""
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # characters that the terminal's encoding lacks are escaped instead of raising
        sys.stdout.reconfigure(errors="backslashreplace")
    if LAUNCHER in os.environ:
        from covey.launch.local import stop_with_launcher  # late: other processes need it not

        stop_with_launcher(os.environ)
    try:
        code = parse(sys.argv[1:] if words is None else words)()
        sys.stdout.flush()
        return code or 0
    except CoveyError as error:
        print(printable(str(error), keep="\n"), file=sys.stderr)
        peer: Stopped | None = getattr(error, "stopped", None)
        code = error.exit_code if peer is None else _code_of(peer)
        if code == PEER_LOST:
            _leave(code)
        return code
    except Stopped as stopped:
        what = "nothing is saved" if stopped.step is None else f"step {stopped.step} is saved"
        print(f"\nstopped by {stopped.signal}; {what}", file=sys.stderr)
        code = _code_of(stopped)
        return _end_process(code) if words is None else code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return _end_process(130) if words is None else 130
    except BrokenPipeError:  # the pipe was closed, as in `covey recipes | head`; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        shown = CoveyError(str(error.strerror), fix=OUTSIDE[error.errno], where=str(error.filename or ""))
        print(printable(str(shown), keep="\n"), file=sys.stderr)
        return 2


def _code_of(stopped: Stopped) -> int:
    return 128 + signal.Signals[stopped.signal] if stopped.step is None else STOPPED


def _end_process(code: int) -> int:
    """End the process with `code` without interpreter shutdown: a program that JAX is compiling when a signal comes
    continues to compile in a thread, which would crash when JAX is torn down.

    With several processes each shuts down normally, because they wait for each other; there `code` is returned.
    """
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    if "jax" not in sys.modules or sys.modules["jax"].distributed.is_initialized():
        return code
    os._exit(code)


def _leave(code: int) -> None:
    """End the process now if another one of the run is lost: JAX's shutdown would wait for it."""
    from covey.parallel import liveness

    liveness.leave(code)


def parse(words: Sequence[str]) -> Action:
    """Return the call that `words` describe, without making it.

    Raises:
        CoveyError: an unknown command, recipe or setting, or a missing or extra argument.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        return _parse_help(words[1:])
    if words[0] == "--version":
        return partial(print, f"covey {__version__}\n", end="")
    name, rest = words[0], list(words[1:])
    if name not in COMMANDS:
        raise CoveyError(f"there is no command {name!r}", fix=nearest(name, COMMANDS))
    before_dashes = rest[: rest.index("--")] if "--" in rest else rest
    if {"-h", "--help"} & set(before_dashes):
        return partial(help.show, name, rest)
    if any(word.startswith("--") for word in before_dashes) and name != "launch":  # which has those of its command too
        from covey.cli.completion import check_flags  # late: it reads the tables of all commands

        check_flags(name, before_dashes)
    return COMMANDS[name](rest)


def _parse_help(words: Sequence[str]) -> Action:
    """Parse the words after `covey --help`: a command, or a topic of the settings of `covey train`."""
    if not words:
        return partial(print, help.OVERVIEW, end="")
    if words[0] in COMMANDS:
        return partial(help.show, words[0], ["--help", *words[1:]])
    return partial(help.show, "train", ["--help", *words])


def _parse_training(kind: type[recipe.RecipeT], words: Sequence[str]) -> Action:
    """Parse `covey train` or `covey sft`: NAME_OR_YAML [--dry-run] [settings], or --resume RUN [settings]."""
    switches, words = take_switches(words, ("--dry-run", "--json"))
    if "--dry-run" in switches:
        from covey.cli import dry_run  # late: a run does not need it

        return dry_run.parse(kind, words, "--json" in switches)
    if switches:
        raise CoveyError("--json without --dry-run", fix="leave it out: a run writes metrics.jsonl and summary.json")
    names, pairs = split(words, 1)
    flags = dict(pairs)
    if "--resume" in flags:
        if names:
            raise CoveyError(f"--resume RUN and the recipe {names[0]}", fix="leave it out: a run keeps its recipe")
        return partial(_resume, kind, flags["--resume"], join_pairs(pair for pair in pairs if pair[0] != "--resume"))
    if not names:
        usage = f"{recipe.COMMANDS[kind.method]} NAME_OR_YAML"
        raise CoveyError("no recipe is given to train", want=usage, fix=list_recipes(kind))
    refuse_model(names[0], kind)
    return partial(_train, recipe.load(names[0], join_pairs(pairs), kind))


def evaluate(words: Sequence[str]) -> Action:
    """Parse `covey eval RUN_OR_MODEL [--recipe NAME] [settings]`."""
    (source,), pairs = split_exactly(1, words, "covey eval RUN_OR_MODEL [--recipe NAME]")
    chosen = dict(pairs).get("--recipe")
    tokens = join_pairs(pair for pair in pairs if pair[0] != "--recipe")
    settings = recipe.load_any(chosen, tokens) if chosen else None
    return partial(_evaluate, source, settings, tokens)


def rollout(words: Sequence[str]) -> Action:
    """Parse `covey rollout NAME_OR_YAML [--episodes N] [settings]`."""
    (source,), pairs = split_exactly(1, words, "covey rollout NAME_OR_YAML [--episodes N]")
    own = {name: value for name, value in pairs if name == "--episodes"}
    tokens = join_pairs(pair for pair in pairs if pair[0] not in own)
    return partial(_rollout, recipe.load(source, tokens), parse_count(own, "--episodes") or DEFAULT_EPISODES)


def generate(words: Sequence[str]) -> Action:
    """Parse `covey generate RUN_OR_MODEL "prompt" [settings]`."""
    if len(words) == 1:  # a recipe is the mistake, and not the prompt that is missing
        check_not_recipe(words[0])
    (source, prompt), pairs = split_exactly(2, words, 'covey generate RUN_OR_MODEL "PROMPT"')
    return partial(_generate, source, prompt, _options(GenerateOptions, source, pairs))


def chat(words: Sequence[str]) -> Action:
    """Parse `covey chat RUN_OR_MODEL [settings]`."""
    (source,), pairs = split_exactly(1, words, "covey chat RUN_OR_MODEL")
    return partial(_chat, source, _options(ChatOptions, source, pairs))


def export(words: Sequence[str]) -> Action:
    """Parse `covey export RUN_OR_MODEL --out FOLDER [settings]`."""
    usage = "covey export RUN_OR_MODEL --out FOLDER [--format hf|peft|gguf]"
    (source,), pairs = split_exactly(1, words, usage)
    options = strict_yaml.build(ExportOptions, apply(ExportOptions, strict_yaml.Item({}, source), join_pairs(pairs)))
    if options.out is None:
        raise CoveyError("no folder is given to export to", want=usage)
    if options.format == "peft" and options.dtype:
        raise CoveyError("--dtype has no meaning for adapters: they are written in float32", fix="leave it out")
    return partial(_export, source, Path(options.out).expanduser(), options, options.shard_bytes)


def plan(words: Sequence[str]) -> Action:
    """Parse `covey plan NAME_OR_YAML [--on MACHINE] [--json] [--here] [--quick] [settings]`."""
    from covey.plan.machines import parse_target  # late, here and below: no other command needs it

    switches, words = take_switches(words, ("--json", "--here", "--quick"))
    if {"--quick", "--here"} <= switches:
        raise CoveyError("--quick beside --here", want="one of them", fix="leave --quick out to run two steps")
    (source,), pairs = split_exactly(1, words, "covey plan NAME_OR_YAML [--on MACHINE]")
    own, pairs = take_options(pairs, ("--on", "--prompt-tokens", "--completion-tokens"))
    tokens = join_pairs(pairs)
    lengths = tuple(parse_count(own, name) for name in ("--prompt-tokens", "--completion-tokens"))
    target = parse_target(own.get("--on", "cpu"))
    settings = recipe.load_any(source, tokens)
    return partial(_plan, source, settings, tokens, target, lengths, switches)


def report(words: Sequence[str]) -> Action:
    """Parse `covey report RUN [RUN ...] [--out FILE]`."""
    runs, pairs = split(words, len(words))
    if not runs:
        raise CoveyError("no run is given to report on", want="covey report RUN [RUN ...] [--out FILE]")
    options = apply(ReportOptions, strict_yaml.Item({}, "covey report"), join_pairs(pairs))
    return partial(_report, [Path(run) for run in runs], strict_yaml.build(ReportOptions, options).out)


def watch(words: Sequence[str]) -> Action:
    """Parse `covey watch RUN [--once] [--json]`."""
    switches, words = take_switches(words, ("--once", "--json"))
    (run,), pairs = split_exactly(1, words, "covey watch RUN [--once] [--json]")
    if pairs:
        raise CoveyError(f"watch has no setting {pairs[0][0]}", want="covey watch RUN [--once] [--json]")
    return partial(_watch, Path(run).expanduser(), switches)


def launch(words: Sequence[str]) -> Action:
    """Parse `covey launch PLACE [options] train NAME_OR_YAML [settings]`."""
    from covey.cli import launch  # late: no other command needs it

    return launch.parse(words)


def compare(words: Sequence[str]) -> Action:
    """Parse `covey compare RUN RUN [RUN ...] [--json]`."""
    from covey.cli import compare  # late: no other command needs it

    return compare.parse(words)


def push(words: Sequence[str]) -> Action:
    """Parse `covey push RUN hf:org/name [--yes] [--private]`."""
    from covey.cli import push  # late: no other command needs it

    return push.parse(words)


def recipes(words: Sequence[str]) -> Action:
    """Parse `covey recipes [NAME]`, `covey recipes copy NAME FILE` and `covey recipes --json`."""
    usage = "covey recipes [NAME], covey recipes copy NAME FILE, or covey recipes --json"
    switches, words = take_switches(words, ("--json",))
    if words[:1] == ["copy"]:
        (_, name, file), _ = split_exactly(3, words, "covey recipes copy NAME FILE")
        return partial(_copy_recipe, name, Path(file).expanduser())
    names, pairs = split(words, 1)
    if pairs:
        raise CoveyError(f"recipes has no setting {pairs[0][0]}", want=usage)
    if switches:
        return help.print_recipes_as_json
    if names:
        return partial(print, printable(recipe.text_to_copy(names[0]), keep="\n\t"), end="")
    return help.show_recipes


def validate(words: Sequence[str]) -> Action:
    """Parse `covey validate NAME_OR_YAML [--json] [settings]`."""
    from covey.cli import validate  # late: no other command needs it

    return validate.parse(words)


def rewards(words: Sequence[str]) -> Action:
    """Parse `covey rewards NAME_OR_YAML [--samples FILE] [--prompts N] [--json] [settings]`."""
    from covey.cli import rewards  # late: no other command needs it

    return rewards.parse(words)


def completion(words: Sequence[str]) -> Action:
    """Parse `covey completion bash|zsh|fish`."""
    from covey.cli import completion  # late: no other command needs it

    return completion.parse(words)


def doctor(words: Sequence[str]) -> Action:
    """Parse `covey doctor`."""
    split_exactly(0, words, "covey doctor")

    from covey.cli import doctor  # late: no other command needs it

    return doctor.examine


def _train(settings: recipe.Recipe | recipe.SFTRecipe) -> None:
    out, here = new_run_folder(settings), Path.cwd()  # first: it takes less time than the other checks
    check_run(settings)
    from covey import run
    from covey.parallel import distributed

    try:
        with distributed.start(), ExitStack() as stack:
            if distributed.is_first():
                out = stack.enter_context(reserve_run_folder(settings))
            out = distributed.agreed(out, "run folder")
            if isinstance(settings, recipe.SFTRecipe):
                run.train_sft(settings, out)
            else:
                run.train(settings, out)
    except KeyboardInterrupt:
        _print_resume_command(type(settings), out, here)
        raise


def _print_resume_command(kind: type[recipe.AnyRecipe], run: Path, here: Path) -> None:
    """Print the command that resumes `run`, with a path relative to `here`, the working directory at the start."""
    if has_checkpoint(here / run):
        command = f"{recipe.COMMANDS[kind.method]} --resume {run}"
        print(printable(f"\ngo on with: {command}", keep="\n"), file=sys.stderr)


def _resume(kind: type[recipe.RecipeT], folder: str, changes: Sequence[str]) -> None:
    if not recipe.is_run(folder):
        raise CoveyError("this is no run folder: it has no recipe.yaml", want="the folder of a run", where=folder)
    if recipe.kind_of(folder) is not kind:
        raise CoveyError("this run was trained by the other command", fix=resume_command(folder), where=folder)
    if recipe.load(folder, changes, kind).out != recipe.load(folder, (), kind).out:
        raise CoveyError("--out beside --resume", fix="leave it out: a run goes on in its own folder", where=folder)
    here = Path.cwd()
    from covey import run
    from covey.parallel import distributed

    try:
        with distributed.start():
            if kind is recipe.SFTRecipe:
                run.resume_sft(Path(folder), changes)
            else:
                run.resume(Path(folder), changes)
    except KeyboardInterrupt:
        _print_resume_command(kind, Path(folder), here)
        raise


def _evaluate(source: str, settings: recipe.Recipe | recipe.SFTRecipe | None, tokens: Sequence[str]) -> None:
    check_source(source)
    if settings is None and not recipe.is_run(source):
        raise CoveyError(
            f"no recipe is given to evaluate {source} on", want="covey eval MODEL --recipe NAME", fix=list_recipes()
        )
    settings = settings or recipe.load_any(source, tokens)
    check_run(settings)
    from covey import run
    from covey.parallel import distributed

    with distributed.start():
        if isinstance(settings, recipe.SFTRecipe):
            run.evaluate_sft(source, settings)
        else:
            run.evaluate(source, settings)


def _rollout(settings: recipe.Recipe, episodes: int) -> None:
    refuse_processes("covey rollout")
    check_run(settings)
    from covey import run

    run.play(settings, episodes)


def _generate(source: str, prompt: str, options: GenerateOptions) -> None:
    refuse_processes("covey generate")
    check_source(source)
    from covey import run

    answers = run.generate(source, prompt, options.n, options.rollout)
    for number, text in enumerate(answers, start=1):
        print(f"--- {number} of {len(answers)}" if len(answers) > 1 else "", end="\n" if len(answers) > 1 else "")
        print(printable(text, keep="\n\t"))


def _chat(source: str, options: ChatOptions) -> None:
    refuse_processes("covey chat")
    check_source(source)
    from covey import run

    run.chat(source, options.rollout)


def _export(source: str, out: Path, options: ExportOptions, shard_bytes: int) -> None:
    check_source(source)
    from covey import run
    from covey.parallel import distributed

    with distributed.start():
        run.export(source, out, options.format, options.dtype, shard_bytes)


def _plan(
    source: str,
    settings: recipe.Recipe | recipe.SFTRecipe,
    tokens: Sequence[str],
    target: Any,
    lengths: Any,
    switches: set[str],
) -> None:
    check_source(settings.model.source)
    from covey.plan import command

    chosen = {name: f"--{name}" in switches for name in ("here", "quick")}
    command.plan(source, tokens, target, lengths, as_json="--json" in switches, **chosen)


def _report(runs: Sequence[Path], out: str | None) -> None:
    from covey.report import REPORT, write_report  # late: it needs NumPy

    file = Path(out).expanduser() if out else runs[0] / REPORT if len(runs) == 1 else Path(REPORT)
    size = write_report(file, runs)
    print(printable(f"{file} ({size / 1e6:.1f} MB): open it in a browser; it needs no network"))
    print("it holds prompts and completions of the run: to publish it is to publish them")


def _watch(run: Path, switches: set[str]) -> int:
    from covey.cli.watch import watch  # late: it needs rich

    return watch(run, once="--once" in switches, as_json="--json" in switches)


def _copy_recipe(name: str, file: Path) -> None:
    text = recipe.text_to_copy(name)
    try:
        with file.open("x", encoding="utf-8") as out:  # a file that exists is never replaced
            out.write(text)
    except FileExistsError:
        raise CoveyError("something is already here", want="a new file", where=str(file)) from None
    except FileNotFoundError:
        raise CoveyError("there is no such folder", fix=f"mkdir -p {file.parent}", where=str(file.parent)) from None
    command = recipe.COMMANDS[recipe.kind_of(file).method]
    print(printable(f"{file}: change it, then {command} {file}"))


def _options(cls: type[OptionsT], source: str, pairs: Sequence[tuple[str, str]]) -> OptionsT:
    """Build `cls` with the rollout settings of the run at `source`, if it is one, overridden by `pairs`."""
    item = strict_yaml.Item({}, source)
    if recipe.is_run(source):
        item = recipe.section_of(source, "rollout")
    item = apply(cls, item, join_pairs(pairs), recipe.HIDDEN)
    return strict_yaml.build(cls, item)


COMMANDS: dict[str, Callable[[Sequence[str]], Action]] = {
    "train": partial(_parse_training, recipe.Recipe),
    "sft": partial(_parse_training, recipe.SFTRecipe),
    "eval": evaluate,
    "rollout": rollout,
    "generate": generate,
    "chat": chat,
    "export": export,
    "validate": validate,
    "rewards": rewards,
    "plan": plan,
    "report": report,
    "watch": watch,
    "launch": launch,
    "compare": compare,
    "push": push,
    "recipes": recipes,
    "completion": completion,
    "doctor": doctor,
}
