"""The notebook of the examples runs from top to bottom, and what it shows stays short."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CELLS = [
    cell
    for cell in json.loads((Path(__file__).parents[1] / "examples" / "quickstart.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]


def test_the_notebook_is_committed_without_outputs() -> None:
    assert all(not cell["outputs"] for cell in CELLS)


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], list[Any]]]:
    """`execute(source)`: what a cell displays, as it stands at its end, and its value. The shell is that of Jupyter's
    kernel, without a process of its own.
    """
    zmqshell = pytest.importorskip("ipykernel.zmqshell")
    from IPython.utils.capture import capture_output

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts its own there
    shell = zmqshell.ZMQInteractiveShell.instance()
    shell.history_manager.enabled = False
    monkeypatch.setattr(shell, "_showtraceback", lambda *_: None)  # it would send it to a client

    def run(source: str) -> list[Any]:
        with shell.display_trap, capture_output() as captured:
            shell.run_cell(source).raise_error()
        displays = enumerate(captured.outputs)
        return list({(shown.transient or {}).get("display_id", number): shown for number, shown in displays}.values())

    yield run
    zmqshell.ZMQInteractiveShell.clear_instance()


@pytest.mark.slow
@pytest.mark.usefixtures("small_scratch")
@pytest.mark.filterwarnings("ignore")  # those of the packages that run notebooks
def test_the_notebook_runs(execute: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("covey_report")
    monkeypatch.setitem(sys.modules, "pandas", None)  # nothing of Covey installs it
    outputs = {source: execute(source) for source in ("".join(cell["source"]) for cell in CELLS)}
    training, steps, names = (
        next(shown for source, shown in outputs.items() if word in source)
        for word in ("learner = train_grpo", "learner.history", "iterdir")
    )
    assert_one_output(training)
    files = ("metrics.jsonl", "samples.jsonl", "report.html", "checkpoints")
    assert all(name in names[0].data["text/plain"] for name in files)
    assert "reward_std" in steps[0].data["text/plain"]


def assert_one_output(outputs: list[Any]) -> None:
    """The steps are in one output that was redrawn, with the status at its end."""
    [output] = [shown for shown in outputs if shown.transient]  # without the value, which the cell's `;` hides
    shown = output.data["text/plain"]
    assert [line.split()[0] for line in shown.splitlines() if line.strip()[:3] in {f"{n}/6" for n in range(1, 7)}] == [
        f"{n}/6" for n in range(1, 7)
    ]
    assert "report.html" in shown
    assert "\x1b" not in shown
    figures, _, lines = output.data["text/html"].partition("<pre>")
    assert all(f"<figcaption>{name} " in figures for name in ("reward", "eval/reward", "completions/mean_length"))
    assert figures.count("<tr>") == 5, "a heading, and the two best and the two worst completions of the last step"
    assert "report.html" in lines
