"""Values of tokens of a few completions, by which a page colours them.

`tokens.jsonl` has them for one group of some steps (`rl.token_values`). A page keeps whole groups within its budget:
the first step and the last, then those between, so that any number of them is spread evenly over the run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.report.run_data import Row, coarse_to_fine, read_lines
from covey.report.texts import Mask, number_json, script_json, size_of, text_json
from covey.train.json_lines import is_count, number

MAX_BYTES = 800_000
"""Maximum size in bytes of the token values of a page, of all runs together; completions have that much less room."""
MAX_TOKENS = 512
"""Maximum number of tokens of a completion."""
VALUES = ("logps", "change", "entropy", "kl")
"""Values of each token, in the order of the page."""

Place = tuple[int, int]
"""Step and number of a group."""


def collect(
    file: Path, budget: int, unreadable: dict[str, int], mask: Mask = lambda value: value
) -> tuple[dict[Place, str], int]:
    """Return the token values of `file` that fit in `budget` bytes, as JSON by group, and the number of all groups.

    A group is a list of `[sample, texts, advantage, log-probs, changes, entropies, KL, inserted]`: `advantage` is one
    number or one per token; the lists of values have null where a row has none; `inserted` has the indices of the
    tokens that a tool or an environment inserted. A completion whose text has a secret in it is left out, because the
    secret would be spread over its tokens.
    """
    groups: dict[Place, list[Row]] = {}
    for row in read_lines(file, unreadable):
        step, group = row.get("step"), row.get("group")
        if is_count(step) and is_count(group) and _texts(row) is not None:
            groups.setdefault((step, group), []).append(row)
    kept: dict[Place, str] = {}
    places = sorted(groups)
    for place in (places[i] for i in coarse_to_fine(len(places))):
        encoded = [found for row in groups[place] if (found := _completion(row, mask))]
        group = f"[{','.join(encoded)}]"
        budget -= size_of(group) + 20
        if budget < 0:
            break
        if encoded:
            kept[place] = group
    return kept, len(groups)


def to_json(groups: Mapping[Place, str], total: int) -> str:
    """Return the groups as the page reads them: `groups` by `step-group`, and the number of all of them."""
    entries = ",".join(f'"{step}-{group}":{values}' for (step, group), values in sorted(groups.items()))
    return f'{{"groups":{{{entries}}},"total":{total}}}'


def _completion(row: Row, mask: Mask) -> str:
    """Return the values of one completion as JSON; empty where they are not shown."""
    texts, sample = _texts(row), row.get("sample")
    assert texts is not None, "rows without texts are left out before"
    joined = "".join(texts)
    if not is_count(sample) or mask(joined) != joined:
        return ""
    count = len(texts)
    advantage = row.get("advantage")
    shown = _list(advantage, count) if isinstance(advantage, list) else number_json(number(advantage))
    values = ",".join(_list(row.get(name), count) for name in VALUES)
    sampled = row.get("sampled")
    inserted = [i for i, flag in enumerate(sampled[:count]) if flag == 0] if isinstance(sampled, list) else []
    return f"[{sample},[{','.join(map(text_json, texts))}],{shown},{values},{script_json(inserted)}]"


def _texts(row: Row) -> Sequence[str] | None:
    texts = row.get("texts")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return None
    return texts[:MAX_TOKENS]


def _list(values: Any, count: int) -> str:
    """Return one number per token as JSON; null if there are not so many."""
    if not isinstance(values, list) or len(values) < count:
        return "null"
    return f"[{','.join(_three_digits(number(value)) for value in values[:count])}]"


def _three_digits(value: float | None) -> str:
    return "null" if value is None else f"{value:.3g}"
