"""Write the tables of names that docs/names.md shows, from covey/config/foreign_names.toml.

python -m tools.names_tables           # write them
python -m tools.names_tables --print   # print them
"""

from pathlib import Path

from covey.config import foreign_names
from tools.written_part import with_part, write

TABLES = Path(__file__).parent / "tables"
PEERS = {"trl": "TRL", "tunix": "Tunix", "verl": "verl"}


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
    """Return the file of the table."""
    return TABLES / f"names-{peer}.md"


def text(peer: str) -> str:
    """Return the content of the page with the table of today."""
    return with_part(file(peer), table(peer))


if __name__ == "__main__":
    for peer in PEERS:
        write(file(peer), table(peer))
