"""Write the tables of model families and of known models into docs/models.md, as `covey models` prints them.

python -m tools.families_table           # write it
python -m tools.families_table --print   # print it
"""

from pathlib import Path

from covey.models.families import FAMILIES, INSTALLED, find_family
from covey.models.loading.hf_config import text_part, whole_kinds
from covey_formats.models import HEADINGS, rows
from tools.written_part import with_part, write

FILE = Path(__file__).parents[1] / "docs" / "models.md"


def table() -> str:
    """Return the table of families."""
    kinds = [*FAMILIES, *(name for name in INSTALLED.names() if name not in FAMILIES)]
    wholes = {whole: part.kind for whole in whole_kinds() if (part := text_part({"model_type": whole}))}
    types = {kind: [kind, *(whole for whole, part in wholes.items() if part == kind)] for kind in kinds}
    names = {kind: family.name for kind in kinds if (family := find_family(kind))}
    rows = [f"| {names[kind]} | {', '.join(f'`{one}`' for one in all_of)} |" for kind, all_of in types.items()]
    return "\n".join(["| family | `model_type` in `config.json` |", "|---|---|", *rows])


def models() -> str:
    """Return the table of known models."""
    lines = [[f"`{source}`", *rest] for source, *rest in rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADINGS, ["---"] * len(HEADINGS), *lines))


def tables() -> str:
    """Return both tables."""
    return f"{table()}\n\n{models()}"


def text() -> str:
    """Return the content of the file with the tables of today."""
    return with_part(FILE, tables())


if __name__ == "__main__":
    write(FILE, tables())
