"""One finding of a diagnosis."""

from dataclasses import dataclass

PROBLEM, NOTE = "problem", "note"
"""Levels of a finding: a problem has a cause that can be changed, a note informs."""


@dataclass(frozen=True)
class Finding:
    """One finding, as the report and the terminal show it.

    Attributes:
        title: what was found, as a sentence.
        threshold: rule that it met, in words.
        evidence: steps and figures that show it.
        setting: setting to change, and how; empty where there is none.
        rule: name of the rule in the table of rules; empty for a note on the run as a whole.
        level: "problem" or "note".
        samples: completions to read, one line each.
    """

    title: str
    threshold: str
    evidence: str
    setting: str
    rule: str = ""
    level: str = PROBLEM
    samples: tuple[str, ...] = ()
