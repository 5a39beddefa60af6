"""The notebook of the examples runs from top to bottom, and what it shows stays short."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the packages that run notebooks
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    training = next(cell for cell in code if "learner.train" in cell.source)
    assert_one_output(training.outputs)
    names = next(cell for cell in code if "iterdir" in cell.source).outputs[0].data["text/plain"]
    assert all(name in names for name in ("metrics.jsonl", "samples.jsonl", "report.html", "checkpoints"))
    frame = next(cell for cell in code if "to_frame" in cell.source).outputs[0].data["text/plain"]
    assert "reward_std" in frame


def assert_one_output(outputs: list[Any]) -> None:
    """The steps are in one output that was redrawn, with the status at its end."""
    [output] = outputs
    shown = output.data["text/plain"]
    assert [line.split()[0] for line in shown.splitlines() if line.strip()[:3] in {f"{n}/6" for n in range(1, 7)}] == [
        f"{n}/6" for n in range(1, 7)
    ]
    assert "report.html" in shown
    assert "\x1b" not in shown
    assert output.data["text/html"].startswith("<pre>")
