"""Choose completions that show what a finding is about.

`samples.jsonl` is untrusted and may be large: only the lines of the last window of steps are parsed, and only when a
finding needs them.
"""

import re
from collections.abc import Iterator

from covey.display import printable
from covey.files import open_or_empty
from covey.report.diagnosis.history import RunHistory
from covey.report.run_data import Row
from covey.train.json_lines import is_count, number, parse_line

COUNT = 5
"""Number of completions to read."""
WIDTH = 160
"""Maximum number of characters of a prompt and of a completion."""
_STEP = re.compile(rb'\{"step": (\d{1,15}),')


def samples_to_read(history: RunHistory, high: str = "", low: str = "") -> list[str]:
    """Return lines with the completions of the last window in which the reward function `high` gave most and `low`
    least; without names, those with the highest reward. There is at most one of each group.
    """
    best: dict[tuple[object, object], tuple[float, str]] = {}
    for row in _recent_rows(history):
        group, score = (row["step"], str(row.get("group"))), _score(row, high, low)
        if score is not None and (group not in best or score > best[group][0]):
            best[group] = score, _line(row)
    return [line for _, line in sorted(best.values(), key=lambda one: -one[0])[:COUNT]]


def _recent_rows(history: RunHistory) -> Iterator[Row]:
    first = int(history.steps[-min(history.window, len(history))]) if len(history) else 0
    if history.samples is None:
        return
    with open_or_empty(history.samples.parent, history.samples.name) as lines:
        for line in lines:
            key = _STEP.match(line)
            row = parse_line(line) if (key is None or int(key[1]) >= first) and line.endswith(b"\n") else None
            if row is not None and is_count(row.get("step")) and row["step"] >= first:
                yield row


def _score(row: Row, high: str, low: str) -> float | None:
    """Return how well `row` shows that `high` is given and `low` is not; None if it is not scored."""
    if not high:
        return number(row.get("reward"))
    parts = row.get("rewards")
    parts = parts if isinstance(parts, dict) else {}
    up, down = number(parts.get(high)), number(parts.get(low))
    return None if up is None or down is None else up - down


def _line(row: Row) -> str:
    parts = row.get("rewards")
    rewards = parts.items() if isinstance(parts, dict) else ()
    scores = ", ".join(f"{name} {value:.3g}" for name, raw in rewards if (value := number(raw)) is not None)
    where = f"step {row.get('step')}, group {row.get('group')}, sample {row.get('sample')}"
    return printable(f"{where} ({scores}): {_excerpt(row.get('prompt'))} → {_excerpt(row.get('text'))}")


def _excerpt(text: object) -> str:
    shown = " ".join(str(text).split())
    return shown if len(shown) <= WIDTH else f"{shown[: WIDTH // 2]} … {shown[-WIDTH // 2 :]}"
