"""What the diagnosis says of recorded runs of a tiny model, some broken on purpose (`benchmarks/diagnosis.py`).

The thresholds were set on the runs of the half "set"; "judge" and "fresh" judge them. `recorded_runs.jsonl` has their
metrics as `python -m benchmarks.diagnosis FOLDER --judge --metrics FILE` writes them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.report.diagnosis import NOTE, PROBLEM, LiveDiagnosis, RunHistory, diagnose

MISSED = {"cut-dapo": "reward never reached"}
"""A penalty for long answers taught it to write none: what is said is true, and not the cause."""
RUNS = [json.loads(line) for line in (Path(__file__).parent / "recorded_runs.jsonl").read_text().splitlines()]
NAMES = [run["name"] for run in RUNS]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_a_broken_run_gets_its_cause_first_and_a_sound_one_none(run: dict[str, Any], made: Any) -> None:
    """While it trains a sound run is told nothing, and a broken one its cause, from the first time on."""
    before, after = ({k: v for k, v in (run[when] or {}).items() if v is not None} for when in ("before", "after"))
    rows = made.recorded_rows(run)
    found = replace(RunHistory.from_rows(rows, run["method"], run["settings"], before), after=after)
    first, missed = diagnose(found)[0], MISSED.get(run["name"])
    if missed or run["cause"]:
        assert (first.level, first.rule in (run["cause"] if missed is None else [missed])) == (PROBLEM, True)
    else:
        assert first.level == NOTE
    live = LiveDiagnosis(found.method, found.settings, found.before)
    told = [one.rule for row in rows for one in live.step(row)]
    assert told[:1] == [] or told[0] in (*run["cause"], missed)
