"""The terminal view: the same story with and without a terminal, and no way for model text to take it over."""

import io
import math
import os
import sys
import threading

import pytest
from rich.console import Console

from covey.display import printable
from covey.monitor.formats import SampleLine, excerpt, sparkline
from covey.monitor.progress import Progress

SAMPLES = [
    SampleLine("about rain", "Rain falls.", 1.0),
    SampleLine("about rain", "\x1b[31mred\x07", 0.0),
    SampleLine("about snow", "[bold]Snow[/bold]", 1.0),
    SampleLine("about snow", "Soft.", 1.0),
]


@pytest.fixture(autouse=True)
def _no_other_display(monkeypatch):
    monkeypatch.setattr("covey.monitor.progress.all_offered", lambda _: {})


def row(step, **more):
    given = {"reward": 0.75, "frac_reward_zero_std": 0.5, "completions/mean_length": 10.0, "kl": 0.01, "step_time": 2.0}
    given |= {"reward_error": 0.25, "tokens_per_second": 20.0, "clip_ratio/region_mean": 0.0004, "time/rollout": 0.04}
    return {"step": step} | given | more


def story(console, steps=(1, 2)):
    with Progress(10, console, show=("kl", "clip_ratio/region_mean", "time/rollout")) as progress:
        progress.phase("loading")
        progress.evaluation("before", {"accuracy": 0.19, "format_accuracy": 0.9, "reward": None, "samples": 100})
        for step in steps:
            progress.step(row(step), SAMPLES)
        summary = {"before": {"accuracy": 0.19}, "after": {"accuracy": 0.75}, "steps": 10, "seconds": 150.2}
        progress.done(summary, "runs/a b")
    return console.file.getvalue()


def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_without_a_terminal_every_step_is_one_plain_line():
    shown = story(plain())
    lines = shown.splitlines()
    assert lines[0] == "before: accuracy 19.0%  format_accuracy 90.0%  (100 samples)"
    assert lines[1].split("  ") == [
        "step 1/10", "reward 0.750 ±0.250", "frac_reward_zero_std 50%", "completions/mean_length 10", "kl 0.0100",
        "clip_ratio/region_mean 0.04%", "time/rollout 0.04s", "tokens_per_second 20", "left 18s",
    ]  # fmt: skip
    assert lines[2].startswith("step 2/10")
    assert "accuracy     19.0% → 75.0%" in shown
    assert "steps        10 in 2m30s" in shown
    assert "covey chat 'runs/a b'" in shown
    assert "\x1b" not in shown


def test_a_chat_is_recommended_where_the_model_has_a_template():
    console = plain()
    Progress(0, console).done({"has_chat_template": False}, "runs/a b")
    assert console.file.getvalue().splitlines()[-2] == "  covey generate 'runs/a b' \"PROMPT\""


def test_an_evaluation_under_several_presets_is_a_line_each():
    console = plain()
    with Progress(1, console) as progress:
        found = {"accuracy": 0.5, "pass@1": 0.5, "pass@2": 0.75, "pass@2_any": 0.7, "samples": 8}
        progress.evaluation("before", found | {"liberal/accuracy": 0.25, "liberal/samples": 8})
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "before: accuracy 50.0%  pass@1 50.0%  pass@2 75.0%  (8 samples)",
        "before, liberal: accuracy 25.0%  (8 samples)",
    ]


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([(1, 60.0, 0.0), (2, 2.0, 0.0), (3, 2.0, 0.0)], ["9m00s", "4m08s", "14s"]),  # the median
        ([(1, 60.0, 58.0)], ["18s"]),
        # two threads compile side by side for longer than the step takes: the time left was below 0
        ([(1, 22.0, 23.0), (2, 3.0, 2.5), (3, 2.0, 0.0), (4, 9.0, 8.9)], ["", "2s", "14s", "12s"]),
        # `step` counts updates and `step_time` is that of a row: with four updates a row it was four times too long
        ([(4, 2.0, 0.0), (8, 2.0, 0.0)], ["4s", "2s"]),
    ],
)
def test_time_left_is_that_of_the_rows_to_come_without_compilation(rows, left):
    console = plain()
    with Progress(10, console) as progress:
        for step, seconds, compiling in rows:
            progress.step(row(step, step_time=seconds) | {"time/compile": compiling})
    assert [line.partition("left ")[2] for line in console.file.getvalue().splitlines()] == left


def test_the_status_counts_time_left_without_compilation(monkeypatch):
    now = 100.0
    monkeypatch.setattr("covey.monitor.progress.time.monotonic", lambda: now)
    progress = Progress(10, Console(file=io.StringIO()), memory=lambda: 5)
    progress.seconds_before = 50.0
    progress.step(row(1, step_time=60.0) | {"time/compile": 50.0})
    now = 104.0
    progress.phase("update")
    now = 107.0
    status = progress.status()
    assert (status.step, status.total, status.phase, status.phase_seconds) == (1, 10, "update", 3.0)
    assert (status.seconds, status.left, status.memory) == (57.0, 9 * 10.0 - 7.0, 5)
    now = 150.0  # a step that compiles for long takes no more of the time left than another
    assert progress.status().left == 8 * 10.0


def test_supervised_training_leads_with_its_loss_and_shows_what_it_is_told_to():
    console = plain()
    metrics = {"perplexity": 12.18, "entropy": 1e-6, "tokens_per_second": 300.0, "step_time": 1.0, "kl": 1.0}
    show = ("perplexity", "entropy", "none")
    with Progress(4, console, main_metric="loss", show=show, samples_file="after.jsonl") as progress:
        progress.evaluation("before", {"loss": 3.25, "perplexity": 25.79, "examples": 10, "samples": 4, "reward": None})
        for step in (1, 2):
            progress.step({"step": step} | metrics | {"loss": 3.0 - step})
        progress.done({"before": {"loss": 3.25}, "after": {"loss": 1.0}}, "runs/a")
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "before: loss 3.250  perplexity 25.790  (10 examples, 4 samples)"
    assert lines[1] == "step 1/4  loss 2.000  perplexity 12.1800  entropy 1.00e-06  tokens_per_second 300  left 3s"
    assert "loss         3.250 → 1.000" in lines
    assert "by step      █▁" in lines
    assert lines[-1] == "  less runs/a/after.jsonl"
    assert not any("reward" in line for line in lines)


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([1.0, math.nan, 0.0], "█▁"),
        ([0.0] * 500 + [1.0] * 500, "▁▁██"),
    ],
)  # fmt: skip
def test_a_sparkline_is_scaled_and_averaged(values, marks):
    assert sparkline(values, width=4) == marks


def test_what_cannot_be_seen_is_escaped():
    assert printable("a\u202eb\u200b\x9b2J\ud800é") == "a\\u202eb\\u200b\\x9b2J\\ud800é"
    assert printable("a\nb", keep="\n") == "a\nb"
    assert excerpt("x" * 500, width=10) == "xxxxx … xxxxx"


def test_a_reader_that_leaves_a_pipe_ends_the_run_as_print_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: rich raises SystemExit. What another thread prints is lost: it has no caller to tell."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        progress = Progress(1)
        thread = threading.Thread(target=progress.message, args=("from a thread",))
        thread.start()
        thread.join()
        with pytest.raises(BrokenPipeError):
            progress.message("from the run")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # closing writes what is left
