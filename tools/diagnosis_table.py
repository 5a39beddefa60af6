"""Write the table of rules into docs/diagnosis.md, from covey/report/diagnosis/rules.py.

python tools/diagnosis_table.py           # write it
python tools/diagnosis_table.py --print   # print it
"""

import re
import sys
from pathlib import Path

from covey.report.diagnosis import NOTE, RULES, Rule

FILE = Path(__file__).parents[1] / "docs" / "diagnosis.md"
BEGIN, END = "<!-- written by make schema -->", "<!-- end -->"


def row(rule: Rule) -> str:
    """Return one line of the table."""
    method = {("rl",): "", ("sft",): " (supervised)"}.get(rule.methods, "")
    note = " (note)" if rule.level == NOTE else ""
    names = sorted({part for name in rule.settings for part in (name, name.rsplit(".", 1)[-1])}, key=len, reverse=True)
    words = [re.escape(name) for name in names if "_" in name or "." in name]
    threshold, fix = (
        re.sub(rf"(?<![\w.])({'|'.join(words) or '(?!)'})(?!\w)", r"`\1`", text) for text in (rule.threshold, rule.fix)
    )
    return f"| {rule.title}{method}{note} | {threshold} | {fix} |"


def table() -> str:
    """Return the whole table."""
    return "\n".join(["| what is found | when | what to change |", "|---|---|---|", *map(row, RULES)])


def text() -> str:
    """Return the content of the file with the table of today."""
    before, _, rest = FILE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(table())
    else:
        FILE.write_text(text(), encoding="utf-8")
