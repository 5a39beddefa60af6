"""Write the table of rules into RULES.md beside covey_report/diagnosis/rules.py; docs/diagnosis-rules.md shows it.

python -m tools.diagnosis_table           # write it
python -m tools.diagnosis_table --print   # print it
"""

import re
from pathlib import Path

from covey_report.diagnosis import NOTE, RULES, Rule, rules
from covey_report.diagnosis.rule import FIELD
from tools.written_part import with_part, write

FILE = Path(rules.__file__).with_name("RULES.md")


def row(rule: Rule) -> str:
    """Return one line of the table; the value to try, or its factor, stands behind a setting."""
    method = {("rl",): "", ("sft",): " (supervised)"}.get(rule.methods, "")
    note = " (note)" if rule.level == NOTE else ""
    advice = FIELD.sub(
        lambda match: f"`{match[1]}`" + (f" ({match[2].lstrip('<>')})" if match[2] else ""),
        rule.advice.replace("|", ""),
    )
    refutations = "; ".join(condition.words for condition in rule.refuted_by)
    threshold = re.sub(r"(?<![\w`])((?:grpo|rollout)\.[a-z_]+)", r"`\1`", rule.threshold)
    return f"| {rule.title}{method}{note} | {threshold} | {refutations} | {advice} |"


def table() -> str:
    """Return the whole table."""
    head = ["| what is found | when | refuted if | what to change (value or factor to try) |", "|---|---|---|---|"]
    return "\n".join([*head, *map(row, RULES)])


def text() -> str:
    """Return the content of the file with the table of today."""
    return with_part(FILE, table())


if __name__ == "__main__":
    write(FILE, table())
