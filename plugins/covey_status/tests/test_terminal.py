"""The table of steps and the status lines: whatever the width of the terminal, no line is wider, and what matters most
stays.
"""

import io
from collections.abc import Iterable, Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console

from covey.monitor.formats import SampleLine
from covey.monitor.progress import Progress
from covey.monitor.status import Status
from covey_status.terminal import StatusView, StepTable

ROW = {"step": 37, "reward": 1.375, "reward_error": 0.0625, "kl": 0.0123, "step_time": 12.5, "tokens_per_second": 58.0}
ROW |= {"frac_reward_zero_std": 0.125, "completions/mean_length": 31.0, "completions/clipped_ratio": 0.02}
ROW |= {"entropy": 2.25, "grad_norm": 0.5, "learning_rate": 1e-5}
NOW = Status(
    step=37,
    total=200,
    phase="update",
    phase_seconds=14.0,
    compiling=2,
    seconds=723.0,
    left=2462.0,
    tokens_per_second=58.0,
    memory=4_512_000_000,
)
NASTY = "\x1b]0;owned\x07[bold red]x[/]\u202e名前名前名前名前名前"


def drawn(width: int, *renderables: object, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, record=True, force_terminal=True, _environ={})
    for renderable in renderables:
        console.print(renderable)
    return console.export_text().splitlines()


def view(status: Status = NOW, values: Sequence[float] = (0.0, 0.5, 1.0), main_metric: str = "reward") -> StatusView:
    return StatusView(lambda: status, main_metric, values, moving=False)


def table(width: int, row: dict[str, float] = ROW, show: Sequence[str] = ("kl",)) -> list[str]:
    return [line.plain for line in StepTable("reward", show).lines(row, 200, width)]


def test_columns_are_left_out_by_priority() -> None:
    assert table(40) == [
        "   step         reward        kl  length",
        " 37/200   1.375 ±0.062    0.0123      31",
    ]
    assert table(60)[0] == "   step         reward        kl  length  zero std   tok/s"
    assert table(80)[0] == "   step         reward        kl  length  zero std   tok/s    time  clipped"
    assert table(120)[0].endswith("tok/s    time  clipped   entropy  grad_norm        lr")
    assert table(120)[1].endswith("   58   12.5s       2%    2.2500     0.5000  1.00e-05")
    assert table(10)[1] == " 37/200"


def test_the_bar_stays_and_figures_are_left_out_by_priority() -> None:
    first = {width: drawn(width, view())[0] for width in (20, 40, 60, 80, 120)}
    assert first[20] == "━━──────────  37/200"
    assert first[40].split("  ")[1:] == ["37/200", "12m03s", "left 41m02s"]
    assert first[60].split("  ")[1:] == ["37/200", "12m03s", "left 41m02s", "58 tok/s", "4.5 GB"]
    assert first[80].startswith("━" * 6 + "─")
    assert first[120].count("━") == 48 * 37 // 200


def test_compilation_is_named_and_the_plot_gives_way() -> None:
    second = {width: drawn(width, view())[1] for width in (20, 40, 60, 80)}
    assert second[80] == "update: compiling program 2 14s  reward ▁▅█"
    assert second[40] == "update: compiling program 2 14s"
    assert second[20] == "update: compiling p…"


@pytest.mark.parametrize("width", [1, 20, 60, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    hostile = Status(step=3, total=10**12, phase=NASTY, done=10**9, parts=10**9, seconds=1e9, left=1e12, memory=10**18)
    lines = [line for status in (NOW, hostile, Status()) for line in drawn(width, view(status, main_metric=NASTY))]
    lines += table(width) + table(width, ROW | {NASTY: 1e300}, show=(NASTY, "kl"))
    assert max(map(cell_len, lines)) <= width


def test_untrusted_names_are_shown_not_obeyed() -> None:
    shown = "\n".join(
        [*drawn(120, view(Status(phase=NASTY), main_metric=NASTY)), *table(120, ROW | {NASTY: 1.0}, (NASTY,))]
    )
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[bold red]x" in shown


def test_without_a_total_there_is_no_bar() -> None:
    assert drawn(80, view(Status(phase="loading", seconds=3.0), values=()))[0] == "3s"


def test_a_terminal_without_utf8_gets_other_marks() -> None:
    first, second = drawn(80, view(), encoding="ascii")[:2]
    assert first.startswith("######---")
    assert second.endswith("reward _+#")


def test_the_header_returns_after_some_rows_and_when_the_width_changes() -> None:
    steps = StepTable("reward")

    def headers(rows: Iterable[int], width: int) -> int:
        lines = [line.plain for step in rows for line in steps.lines(ROW | {"step": step}, 50, width)]
        return sum("step" in line for line in lines)

    assert headers(range(1, 21), 80) == 1
    assert headers(range(21, 23), 80) == 1
    assert headers(range(23, 25), 40) == 1


@pytest.mark.parametrize("width", [40, 120])
def test_a_run_on_a_terminal_keeps_its_history_and_no_line_wraps(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=30, record=True, force_terminal=True, _environ={})
    progress = Progress(200, console, show=("kl",))
    for step in range(1, 8):
        progress.step(ROW | {"step": step}, [SampleLine(NASTY * 9, NASTY * 9, 1.0), SampleLine("p", "x" * 500, 0.0)])
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines if "/200" in line] == [f"{step}/200" for step in range(1, 8)]
    assert sum(line.startswith("  best") for line in lines) == 2
    assert max(map(cell_len, lines)) <= width
