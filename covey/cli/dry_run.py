"""Implement `--dry-run` of `covey train` and `covey sft`: show what a run would do. Nothing is written and no update is
made; of the model only the header and the tokenizer are read.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.checks import check_run, new_run_folder
from covey.cli.words import join_pairs, list_recipes, split_exactly
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


def parse(kind: type[recipe.RecipeT], words: Sequence[str], as_json: bool) -> Callable[[], None]:
    """Parse the words beside --dry-run: NAME_OR_YAML [settings]."""
    usage = f"{recipe.COMMANDS[kind.method]} NAME_OR_YAML --dry-run"
    if "--resume" in words:
        raise CoveyError("--dry-run beside --resume", want=usage, fix="leave one of them out")
    if not words:
        raise CoveyError("no recipe is given", want=usage, fix=list_recipes(kind))
    (source,), pairs = split_exactly(1, words, usage)
    settings = join_pairs(pairs)
    return partial(dry_run, source, recipe.load(source, settings, kind), settings, as_json)


def dry_run(
    source: str, loaded: recipe.Recipe | recipe.SFTRecipe, settings: Sequence[str], as_json: bool = False
) -> None:
    """Print what a run of the recipe would do.

    Args:
        source: the recipe's name or file.
        loaded: the recipe with `settings`.
        settings: words of the command line that change it.
        as_json: print one line of JSON instead.

    Raises:
        CoveyError: the run would stop before its first step.
    """
    check_run(loaded)
    out = new_run_folder(loaded)
    resolved = list(resolve_settings(loaded, recipe.places_of(source, settings)))
    outline, found = _look_ahead(loaded)
    if as_json:
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
