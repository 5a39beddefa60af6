"""`covey compare`: settings that differ between runs, and their results."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.config import recipe
from tests.cli.test_runs import write_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_differences_and_results_stand_side_by_side(capsys: Any) -> None:
    write_run("a"), write_run("b", "--seed", "7", accuracy=0.5)
    assert cli.main(["compare", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"seed": ["0", "7"]}
    results = found["results"]
    assert [one["value"] for one in results["accuracy after"]] == [0.75, 0.5]
    assert results["accuracy after"][0]["error"] == 0.05
    error = pytest.approx(0.3 / 2**0.5)
    assert results["final reward"][0] == {"value": pytest.approx(1.95), "error": error, "step": None}
    assert results["best reward"][0] == {"value": 2.0, "error": 0.3, "step": 20}
    assert "best kl" not in results
    assert (results["steps"][0]["value"], results["seconds"][0]["value"]) == (20, 40.0)


def test_the_table_shows_errors_and_what_is_missing(capsys: Any) -> None:
    write_run("a")
    other = write_run("b\x1b[31m")
    (other / "summary.json").unlink()
    assert cli.main(["compare", "a", str(other)]) == 0
    shown = capsys.readouterr().out
    assert "The settings are the same." in shown
    assert "0.75 ± 0.05" in shown
    assert "\x1b" not in shown
    assert next(line for line in shown.splitlines() if line.startswith("accuracy before")).split()[-1] == "-"


def test_results_stand_before_the_settings_that_differ_or_are_set(capsys: Any) -> None:
    """Of a supervised run and one of reinforcement learning, which have hardly a setting in common."""
    write_run("a", "--grpo.beta", "0.5")
    write_run("b")
    (Path("b") / "recipe.yaml").write_text(recipe.to_yaml(recipe.load_any("sft-tiny")))
    assert cli.main(["compare", "a", "b"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "result a (finished) b (finished)"
    assert lines.index("accuracy after 0.75 ± 0.05 0.75 ± 0.05") < lines.index("setting that differs a b")
    assert "grpo.beta 0.5 not set" in lines
    assert not any(line.startswith("grpo.epsilon ") for line in lines)  # its default
    assert sum("not set" in line for line in lines) < 25


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare", "mine", "nowhere"], "this is no run folder"),
        (["compare", "mine", "mine", "--seed", "1"], "compare has no setting --seed"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], told: str, capsys: Any) -> None:
    write_run("mine")
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err
