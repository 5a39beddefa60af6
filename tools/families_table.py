"""Write the tables of model families and of known models into docs/models.md, as `covey models` prints them.

python tools/families_table.py           # write it
python tools/families_table.py --print   # print it
"""

import sys
from pathlib import Path

from covey.cli.models import HEADINGS, rows
from covey.models.families import FAMILIES
from covey.models.loading.hf_config import TEXT_PARTS

FILE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by make schema -->", "<!-- end -->"


def table() -> str:
    """Return the table of families."""
    types = {kind: [kind, *(whole for whole, part in TEXT_PARTS.items() if part == kind)] for kind in FAMILIES}
    rows = [f"| {FAMILIES[kind].name} | {', '.join(f'`{one}`' for one in all_of)} |" for kind, all_of in types.items()]
    return "\n".join(["| family | `model_type` in `config.json` |", "|---|---|", *rows])


def models() -> str:
    """Return the table of known models."""
    lines = [[f"`{source}`", *rest] for source, *rest in rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADINGS, ["---"] * len(HEADINGS), *lines))


def text() -> str:
    """Return the content of the file with the tables of today."""
    before, _, rest = FILE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    return f"{before}{BEGIN}\n\n{table()}\n\n{models()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(table(), models(), sep="\n\n")
    else:
        FILE.write_text(text(), encoding="utf-8")
