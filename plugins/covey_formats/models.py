"""Execute `covey models`: the models that are known by name, or the facts of one."""

import json
import re
from collections.abc import Sequence
from typing import Any

from covey.cli.checks import check_source
from covey.cli.parse import Line
from covey.display import echo, make_console
from covey.monitor.formats import size
from covey_formats.catalogue import MODELS, KnownModel, memory_of

HEADINGS = ("source", "family", "weights", "licence", "template", "tools", "thinking", "status", "train all", "LoRA")
LEFT_OUT = ("family", "thinking", "template", "tools", "licence", "LoRA", "status")
"""Columns that a narrow terminal does not show, the least important first; --json has all."""
GAP = 2
RIGHT = ("weights", "train all", "LoRA")
NOTES = (
    "Every checkpoint of these families loads: a Hugging Face folder, a .gguf file or hf:org/name (docs/models.md).",
    "trained: runs at this size are in the docs. logits: those of its family equal transformers'; not trained yet.",
    "train all, LoRA: least memory, in float32, and of adapters on a base in bfloat16. covey plan RECIPE says more.",
)
"""Lines below the table."""


def models(line: Line) -> None:
    """Execute `covey models [SOURCE] [--json]`."""
    facts = [_facts(model) for model in MODELS] if not line.arguments else _look_at(line.arguments[0])
    if "--json" in line.options:
        print(json.dumps(facts))
    elif isinstance(facts, list):
        _show_table()
    else:
        for name, value in facts.items():
            echo(f"{name:<12} {value:,}" if isinstance(value, int) else f"{name:<12} {value}")


def rows() -> list[tuple[str, ...]]:
    """Return the rows of the table of known models, as text."""
    return [
        (
            m.source,
            _family(m),
            size_of(m.parameters),
            m.licence,
            m.template,
            m.tools,
            m.thinking,
            m.status,
            *map(size, memory_of(m.parameters)),
        )
        for m in MODELS
    ]


def size_of(parameters: int) -> str:
    """Return a number of weights in the unit that fits.

    >>> size_of(391_552), size_of(134_515_008), size_of(8_030_261_248)
    ('0.392M', '135M', '8.03B')
    """
    return f"{parameters / 1e9:.2f}B" if parameters >= 0.995e9 else f"{parameters / 1e6:.3g}M"


def _family(model: KnownModel) -> str:
    from covey.models.families import find_family  # late: it needs NumPy

    family = find_family(model.kind)
    return family.name.partition(" (")[0] if family else model.kind


def _facts(model: KnownModel) -> dict[str, Any]:
    full, lora = memory_of(model.parameters)
    return {**model._asdict(), "family": _family(model), "full_bytes": full, "lora_bytes": lora}


def _show_table() -> None:
    from rich.markup import escape
    from rich.table import Table

    console, table = make_console(), Table(box=None, padding=(0, GAP, 0, 0), header_style="bold")
    headings, *lines = _fitting([HEADINGS, *rows()], console.width)
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading in RIGHT else "left")
    for line in lines:
        table.add_row(*map(escape, line))  # a template may be called [INST]
    console.print(table)
    for note in NOTES:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _fitting(lines: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """Return the columns that fit into `width` cells; `LEFT_OUT` has the order in which columns are left out."""
    columns = list(zip(*lines, strict=True))
    for heading in LEFT_OUT:
        if sum(max(map(len, column)) + GAP for column in columns) <= width:
            break
        columns = [column for column in columns if column[0] != heading]
    return list(zip(*columns, strict=True))


def _look_at(source: str) -> dict[str, Any]:
    """Return the facts of the model at `source`, from its config and tokenizer; its weights are not read.

    Raises:
        WeightsError: it is not available, or not supported.
    """
    check_source(source)
    from covey.config.recipe import AnyRecipe
    from covey.config.schema import ModelOptions
    from covey.models.decoder import num_parameters
    from covey.models.families import find_family
    from covey.recipes.load_model import SWITCH, abstract_for

    model, tokenizer = abstract_for(AnyRecipe(model=ModelOptions(source=source)), "cpu")
    family, parameters, template = find_family(model.config.family), num_parameters(model), tokenizer.chat_template
    full, lora = map(size, memory_of(parameters))
    return {
        "source": source,
        "family": family.name if family else model.config.family,
        "weights": parameters,
        "layers": model.config.num_layers,
        "width": model.config.hidden_size,
        "vocabulary": model.config.vocab_size,
        "positions": model.config.max_positions,
        "template": "a chat template" if template else "none: prompts are plain text",
        "tools": "in the template" if re.search(r"\btools\b", template or "") else "not in the template",
        "thinking": "model.thinking switches it" if SWITCH in (template or "") else "no switch in the template",
        "memory": f"at least {full} to train all weights in float32, {lora} for adapters on a base in bfloat16",
    }
