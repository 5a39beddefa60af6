"""Write the table of advantages of docs/algorithms.md, from covey/config/advantages.py.

python -m tools.advantages_table           # write it
python -m tools.advantages_table --print   # print it
"""

from pathlib import Path

from covey.config.advantages import ADVANTAGES
from tools.written_part import with_part, write

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"


def table() -> str:
    """Return the whole table."""
    rows = (f"| `{name}` | {row.formula} |" for name, row in ADVANTAGES.items())
    return "\n".join(["| key | formula |", "|---|---|", *rows])


def text() -> str:
    """Return the content of the page with the table of today."""
    return with_part(PAGE, table())


if __name__ == "__main__":
    write(PAGE, table())
