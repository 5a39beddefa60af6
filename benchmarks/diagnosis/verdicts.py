"""Verdicts of the diagnosis on runs, while they train and at their ends, and records of the runs for the tests."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.diagnosis.cases import Case
from covey_report.diagnosis import PROBLEM, WITHDRAWN, LiveDiagnosis, RunHistory, diagnose
from covey_report.run_data import read_run

PARTS = ("first half", "second half", "third part")
Record = Mapping[str, Any]
"""A run as `record` returns it."""


class Verdict(NamedTuple):
    """Verdict of the diagnosis on a run.

    Attributes:
        found: name of the rule of the first finding at the end; "" if no problem was found.
        others: names of the rules of the other problems at the end.
        told: steps at which problems were told while the run trained, and the names of their rules.
        withdrawn: names of those that were withdrawn.
    """

    found: str
    others: list[str]
    told: list[tuple[int, str]]
    withdrawn: list[str]

    def is_right(self, rules: Sequence[str]) -> bool:
        """Return whether the first finding is one of `rules`; for a sound run, whether nothing was found or told."""
        return self.found in rules if rules else not (self.found or self.told)


def judge(run: Record, while_training: bool = True) -> Verdict:
    """Judge a recorded run as it is judged at its end, and, if asked for, while it trains."""
    before, after = ({k: v for k, v in (run[when] or {}).items() if v is not None} for when in ("before", "after"))
    rows, data = rows_of(run), run["data"] or {}
    history = replace(RunHistory.from_rows(rows, run["method"], run["settings"], before, data), after=after)
    live = LiveDiagnosis(history.method, history.settings, before, data=data)
    told = [(row["step"], one) for row in rows for one in live.step(row)] if while_training else []
    told += [(rows[-1]["step"], one) for one in live.end(history)]
    found = [one.rule for one in diagnose(history) if one.level == PROBLEM]
    return Verdict(
        next(iter(found), ""),
        found[1:],
        [(step, one.rule) for step, one in told if one.level == PROBLEM],
        [one.rule for _, one in told if one.level == WITHDRAWN],
    )


def read_records(file: Path) -> list[Record]:
    """Return the runs whose records are the lines of `file`."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def rows_of(run: Record) -> list[dict[str, Any]]:
    """Return the rows of a recorded run, whose metrics have one value for all, a value per row, or pairs of step and
    value.
    """
    rows: list[dict[str, Any]] = [{"step": step} for step in run["steps"]]
    for metric, packed in run["series"].items():
        values = packed if isinstance(packed, list) else [packed] * len(rows)
        pairs = values if isinstance(values[0], list | tuple) else zip(run["steps"], values, strict=True)
        for step, value in pairs:
            rows[run["steps"].index(step)][metric] = float(value)
    return rows


def record(case: Case, folder: Path) -> dict[str, Any]:
    """Return the run of `case` as JSON-serialisable values: its settings, and the metrics that rules read, rounded to
    three digits.
    """
    run = read_run(folder / case.name)
    series = {name: _packed(run.steps, one) for name, one in run.series.items() if READ.fullmatch(name)}
    figures = {name: run.summary.get(name) for name in ("before", "after", "data")}
    settings = {name: value for name, value in run.settings.items() if SETTINGS.fullmatch(name) and value is not None}
    row = {"name": case.name, "half": case.half, "cause": case.cause, "rules": case.rules, "words": case.words}
    return row | {"method": run.method, "settings": settings} | figures | {"steps": [*run.steps], "series": series}


def _packed(steps: Sequence[int], series: Any) -> Any:
    """Return the values of `series` by step; one value if all are equal, and pairs if steps lack it."""
    values = [float(f"{value:.3g}") for value in series.values]
    if len(values) < len(steps):
        return [*zip(series.steps, values, strict=True)]
    return values[0] if len(set(values)) == 1 else values


LONG = re.compile(
    r"OWN:|FOLDER/|training\.(actor_)?(optimizer\.)?|(rollout|grpo|data|model|reward_safety)\.|budget=\d+ "
    r"|envs\.(on_error=none|budget=\d+|rehearsal=false) |envs\.(?=env)|(?<= )seed=\d+"
)
"""Parts of settings that are left out in the table."""
READ = re.compile(
    "reward|reward_error|reward_std|reward_noise|frac_reward_.*|rewards/.*|entropy|kl|grad_norm|learning_rate|skipped|loss"
    "|reward_correlation/.*"
    "|completions/(mean_length|max_length|clipped_ratio|distinct_ratio|empty_ratio|rewarded_empty_ratio|scored_ratio)"
    "|env/(failed|done|turns|tool_calls|tool_failures)|sampling/(logp_difference/mean|mass_kept|token_agreement)"
    "|clip_ratio/region_mean|critic/explained_variance|eval/(accuracy|error|format_accuracy|samples|reward|loss)"
)
"""Pattern of the metrics that rules read."""
SETTINGS = re.compile(
    r"grpo\.(algorithm|advantage|ratio|num_generations|entropy_bonus|beta)|rollout\.(temperature|max_new_tokens)"
    r"|training\.(prompts_per_step|max_steps|(actor_)?optimizer\.(learning_rate|weight_decay|max_grad_norm))"
    r"|envs\.(environment|tools)|model\.(dtype|compute_dtype|lora\.rank)"
)
"""Pattern of the settings that rules read."""


def table(runs: Iterable[Record]) -> str:
    """Return a table of the causes with the runs of each part and the verdicts on them, the sound runs last, and the
    recall and the precision of the parts.
    """
    judged = [(run, judge(run)) for run in runs]
    lines = [f"| what is wrong | {' | '.join(PARTS)} |", "|---" * (1 + len(PARTS)) + "|"]
    for cause in sorted(dict.fromkeys(run["cause"] for run, _ in judged), key=lambda cause: not cause):
        cells = (
            _cell([pair for pair in judged if pair[0]["cause"] == cause and _is_of(pair[0], part)]) for part in PARTS
        )
        lines.append(f"| {cause or 'nothing'} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(summary(judged, part) for part in PARTS)])


def _cell(judged: Sequence[tuple[Record, Verdict]]) -> str:
    """Return the outcomes of some runs, equal ones once with their number."""
    counts = Counter(_outcome(run, verdict) for run, verdict in judged)
    return "<br>".join(outcome + (f" ({number} times)" if number > 1 else "") for outcome, number in counts.items())


def _outcome(run: Record, verdict: Verdict) -> str:
    """Return the words of a run, and when it was told its cause, or what it was told instead."""
    step = next((step for step, name in verdict.told if name in run["rules"]), None)
    others = [f"{name} at step {at}" for at, name in verdict.told if name not in run["rules"]]
    others = [f"{one}, withdrawn" if one.split(" at step")[0] in verdict.withdrawn else one for one in others]
    if not run["rules"]:
        said = "" if verdict.is_right(()) else f": **false alarm**: {', '.join(others) or verdict.found}"
    elif verdict.is_right(run["rules"]):
        said = (f": step {step}" if step else ": at the end") + (f" (and {', '.join(others)})" if others else "")
    else:
        said = f": **missed**: {verdict.found or 'nothing'}" + (f", told {', '.join(others)}" if others else "")
    return f"`{LONG.sub('', run['words']).strip()}`{said}"


def _is_of(run: Record, part: str) -> bool:
    return bool(part.startswith(run["half"]))


def summary(judged: Sequence[tuple[Record, Verdict]], part: str) -> str:
    """Return the recall and the precision of a part: how many broken runs have their cause as the first finding, how
    many of the runs with a finding are among them, and how many sound runs were told nothing.
    """
    chosen = [(run["rules"], verdict) for run, verdict in judged if _is_of(run, part)]
    broken, sound = ([one for one in chosen if bool(one[0]) == is_broken] for is_broken in (True, False))
    right = sum(verdict.is_right(rules) for rules, verdict in broken)
    found = sum(bool(verdict.found or verdict.told) for _, verdict in chosen)
    quiet = sum(verdict.is_right(rules) for rules, verdict in sound)
    return (
        f"{part}: recall {right} of {len(broken)}, precision {right} of {found}, "
        f"sound runs that were told nothing {quiet} of {len(sound)}"
    )
