"""The part of a page that a tool writes, between two marks."""

import sys
from pathlib import Path

MAKE = "make schema"
END = "<!-- end -->"


def with_part(page: Path, part: str, by: str = MAKE) -> str:
    """Return the text of `page` with `part` in place of what `by` has written there before."""
    begin = f"<!-- written by {by} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}\n{part}\n\n{END}{rest.partition(END)[2]}"


def write(page: Path, part: str, by: str = MAKE) -> None:
    """Write the part into its page, or print it alone if the command line has `--print`."""
    if "--print" in sys.argv:
        print(part)
    else:
        page.write_text(with_part(page, part, by), encoding="utf-8")
