"""Compare the completions of held-out prompts before and after training, question by question.

A question is right if all of its completions are right by the run's accuracy function, wrong if none is, and partly
right otherwise. Rows of runs from before that was recorded have the training reward alone: there a question is better,
worse or equal by its mean.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from covey.config.metrics import metric
from covey.report.run_data import Row, RunData
from covey.report.texts import Mask, Prompts, completion_form, script_json, size_of
from covey.train.json_lines import number

MAX_BYTES = 600_000
"""Maximum size in bytes of the questions of a page, of all runs together."""
SAMPLES = 4
"""Number of completions kept per question and evaluation; all of them are counted."""


def figures(run: RunData) -> list[dict[str, Any]]:
    """Return the metrics of the evaluations before and after training: name, unit, meaning, both values."""
    before, after = run.evaluation("before"), run.evaluation("after")
    rows = []
    for name in {**before, **after}:
        row = metric(f"eval/{name.rpartition('/')[2]}")
        if name not in COUNTS and (row or "/" in name):
            unit, meaning, lower = (row.unit, row.meaning, row.lower_is_better) if row else ("", "", False)
            values = {"before": before.get(name), "after": after.get(name)}
            rows.append({"name": name, "unit": unit, "meaning": meaning, "lower": lower, **values})
    return rows


def counts(run: RunData) -> dict[str, Any]:
    """Return the numbers of completions and examples of both evaluations, and the standard errors of the accuracy."""
    return {name: [run.evaluation(when).get(name) for when in ("before", "after")] for name in COUNTS}


def questions(run: RunData, budget: int, mask: Mask = lambda value: value) -> str:
    """Return the held-out prompts with their completions before and after training as JSON, in the form that the page
    reads.

    Returns:
        prompts: table of prompts, as turns `[role, text]`.
        judged: whether the rows tell which completions are right; if not, the rewards are compared.
        changes: number of questions by change, "wrong → right" for example, over all questions.
        rows: `[prompt, state before, state after, completions before, completions after]`; a completion is `[text,
            reward, right]`. Those that changed come first where not all fit.
        total: number of questions.
    """
    before, after = _by_question(run.before), _by_question(run.after)
    compared = any(right(row) is not None for row in (*run.before, *run.after))
    state = _verdict if compared else _mean_reward
    rows = []
    for key in {**before, **after}:
        old, new = before.get(key, []), after.get(key, [])
        rows.append((_change(state(old), state(new), compared), old, new))
    changes = Counter(change for change, _, _ in rows)
    prompts, left = Prompts(), budget
    kept: list[tuple[int, str]] = []
    order = sorted(range(len(rows)), key=lambda i: rows[i][0][0] == rows[i][0][1])
    for i in order:
        (was, now), old, new = rows[i]
        prompt, size = prompts.add(mask((old or new)[0]))
        row = script_json(
            [prompt, was, now, *([_completion(mask(one)) for one in some[:SAMPLES]] for some in (old, new))]
        )
        left -= size + size_of(row)
        if left < 0 and kept:
            break
        kept.append((i, row))
    rest = {
        "judged": compared,
        "changes": [[was, now, count] for (was, now), count in changes.most_common()],
        "total": len(rows),
    }
    in_order = ",".join(row for _, row in sorted(kept))
    return f'{{"prompts":[{",".join(prompts.encoded)}],"rows":[{in_order}],{script_json(rest)[1:]}'


def right(row: Row) -> bool | None:
    """Return whether the completion of `row` is right by the run's accuracy function; None if that is not recorded."""
    correct = row.get("correct")
    found = correct.get("accuracy") if isinstance(correct, dict) else None
    return found if isinstance(found, bool) else None


def _by_question(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows by prompt: `group` numbers may differ between evaluations of different sizes."""
    found: dict[str, list[Row]] = {}
    repeated: Counter[str] = Counter()
    last: tuple[Any, str] | None = None
    for row in rows:
        prompt, group = str(row.get("prompt", "")), row.get("group")
        if (group, prompt) != last:
            repeated[prompt] += 1
            last = group, prompt
        found.setdefault(f"{repeated[prompt]} {prompt}", []).append(row)
    return found


def _verdict(rows: Sequence[Row]) -> str | None:
    known = [found for row in rows if (found := right(row)) is not None]
    if not known:
        return None
    return "right" if all(known) else "wrong" if not any(known) else "partly right"


def _mean_reward(rows: Sequence[Row]) -> float | None:
    rewards = [value for row in rows if (value := number(row.get("reward"))) is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _change(was: Any, now: Any, by_verdict: bool) -> tuple[str, str]:
    """Return the states before and after as words; those of rewards are relative to each other."""
    if by_verdict:
        return was or "not measured", now or "not measured"
    if was is None or now is None:
        return "", "not measured"
    return "", "equal" if was == now else "better" if now > was else "worse"


def _completion(row: Row) -> list[Any]:
    return [completion_form(row), number(row.get("reward")), right(row)]


COUNTS = ("samples", "examples", "error")
"""Entries of an evaluation that say how much the others are worth."""
