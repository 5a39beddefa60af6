"""Compare the completions of held-out prompts before and after training, question by question.

A question is right if all of its judged completions are right by the run's accuracy function, wrong if none is, and
partly right otherwise. Rows of runs from before that was recorded have the training reward alone: there a question is
better, worse or equal by its mean.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from covey.config.metrics import metric
from covey.files import number
from covey_report.changes import Figures, direction, errors_of_changes, questions_of, verdict
from covey_report.diagnosis import RunHistory
from covey_report.run_data import Row, RunData
from covey_report.texts import Mask, Prompts, completion_form, fitting, script_json, size_of

MAX_BYTES = 600_000
"""Maximum size in bytes of the questions of a page, of all runs together."""
TRENDS = ("reward", "loss", "completions/mean_length")
"""Metrics of steps whose change is among the first figures of a page."""
SAMPLES = 4
"""Number of completions kept per question and evaluation; all of them are counted."""


def changes_of(run: RunData, first: RunData | None = None) -> dict[str, Any]:
    """Return the figures of the evaluations and the trends of training, and as `counts` the numbers of completions and
    examples of both evaluations with the standard errors of the accuracy.
    """
    counts = {name: [run.evaluation(when).get(name) for when in ("before", "after")] for name in COUNTS}
    return {"figures": figures(run, first), "trends": trends(run), "counts": counts}


def figures(run: RunData, first: RunData | None = None) -> list[dict[str, Any]]:
    """Return the metrics of the evaluations before and after training: name, name of the curve, unit, meaning, which
    direction is `better` (1, -1 or 0), both values, and the change with its standard error (None if it is not known).

    Args:
        first: another run; the difference to its evaluation after training is added as `against_first`.
    """
    before, after = run.evaluation("before"), run.evaluation("after")
    old = first.evaluation("after") if first else {}
    errors = errors_of_changes(old, first.after, after, run.after) if first else {}
    rows = []
    for name in {**before, **after}:
        row = metric(f"eval/{name.rpartition('/')[2]}")
        if name not in COUNTS and (row or "/" in name):
            rows.append(
                {
                    "name": name,
                    "curve": f"eval/{name}",
                    "unit": row.unit if row else "",
                    "meaning": row.meaning if row else "",
                    "better": direction(name, row),
                    "before": before.get(name),
                    "after": after.get(name),
                    "change": _change_of(name, before, after, run.change_errors),
                    **({"against_first": _change_of(name, old, after, errors)} if first else {}),
                }
            )
    return rows


def _change_of(name: str, old: Figures, new: Figures, errors: Figures) -> list[float | None] | None:
    """Return the difference of a figure between two evaluations, and its standard error; None if one lacks it."""
    return [new[name] - old[name], errors.get(name)] if name in old and name in new else None


def trends(run: RunData) -> dict[str, list[Any]]:
    """Return `[early mean, late mean, change, standard error or None, early steps, late steps]` of curves, as the
    diagnosis compares them.
    """
    history = RunHistory.of(run)
    changes = {name: history.metric(name).change for name in TRENDS if name in run.series}
    return {
        name: [early.mean, late.mean, change.difference, number(change.error) or None, early.span, late.span]
        for name, change in changes.items()
        if change and (early := change.early).last < (late := change.late).first
    }


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
    before, after = questions_of(run.before), questions_of(run.after)
    compared = any(verdict(row) is not None for row in (*run.before, *run.after))
    state = _judged if compared else _mean_reward
    pairs = [(before.get(key, []), after.get(key, [])) for key in {**before, **after}]
    changes = [_states(state(old), state(new), compared) for old, new in pairs]
    prompts = Prompts()

    def encode(i: int) -> tuple[str, int]:
        prompt, size = prompts.add(mask((pairs[i][0] or pairs[i][1])[0]))
        both = (
            [[completion_form(row), number(row.get("reward")), verdict(row)] for row in map(mask, rows[:SAMPLES])]
            for rows in pairs[i]
        )
        row = script_json([prompt, *changes[i], *both])
        return row, size + size_of(row)

    order = sorted(range(len(pairs)), key=lambda i: changes[i][0] == changes[i][1])
    rows = fitting(((i, *encode(i)) for i in order), budget)
    counts = [[was, now, count] for (was, now), count in Counter(changes).most_common()]
    rest = {"judged": compared, "changes": counts, "total": len(pairs)}
    in_order = ",".join(rows[i] for i in sorted(rows))
    return f'{{"prompts":[{",".join(prompts.encoded)}],"rows":[{in_order}],{script_json(rest)[1:]}'


def _judged(rows: Sequence[Row]) -> str | None:
    verdicts = [judged for row in rows if (judged := verdict(row)) is not None]
    if not verdicts:
        return None
    return "right" if all(verdicts) else "wrong" if not any(verdicts) else "partly right"


def _mean_reward(rows: Sequence[Row]) -> float | None:
    rewards = [value for row in rows if (value := number(row.get("reward"))) is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _states(was: Any, now: Any, by_verdict: bool) -> tuple[str, str]:
    """Return the states before and after as words; a reward is better, worse or equal."""
    if by_verdict:
        return was or "not measured", now or "not measured"
    if was is None or now is None:
        return "", "not measured"
    return "", "equal" if was == now else "better" if now > was else "worse"


COUNTS = ("samples", "examples", "error")
"""Entries of an evaluation that say how much the others are worth."""
