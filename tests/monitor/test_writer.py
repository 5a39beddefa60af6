"""The run folder's files: strict JSON, full precision, and rows that survive being killed and resumed."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.errors import ResumeError
from covey.monitor.writer import (
    MetricsWriter,
    encode_row,
    group_lines,
    group_rows,
    read_rows,
    write_answers,
    write_summary,
)
from covey.types import Completion, FinishReason, Group


def a_group(text="Rain falls."):
    tokens = np.array([5, 6, 2], np.int32)
    logps = np.zeros(3, np.float32)
    stopped = Completion(tokens, logps, logps, FinishReason.STOP, text)
    cut = Completion(tokens[:2], logps[:2], logps[:2], FinishReason.LENGTH, "")
    return Group(
        prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}],
        prompt_tokens=np.arange(4, dtype=np.int32),
        completions=(stopped, cut),
        rewards=np.array([0.7, math.nan]),
        rewards_by_function={"letter": np.array([0.7, math.nan])},
        advantages=np.array([0.1, 0.0], np.float32),
    )


def strictly(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write(folder, steps, **options):
    with MetricsWriter(folder, **options) as writer:
        for step in steps:
            writer.rows("metrics.jsonl", [{"step": step, "reward": step / 3}])
            writer.lines("samples.jsonl", group_lines(group_rows, step, [a_group()], [0]))


def test_answers_tell_which_completions_are_right(tmp_path):
    write_answers(tmp_path, "after", [a_group()], {"accuracy": [np.array([True, False])]})
    write_answers(tmp_path, "unjudged", [a_group()])
    judged, unjudged = (list(read_rows(tmp_path / f"{name}.jsonl")) for name in ("after", "unjudged"))
    assert [row["correct"] for row in judged] == [{"accuracy": True}, {"accuracy": False}]
    assert all("correct" not in row for row in unjudged)


def test_a_row_holds_every_completion_and_unscored_is_null(tmp_path):
    write(tmp_path, [1])
    first, second = map(strictly, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert first == {
        "step": 1,
        "group": 0,
        "sample": 0,
        "prompt": "system: Be brief.\nuser: Rain?",
        "turns": [["system", 9], ["user", 5]],
        "text": "Rain falls.",
        "rewards": {"letter": 0.7},
        "reward": 0.7,
        "advantage": float(np.float32(0.1)),
        "finish": "stop",
        "prompt_length": 4,
        "length": 3,
    }
    assert (second["reward"], second["rewards"], second["finish"], second["length"]) == (
        None,
        {"letter": None},
        "length",
        2,
    )


@given(st.floats())
def test_numbers_keep_every_bit_and_json_stays_strict(value):
    for kept in (value, np.float64(value)):
        read = strictly(encode_row({"step": 1, "x": kept}))["x"]
        assert read == value if math.isfinite(value) else read is None


def test_arrays_and_scalars_of_numpy_and_jax_become_numbers():
    import jax.numpy as jnp

    row = {
        "a": np.float32(0.1),
        "b": np.int64(3),
        "c": jnp.float32(0.1),
        "d": np.array([1.0, np.inf]),
        "e": np.bool_(True),
    }
    same = float(np.float32(0.1))
    assert strictly(encode_row(row)) == {"a": same, "b": 3, "c": same, "d": [1.0, None], "e": True}


@example("éß")
@given(st.text(st.characters()))
def test_any_text_of_a_model_is_one_readable_line(text):
    written = encode_row({"text": text})
    assert written.count(b"\n") == 1
    assert strictly(written.decode()) == {"text": text}
    assert not (text.isalpha() and text.isprintable()) or text.encode() in written  # letters are written as letters


def test_rows_are_on_disk_before_the_next_step(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.rows("metrics.jsonl", [{"step": 1}])
    writer.lines("samples.jsonl", group_lines(group_rows, 1, [a_group()], [0]))
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == 1
    assert len(list(read_rows(tmp_path / "samples.jsonl"))) == 2
    writer.close()
    writer.close()


@pytest.mark.parametrize("tail", [b"", b'{"step": 4, "rew', b'{"step": 4}', b'{"step": 3', b"\x00\x00"])
def test_resume_drops_later_rows_and_a_torn_one(tmp_path, tail):
    write(tmp_path / "straight", range(1, 7))
    write(tmp_path / "resumed", range(1, 4))
    with (tmp_path / "resumed" / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert [row["step"] for row in read_rows(tmp_path / "resumed" / "metrics.jsonl")] == [1, 2, 3]
    write(tmp_path / "resumed", range(3, 7), resume_at=2)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_resume_keeps_everything_up_to_its_step_and_starts_missing_files(tmp_path):
    write(tmp_path, [1, 2])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, [], resume_at=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    write(tmp_path, [], resume_at=0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    write(tmp_path / "new", [1], resume_at=0)
    assert [row["step"] for row in read_rows(tmp_path / "new" / "metrics.jsonl")] == [1]


def test_a_new_run_does_not_append_to_another(tmp_path):
    write(tmp_path, [1])
    with pytest.raises(ResumeError, match="rows of another run"):
        MetricsWriter(tmp_path)


@pytest.mark.parametrize("broken", ["not json", "[1]", '{"reward": 1}', '{"step": null}'])
def test_a_foreign_line_is_named_and_nothing_is_cut(tmp_path, broken):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + broken + '\n{"step": 2}\n')
    before = file.read_bytes()
    with pytest.raises(ResumeError, match=r"metrics\.jsonl:2"):
        MetricsWriter(tmp_path, resume_at=1)
    assert file.read_bytes() == before


def test_summary_is_replaced_whole(tmp_path, monkeypatch):
    write_summary(tmp_path, {"before": {"accuracy": 0.2}})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        write_summary(tmp_path, {"before": {"accuracy": np.float32(0.5)}})
    assert strictly((tmp_path / "summary.json").read_text()) == {"before": {"accuracy": 0.2}}
    monkeypatch.undo()
    write_summary(tmp_path, {"after": {"accuracy": math.nan}})
    assert strictly((tmp_path / "summary.json").read_text()) == {"after": {"accuracy": None}}
