"""A run on a terminal and in a notebook: the facts of a log, and no way for text of a model to take it over."""

import io
import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from covey.monitor.display import make_step_lines
from covey.monitor.formats import SampleLine
from covey.monitor.progress import Progress
from covey.monitor.record import StepRecord
from covey_status.notebook import NotebookOutput
from tests.monitor.test_progress import SAMPLES, row, story


def terminal(**options):
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=30, _environ={}, **options)


def test_a_terminal_shows_the_same_facts_live():
    shown = story(terminal())
    for fact in ("loading", "1/10", "2/10", "0.750 ±0.250", "Rain falls.", "19.0% → 75.0%", "\\x1b[31mred\\x07"):
        assert fact in shown
    assert "\x1b[31mred" not in shown


def test_colours_can_be_turned_off():
    assert "\x1b[3" not in story(terminal(no_color=True))


def test_the_live_view_ends_when_the_run_fails():
    progress = Progress(3, terminal())
    with pytest.raises(ZeroDivisionError), progress:
        raise ZeroDivisionError
    assert not progress.display.live.is_started


def test_the_present_phase_is_seen_on_a_terminal():
    console = terminal()
    with Progress(3, console) as progress:
        progress.phase("evaluating")
        progress.advance(3, 40)
        progress.phase("update")
        progress.compiling(3, "decode")
    assert "evaluating 3/40" in console.file.getvalue()
    assert "update: compiling program 3, decode" in console.file.getvalue()


@pytest.fixture
def drawn(monkeypatch):
    """What the one output of a notebook shows after each drawing."""
    bundles = []
    handle = SimpleNamespace(update=lambda bundle, raw: bundles.append(bundle))
    display = lambda bundle, raw, display_id: bundles.append(bundle) or handle  # noqa: E731
    monkeypatch.setattr("covey_status.notebook.import_module", lambda name: SimpleNamespace(display=display))
    return bundles


def test_a_notebook_has_one_output_that_stays_short(monkeypatch, drawn):
    monkeypatch.setattr("covey_status.notebook.NOTEBOOK_INTERVAL", 0.0)
    console = Console(file=io.StringIO(), force_jupyter=True, width=80)
    with Progress(500, console) as progress:
        progress.evaluation("before", {"reward": 0.5})
        for step in range(1, 51):
            progress.phase("update")
            progress.compiling(1)
            progress.step(row(step), SAMPLES)
        progress.done({"steps": 50, "seconds": 9.0}, "runs/a", chat=False)
    assert console.file.getvalue() == ""
    last = drawn[-1]["text/plain"].splitlines()
    assert len(last) <= 32
    assert any(line.split()[:1] == ["50/500"] for line in last)
    assert any("50/500  " in line and "left" in line for line in last)
    assert not any("covey chat" in line or "\x1b" in line for line in last)
    assert any("update: compiling program 1" in bundle["text/plain"] for bundle in drawn)


def test_a_notebook_has_curves_and_the_latest_completions_escaped(monkeypatch, drawn):
    """A curve has its steps and its range; what a model writes is no markup."""
    monkeypatch.setattr("covey_status.notebook.NOTEBOOK_INTERVAL", 0.0)
    console = Console(file=io.StringIO(), force_jupyter=True, width=80)
    with Progress(9, console) as progress:
        for step, reward in enumerate((0.0, 1.0, 0.5), 1):
            latest = [SampleLine(f"<i>prompt {step}</i>", f"<script>{n}</script>\x1b[2J", n) for n in range(5)]
            progress.step({"step": step, "reward": reward, "kl": math.nan}, [*latest, SampleLine("<b>", "", math.nan)])
    page = drawn[-1]["text/html"]
    assert 'points="4.0,76.0 124.0,4.0 244.0,40.0 244.0,40.0"' in page
    assert "<figcaption>reward <b>0.5000</b></figcaption>" in page
    assert "0.0000 to 1.0000, steps 1 to 3" in page
    assert "<figcaption>kl" not in page
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert [cells[n : n + 3] for n in range(0, len(cells), 3)] == [
        *([f"+{n}.00", "&lt;i&gt;prompt 3&lt;/i&gt;", f"&lt;script&gt;{n}&lt;/script&gt;\\x1b[2J"] for n in (4, 3, 0)),
        ["+nan", "&lt;b&gt;", "(empty)"],
    ]
    assert not re.search(r"<script|<i>|<b>[^0-9]|\x1b", page)


def test_an_output_is_not_drawn_too_often(monkeypatch, drawn):
    now = 0.0
    monkeypatch.setattr("covey_status.notebook.time.monotonic", lambda: now)
    output = NotebookOutput(2)
    for text in ("<b>1</b>", "2", "3"):
        output.write(text)
        now += 0.2
    output.stop()
    assert [bundle["text/plain"] for bundle in drawn] == ["<b>1</b>", "2\n3"]
    assert drawn[0]["text/html"] == "<pre>&lt;b&gt;1&lt;/b&gt;</pre>"
    monkeypatch.setattr("covey.monitor.display.Console", lambda: SimpleNamespace(is_jupyter=True))
    lines = make_step_lines(("reward",))
    for step in range(1, 101):
        now += 1.0
        lines(StepRecord(step, 1, 100, {"step": step, "reward": 0.5}))
    assert len(drawn[-1]["text/plain"].splitlines()) == 30
    assert drawn[-1]["text/plain"].endswith("step 100/100  reward 0.5")
