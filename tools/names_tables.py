"""Write the tables of names into docs/from-*.md, from covey/config/foreign_names.toml.

python tools/names_tables.py           # write them
python tools/names_tables.py --print   # print them
"""

import sys
from pathlib import Path

from covey.config import foreign_names

DOCS = Path(__file__).parents[1] / "docs"
PEERS = {"trl": "TRL", "tunix": "Tunix", "verl": "verl"}
BEGIN, END = "<!-- written by make schema -->", "<!-- end -->"


def row(answer: str, names: list[str]) -> str:
    """Return one line of a table."""
    text = answer.replace(foreign_names.NO_USE, "left out", 1)
    ours = foreign_names.OURS.sub(lambda match: f"`{match[1].split('|')[0]}`", text)
    return f"| {', '.join(f'`{name}`' for name in names)} | {ours} |"


def table(peer: str) -> str:
    """Return the whole table of the library `peer`."""
    rows = foreign_names.tables()["settings"][peer]
    return "\n".join([f"| {PEERS[peer]} | Covey |", "|---|---|", *(row(*entry) for entry in rows.items())])


def file(peer: str) -> Path:
    """Return the page that has the table."""
    return DOCS / f"from-{peer}.md"


def text(peer: str) -> str:
    """Return the content of the page with the table of today."""
    before, _, rest = file(peer).read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    return f"{before}{BEGIN}\n\n{table(peer)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for peer in PEERS:
        if "--print" in sys.argv:
            print(table(peer))
        else:
            file(peer).write_text(text(peer), encoding="utf-8")
