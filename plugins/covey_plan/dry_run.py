"""Execute `--dry-run` of `covey train` and `covey sft`: show what a run would do and need.

Nothing is written and no update is made; of the model a dry run reads only the header and the tokenizer.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from covey.cli.checks import check_run, new_run_folder
from covey.cli.parse import Line, missing_argument
from covey.config import recipe, strict_yaml
from covey.config.algorithms import PRESETS, algorithm_of
from covey.config.overrides import apply
from covey.display import echo, show_log
from covey.errors import CoveyError

if TYPE_CHECKING:
    from covey_plan.memory import Outline
    from covey_plan.preview import Preview  # late in what follows: it needs JAX, and mistakes are answered without

MAX_TOKENS_SHOWN = 48
"""Number of tokens of the first prompt on the terminal; the JSON has all."""
DEFAULT = "default"
"""Origin of a setting that nothing sets."""
LIMITS = "arrays that are held; the temporary memory of the programs comes on top"
"""Description of the memory that is shown."""


class ResolvedSetting(NamedTuple):
    """One setting: its dotted name, the value that the run uses, and where that value comes from."""

    name: str
    value: Any
    origin: str


def dry_run(kind: type[recipe.RecipeT], line: Line) -> None:
    """Print the plan of a run of the recipe.

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
    settings = list(resolve_settings(loaded, places_of(kind, source, line.settings)))
    outline, preview = _look_ahead(loaded)
    if "--json" in line.options:
        from covey_plan.preview import preview_to_json

        memory = {"bytes": outline.memory["actor"], "what": LIMITS, "left_out": outline.not_counted}
        memory |= {"bytes_of_rollout": outline.memory["rollout"]} if "rollout" in outline.memory else {}
        result = {"settings": [setting._asdict() for setting in settings], **preview_to_json(preview)}
        echo(json.dumps(result | {"memory": memory, "out": str(out)}))
        return
    files = f"files     {out}: {' '.join(preview.files)}"
    for text in chain(_settings(settings), _data(loaded, preview), _resources(source, files, outline)):
        echo(text)


def _look_ahead(loaded: recipe.Recipe | recipe.SFTRecipe) -> tuple["Outline", "Preview"]:
    from covey_plan.command import prepare_environment  # late, here and below: JAX comes after its environment
    from covey_plan.machines import parse_target

    target = parse_target("cpu")
    prepare_environment(target)

    from covey_plan.plan import outline_for
    from covey_plan.preview import preview

    with show_log(info=lambda text: None, warning=lambda text: echo(text, file=sys.stderr)):
        data = preview(loaded)  # first: it takes less time to find what would stop the run
    return outline_for(loaded, target), data


def _settings(settings: Sequence[ResolvedSetting]) -> Iterator[str]:
    """Yield the settings with their origin, line by line."""
    yield "settings"
    for name, value, origin in settings:
        text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
        yield f"  {name:<42} {text:<28} {origin}"


def _data(loaded: recipe.Recipe | recipe.SFTRecipe, preview: "Preview") -> Iterator[str]:
    """Yield the first prompt, with its completion if that is learnt, and the sizes of data, steps and run."""
    ids = " ".join(map(str, preview.tokens[:MAX_TOKENS_SHOWN]))
    more = " …" if len(preview.tokens) > MAX_TOKENS_SHOWN else ""
    yield from ("", f"first prompt, {len(preview.tokens)} tokens: {ids}{more}")
    yield from (f"  | {line}" for line in preview.prompt.splitlines())
    if preview.completion is not None:
        yield "its completion, which is learnt"
        yield from (f"  | {line}" for line in preview.completion.splitlines())
    unfit = "".join(f", {count} {what}" for what, count in preview.unfit.items() if count)
    yield from ("", f"data      {preview.rows:,} training rows{unfit}; {preview.held_out:,} held out")
    yield "step      " + "; ".join(f"{name} {count:,}" for name, count in preview.budget.items())
    by_epochs = f"training.num_epochs {loaded.training.num_epochs} over the data"
    yield f"steps     {preview.steps:,}: {'training.max_steps' if loaded.training.max_steps else by_epochs}"


def _resources(source: str, files: str, outline: "Outline") -> Iterator[str]:
    """Yield the memory of the run, its files and its checkpoints on the disk."""
    from covey_plan.memory import disk_line, memory_lines

    yield from (f"{name:<10}{line}" for name, line in zip(("memory", ""), memory_lines(outline), strict=False))
    yield f"          {LIMITS}: covey plan {source} compiles them and gives the peak"
    yield from (files, f"          {disk_line(outline)}", "nothing was written")


def resolve_settings(loaded: recipe.Recipe | recipe.SFTRecipe, places: Mapping[str, str]) -> Iterator[ResolvedSetting]:
    """Yield every setting of `loaded` in the order of its classes.

    Args:
        places: where the settings that are not defaults are written, as `places_of` returns it.
    """
    for name, value in recipe.flatten(asdict(loaded)).items():
        if name in recipe.HIDDEN:
            continue
        if value is None and isinstance(loaded, recipe.Recipe) and (setting := _from_preset(name, loaded)):
            yield setting
        else:
            yield ResolvedSetting(name, value, places.get(name, DEFAULT))


def _from_preset(name: str, loaded: recipe.Recipe) -> ResolvedSetting | None:
    """Return the setting `name` as the run's algorithm has it; None if that leaves it unset too."""
    field, algorithm = name.removeprefix(recipe.SECTION), loaded.grpo.algorithm
    value = vars(algorithm_of(loaded.grpo)).get(field) if name.startswith(recipe.SECTION) else None
    origin = f"preset {algorithm}" if field in PRESETS[algorithm].settings else DEFAULT
    return None if value is None else ResolvedSetting(name, value, origin)


def places_of(kind: type[recipe.RecipeT], source: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return {dotted name: place} of the settings in `overrides` and in the recipe at `source`; a place is the flag of
    the command line, or file and line.
    """
    document = strict_yaml.read_file(recipe.find(source))
    return apply(kind, document, overrides, recipe.HIDDEN).places
