"""Write the table of metrics that docs/metrics.md shows, from covey/config/metrics.py.

python -m tools.metrics_table           # write it
python -m tools.metrics_table --print   # print it
"""

from pathlib import Path

from covey.config.metrics import TABLE
from tools.written_part import with_part, write

FILE = Path(__file__).parent / "tables" / "metrics.md"


def table() -> str:
    """Return the whole table; the names of metrics that follow the clock have a star."""
    head = ["| metric | unit | meaning | logged by |", "|---|---|---|---|"]
    rows = (
        f"| `{row.name}`{' *' * row.clock} | {row.unit or '—'} | {row.meaning} | {', '.join(row.methods)} |"
        for row in TABLE
    )
    return "\n".join([*head, *rows])


def text() -> str:
    """Return the content of the file with the table of today."""
    return with_part(FILE, table())


if __name__ == "__main__":
    write(FILE, table())
