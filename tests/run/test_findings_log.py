"""What a run says of itself: a problem once it is certain, all findings at its end, and nothing that ends the run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.config import recipe
from covey.display import show_log
from covey.report.diagnosis.diagnose import CERTAIN, FIRST_STEPS
from covey.run import findings_log
from covey.run.findings_log import FindingsLog

STEPS = FIRST_STEPS + CERTAIN + 2
RECIPE = recipe.load("quickstart")


def rows(count: int = STEPS, **values: float) -> list[dict[str, Any]]:
    same = {"reward": 0.3, "reward_std": 0.0, "reward_error": 0.0, "frac_reward_zero_std": 1.0, "learning_rate": 1e-5}
    return [{"step": number, **same, **values} for number in range(1, count + 1)]


def folder_of(path: Path, **how: bool) -> Any:
    (path / "recipe.yaml").write_text(recipe.to_yaml(RECIPE))
    return SimpleNamespace(path=path, **({"writes": True, "resuming": False} | how))


def said(folder: Any, steps: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Messages and warnings of a run with these rows."""
    messages: list[str] = []
    warnings: list[str] = []
    with show_log(messages.append, warnings.append):
        log = FindingsLog(RECIPE, folder, {"accuracy": 0.1, "pass@k": None})
        with (folder.path / "metrics.jsonl").open("a") as file:
            for row in steps:
                file.write(json.dumps(row) + "\n")
                log.step(row)
        log.end()
    return messages, warnings


def test_a_problem_is_said_once_and_again_at_the_end(tmp_path: Path) -> None:
    messages, (during, at_the_end) = said(folder_of(tmp_path), rows())
    assert during.startswith(f"step {FIRST_STEPS + CERTAIN}: The reward is the same for every completion")
    assert f"every completion of {FIRST_STEPS + CERTAIN} steps scored 0.3 (640 completions)" in during
    assert "Change: rewards: see in samples.jsonl" in during
    assert at_the_end.startswith("diagnosis: The reward is the same for every completion")
    assert f"every completion of {STEPS} steps" in at_the_end
    assert messages == []


def test_a_sound_run_says_so_without_a_warning(tmp_path: Path) -> None:
    steps = [row | {"reward": 0.1 * row["step"], "reward_std": 0.3} for row in rows()]
    (message,), warnings = said(folder_of(tmp_path), steps)
    assert message.startswith("diagnosis: Nothing wrong was found. Seen: the mean reward went 0.2 (steps 1 to 3)")
    assert warnings == []


def test_a_resumed_run_knows_its_steps_before(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    _, (during, _) = said(folder_of(tmp_path, resuming=True), rows(40)[20:])
    assert during.startswith(f"step {20 + CERTAIN}: ")
    assert f"every completion of {20 + CERTAIN} steps" in during


def test_only_the_process_that_writes_says_it(tmp_path: Path) -> None:
    assert said(folder_of(tmp_path, writes=False), rows()) == ([], [])


def test_a_diagnosis_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(findings_log.LiveDiagnosis, "step", fail)
    messages, (warning,) = said(folder_of(tmp_path), rows())
    assert warning == "the diagnosis failed: ValueError: broken; the run goes on without it"
    assert messages == []
