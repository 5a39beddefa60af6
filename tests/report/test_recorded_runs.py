"""What the diagnosis says of recorded runs of a tiny model, some broken on purpose (`benchmarks/diagnosis.py`).

The thresholds were set on the runs of the half "set"; "judge" and "fresh" judge them. `recorded_runs.jsonl` has their
metrics as `python -m benchmarks.diagnosis FOLDER --judge --metrics FILE` writes them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.report.diagnosis import NOTE, PROBLEM, LiveDiagnosis, RunHistory, diagnose

MISSED = {"cut-dapo": "reward never reached"}
"""A penalty for long answers taught it to write none: what is said is true, and not the cause."""
RUNS = [json.loads(line) for line in (Path(__file__).parent / "recorded_runs.jsonl").read_text().splitlines()]
NAMES = [run["name"] for run in RUNS]


def column(steps: list[int], packed: Any) -> np.ndarray:
    """One metric by row: one value for all, a value per row, or pairs of step and value."""
    if not isinstance(packed, list):
        return np.full(len(steps), float(packed))
    if len(packed) == len(steps) and not isinstance(packed[0], list):
        return np.array(packed, float)
    found = np.full(len(steps), np.nan)
    for step, value in packed:
        found[steps.index(step)] = value
    return found


def history(run: dict[str, Any]) -> RunHistory:
    columns = {name: column(run["steps"], packed) for name, packed in run["series"].items()}
    before, after = ({k: v for k, v in (run[when] or {}).items() if v is not None} for when in ("before", "after"))
    return RunHistory(run["method"], run["settings"], np.array(run["steps"]), columns, before, after)


def rows(found: RunHistory) -> list[dict[str, Any]]:
    return [
        {"step": int(step), **{name: float(values[i]) for name, values in found.columns.items()}}
        for i, step in enumerate(found.steps)
    ]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_a_broken_run_gets_its_cause_first_and_a_sound_one_none(run: dict[str, Any]) -> None:
    """While it trains a sound run is told nothing, and a broken one its cause, from the first time on."""
    found = history(run)
    first, missed = diagnose(found)[0], MISSED.get(run["name"])
    if missed or run["cause"]:
        assert (first.level, first.rule in (run["cause"] if missed is None else [missed])) == (PROBLEM, True)
    else:
        assert first.level == NOTE
    live = LiveDiagnosis(found.method, found.settings, found.before)
    told = [one.rule for row in rows(found) for one in live.step(row)]
    assert told[:1] == [] or told[0] in (*run["cause"], missed)
