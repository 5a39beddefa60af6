"""Recordings of what the package computes: equal for equal programs, different for any change that a user may meet."""

import json
import runpy
from pathlib import Path

import pytest

from covey.config.metrics import TABLE

RECORD = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "record.py"))
PROGRAM = (
    'module @jit_{0} {{ func.func public @main(%a) -> (f32 {{jax.result_info = "{0}"}}) {{ call @{0}(%a) : {1} }} }}'
)


def test_names_of_functions_are_no_part_of_a_program():
    one, renamed, other = (PROGRAM.format(*words) for words in (("step", "f32"), ("update", "f32"), ("step", "bf16")))
    assert RECORD["normalised"](one) == RECORD["normalised"](renamed) != RECORD["normalised"](other)
    called_twice, called_both = "@f(%a) @f(%b) @g", "@f(%a) @g(%b) @g"
    assert RECORD["normalised"](called_twice) != RECORD["normalised"](called_both)


def test_metrics_of_the_clock_are_left_out_and_no_others(tmp_path):
    clocks = [row.name for row in TABLE if row.unit in ("s", "tokens/s")]
    assert len(clocks) > 5
    row = {"step": 1, "reward": 0.5, "waste/rollout": 0.1} | dict.fromkeys(clocks, 1.0)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert list(RECORD["rows"](tmp_path / "metrics.jsonl")) == [{"step": 1, "reward": 0.5}]


def test_a_comparison_names_what_differs_and_what_is_missing(tmp_path, capsys):
    before = {"runs/ppo/straight/weights": "1", "runs/ppo/killed/weights": "1", "noise/keys": "2"}
    after = {"runs/ppo/straight/weights": "1", "runs/ppo/killed/weights": "3", "names/all": ["a"]}
    for name, recording in (("before", before), ("after", after)):
        (tmp_path / name).write_text(json.dumps(recording))
    files = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert RECORD["main"](["--compare", *files]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "names/all: only after",
        "noise/keys: only before",
        "runs/ppo/killed/weights: differs",
        "runs/ppo/killed/weights: differs from the run that was left alone",
    ]
    assert RECORD["main"](["--compare", files[0], files[0]]) == 0


@pytest.mark.slow
def test_a_recording_of_programs_names_the_one_that_changed():
    pytest.importorskip("covey_kernels")
    settings = ("training.row_length=32",)
    here, there = (RECORD["lowered"]("sft-tiny", settings, platform) for platform in ("cpu", "tpu"))
    assert here.keys() == there.keys() == {"loss", "gradients", "apply"}
    assert here["gradients"] != there["gradients"]
    changed = RECORD["lowered"]("sft-tiny", (*settings, "training.optimizer.b1=0.7"), "cpu")
    assert [name for name in here if here[name] != changed[name]] == ["apply"]
