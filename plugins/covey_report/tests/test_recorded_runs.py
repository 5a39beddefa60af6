"""Verdicts of the diagnosis on recorded runs, some broken on purpose (`python -m benchmarks.diagnosis`).

Rules and thresholds were set on the runs of the half "first", and judged by those of the half "second"; four were then
mended, which those of "third" judged, and one once more (benchmarks/RESULTS.md).
"""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.diagnosis.verdicts import Record, judge, read_records

RUNS = read_records(Path(__file__).parent / "recorded_runs.jsonl")
MISSED = {
    "cut-dapo": "reward never reached",
    "rate-too-low-3": "",
    "rate-too-low-for-adapters-2": "",
    "pays-for-nothing-3": "",
    "too-easy-2": "learning rate too high",
    "rate-too-low-for-adapters-1": "",
}
"""Names of broken runs whose first finding is another, with that finding; "" for none."""
ALARMS = {"third-11": "learning rate too high"}
"""Names of sound runs that are told a problem, with the problem."""


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_a_broken_run_gets_its_cause_first_and_a_sound_one_none(run: Record) -> None:
    """At its end, and a sound run while it trains too."""
    verdict, name = judge(run, while_training=not run["rules"]), run["name"]
    if name in MISSED:
        assert verdict.found == MISSED[name]
    elif name in ALARMS:
        assert ALARMS[name] in (verdict.found, *(rule for _, rule in verdict.told))
    else:
        assert verdict.is_right(run["rules"]), verdict


def test_the_exceptions_are_few() -> None:
    made = Counter((run["half"], bool(run["rules"])) for run in RUNS)
    missed = Counter(run["half"] for run in RUNS if run["name"] in MISSED)
    assert all(missed[half] <= 0.2 * made[half, True] for half in ("first", "second"))
    assert ALARMS.keys() | MISSED.keys() <= {run["name"] for run in RUNS}
