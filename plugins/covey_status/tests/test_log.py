"""The display in a log file: phases, long ones, compilation, and samples now and then."""

import io
import math
import threading
import time

from rich.console import Console

from covey.monitor.formats import SampleLine
from covey.monitor.progress import Progress

SAMPLES = [
    SampleLine("about rain", "Rain falls.", 1.0),
    SampleLine("about rain", "\x1b[31mred\x07", 0.0),
    SampleLine("about snow", "[bold]Snow[/bold]", 1.0),
    SampleLine("about snow", "Soft.", 1.0),
]


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


def test_a_log_has_phases_steps_and_samples():
    shown = story(plain())
    lines = shown.splitlines()
    assert lines[0].endswith("s] loading")
    assert lines[1].startswith("before: ")
    assert lines[2].startswith("step 1/10")
    assert lines[3] == "  best  +1.00  about rain  →  Rain falls."
    assert lines[4] == "  worst +0.00  about rain  →  \\x1b[31mred\\x07"
    assert lines[5].startswith("step 2/10")
    assert "\x1b" not in shown


def test_a_row_with_little_in_it_is_shown_too():
    console = plain()
    with Progress(3, console) as progress:
        progress.step({"step": 3}, [SampleLine("p", "x", math.nan), SampleLine("q", "[red]x[/red] [/]", 1.0)])
    assert console.file.getvalue().splitlines()[:2] == ["step 3/3", "  best  +1.00  q  →  [red]x[/red] [/]"]


def test_samples_come_now_and_then():
    console = plain()
    with Progress(12, console) as progress:
        for step in range(1, 13):
            progress.step(row(step), SAMPLES)
    lines = console.file.getvalue().splitlines()
    after = [lines[i - 1].split()[1] for i, line in enumerate(lines) if line.startswith("  best")]
    assert after == ["1/12", "5/12", "10/12", "12/12"]


def test_a_log_is_told_of_a_phase_once_between_evaluations():
    console = plain()
    with Progress(3, console) as progress:
        for step in (1, 2):
            progress.phase("rollout")
            progress.phase("update")
            progress.step({"step": step})
        progress.evaluation("after", {})
        progress.phase("rollout")
    lines = console.file.getvalue().splitlines()
    assert [line.split()[-1] for line in lines] == ["rollout", "update", "1/3", "2/3", "after:", "rollout"]


def test_a_log_is_not_told_of_an_evaluation_behind_its_result(monkeypatch):
    """Programs may be compiled, or time pass, before the next phase begins."""
    monkeypatch.setattr("covey_status.log.SLOW_COMPILE", 0.0)
    monkeypatch.setattr("covey_status.log.HEARTBEAT", 0.0)
    console = plain()
    with Progress(3, console) as progress:
        progress.phase("evaluating before training")
        progress.advance(8, 8)
        progress.evaluation("before", {"accuracy": 0.5, "samples": 8})
        for number in (1, 0):
            progress.compiling(number, "convert_element_type")
            time.sleep(0.05)
        progress.phase("rollout")
    lines = console.file.getvalue().splitlines()
    behind = lines[lines.index("before: accuracy 50.0%  (8 samples)") + 1 :]
    assert not any("evaluating" in line or line.endswith("] ") for line in behind)


def test_phases_of_threads_are_shown_beside_that_of_the_run_as_long_as_they_live():
    began, end, console = threading.Semaphore(0), threading.Event(), plain()
    with Progress(3, console) as progress:

        def draw(phase):
            progress.phase(phase)
            began.release()
            end.wait()

        threads = [threading.Thread(target=draw, args=(n,), name=n) for n in ("score", "sample")]
        progress.phase("update")
        for thread in threads:
            thread.start()
            began.acquire()
        assert (progress.status().phase, progress.status().activity) == ("update", "update + sample + score")
        progress.step({"step": 1})
        assert progress.status().activity == "sample + score"
        end.set()
        for thread in threads:
            thread.join()
        assert progress.status().activity == ""
    assert [line.partition("] ")[2] for line in console.file.getvalue().splitlines()[:3]] == [
        "update",
        "update + score",
        "update + sample + score",
    ]


def test_a_long_phase_is_heard_of_in_a_log(monkeypatch):
    console, now = plain(), 0.0
    monkeypatch.setattr("covey.monitor.progress.time.monotonic", lambda: now)
    with Progress(3, console) as progress:
        progress.phase("evaluating")
        for done in range(1, 41):
            now = float(done)
            progress.advance(done, 40)
    assert console.file.getvalue().splitlines() == [
        "[   0.0s] evaluating",
        "[  15.0s] evaluating 15/40",
        "[  30.0s] evaluating 30/40",
    ]


def test_a_program_that_takes_long_to_compile_is_told_in_a_log(monkeypatch):
    console = plain()
    monkeypatch.setattr("covey_status.log.SLOW_COMPILE", 0.05)
    with Progress(3, console) as progress:
        progress.phase("update")
        for number in (1, 2, 3):
            progress.compiling(number, "decode")
            time.sleep(0.3 * (number == 2))
            progress.compiling(0)
        progress.phase("sync")
        time.sleep(0.1)
    lines = [line.split("] ")[1] for line in console.file.getvalue().splitlines()]
    assert lines == ["update", "update: compiling program 2, decode", "sync"]
