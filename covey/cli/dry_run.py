"""Execute `--dry-run` of `covey train` and `covey sft`, and `covey plan`: show what a run would do and need.

Nothing is written and no update is made; of the model a dry run reads only the header and the tokenizer.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.checks import check_run, check_source, new_run_folder
from covey.cli.parse import Line, missing_argument
from covey.config import recipe
from covey.config.recipe import ResolvedSetting, resolve_settings
from covey.display import echo
from covey.errors import CoveyError

if TYPE_CHECKING:
    from covey.plan.outline import Outline
    from covey.run.preview import Preview  # late in what follows: it needs JAX, and mistakes are answered without

MAX_TOKENS_SHOWN = 48
"""Number of tokens of the first prompt on the terminal; the JSON has all."""
LIMITS = "arrays that are held; the temporary memory of the programs comes on top"
"""Description of the memory that is shown."""


def dry_run(kind: type[recipe.RecipeT], line: Line) -> None:
    """Print what a run of the recipe would do.

    Raises:
        CoveyError: the run would stop before its first step.
    """
    if "--resume" in line.options:
        raise CoveyError("--dry-run beside --resume", want=line.command.usage[0], fix="leave one of them out")
    if not line.arguments:
        raise missing_argument(line.command)
    (source,) = line.arguments
    loaded = recipe.load(source, line.settings, kind)
    check_run(loaded)
    out = new_run_folder(loaded)
    resolved = list(resolve_settings(loaded, recipe.places_of(source, line.settings)))
    outline, found = _look_ahead(loaded)
    if "--json" in line.options:
        from covey.run.preview import preview_to_json

        listed = [one._asdict() for one in resolved]
        held = {"bytes": outline.memory["actor"], "what": LIMITS, "left_out": outline.left_out}
        held |= {"bytes_of_rollout": outline.memory["rollout"]} if "rollout" in outline.memory else {}
        echo(json.dumps({"settings": listed, **preview_to_json(found), "memory": held, "out": str(out)}))
        return
    _print_settings(resolved)
    _print_prompt(found)
    _print_size(loaded, found)
    _print_memory(outline, source)
    _print_files(out, found, outline)


def _look_ahead(loaded: recipe.Recipe | recipe.SFTRecipe) -> tuple["Outline", "Preview"]:
    from covey.plan.command import prepare_environment  # late, here and below: JAX comes after its environment
    from covey.plan.machines import parse_target

    target = parse_target("cpu")
    prepare_environment(target)

    from covey.plan.plan import outline_for
    from covey.run.preview import preview

    found = preview(loaded)
    return outline_for(loaded, target), found


def _print_settings(resolved: Sequence[ResolvedSetting]) -> None:
    echo("settings")
    for name, value, origin in resolved:
        echo(f"  {name:<42} {_shown(value):<28} {origin}")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _print_prompt(found: "Preview") -> None:
    ids = " ".join(map(str, found.tokens[:MAX_TOKENS_SHOWN]))
    more = " …" if len(found.tokens) > MAX_TOKENS_SHOWN else ""
    echo(f"\nfirst prompt, {len(found.tokens)} tokens: {ids}{more}", keep="\n")
    _print_indented(found.prompt)
    if found.completion is not None:
        echo("its completion, which is learnt")
        _print_indented(found.completion)


def _print_indented(text: str) -> None:
    for line in text.splitlines():
        echo(f"  | {line}")


def _print_size(loaded: recipe.Recipe | recipe.SFTRecipe, found: "Preview") -> None:
    unfit = "".join(f", {count} {what}" for what, count in found.unfit.items() if count)
    echo(f"\ndata      {found.rows:,} training rows{unfit}; {found.held_out:,} held out", keep="\n")
    echo("step      " + "; ".join(f"{name} {count:,}" for name, count in found.budget.items()))
    limit, epochs = loaded.training.max_steps, loaded.training.num_epochs
    echo(
        f"steps     {found.steps:,}: {'training.max_steps' if limit else f'training.num_epochs {epochs} over the data'}"
    )


def _print_memory(outline: "Outline", source: str) -> None:
    from covey.plan.outline import memory_lines

    for name, line in zip(("memory", ""), memory_lines(outline), strict=False):
        echo(f"{name:<10}{line}")
    echo(f"          {LIMITS}: covey plan {source} compiles them and gives the peak")


def _print_files(out: Path, found: "Preview", outline: "Outline") -> None:
    from covey.plan.outline import disk_line

    echo(f"files     {out}: {' '.join(found.files)}")
    echo(f"          {disk_line(outline)}")
    echo("nothing was written")


def plan(line: Line) -> None:
    """Execute `covey plan NAME_OR_YAML [--on MACHINE] [--json] [--here] [--quick] [settings]`."""
    from covey.plan.machines import parse_target

    if {"--quick", "--here"} <= line.options.keys():
        raise CoveyError("--quick beside --here", want="one of them", fix="leave --quick out to run two steps")
    lengths = line.whole_number("--prompt-tokens"), line.whole_number("--completion-tokens")
    target = parse_target(line.options.get("--on", "cpu"))
    check_source(recipe.load_any(line.arguments[0], line.settings).model.source)
    from covey.plan import command

    chosen = {name: f"--{name}" in line.options for name in ("here", "quick")}
    command.plan(line.arguments[0], line.settings, target, lengths, as_json="--json" in line.options, **chosen)
