"""`covey rewards`: the table of recorded completions, and of fresh samples."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.config import recipe
from covey.data import sources
from covey.monitor.writer import prompt_text

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "tests" / "parity" / "golden" / "tiny-llama")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with recorded completions of two prompts of the recipe quickstart."""
    monkeypatch.chdir(tmp_path)
    rows = sources.load(recipe.load("quickstart").data).train[:2]
    lines = []
    for number, row in enumerate(rows):
        right = f"{row['letter']}ome people like it."
        for text in (right, "\x1b[2Jno"):
            lines.append({"step": 1, "group": number, "prompt": prompt_text(row["prompt"]), "text": text})
    Path("samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_recorded_completions_are_scored_again_by_prompt(capsys: Any) -> None:
    assert cli.main(["rewards", "quickstart", "--samples", "samples.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["groups"], found["completions"], found["verdict"]) == (2, 4, "yes")
    (first,) = [one for one in found["functions"] if one["name"] == "first_letter"]
    assert (first["mean"], first["informative"], first["scored"]) == (0.5, 1.0, 4)


def test_the_table_shows_no_control_characters(capsys: Any) -> None:
    assert cli.main(["rewards", "quickstart", "--samples", "samples.jsonl", "--prompts", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 completions of 1 prompts, 0% cut at the limit\n")
    assert "\\x1b[2Jno" in shown
    assert "\x1b" not in shown
    assert "There is a signal: the rewards differ in 1 of 1 groups" in shown


def test_what_a_run_adds_to_the_rewards_is_named(capsys: Any) -> None:
    words = ["rewards", "quickstart", "--samples", "samples.jsonl"]
    assert cli.main([*words, "--reward-model", TINY, "--grpo.overlong-buffer", "0.2"]) == 0
    added = f"the reward model {TINY} (reward_model), the penalty for long completions (grpo.overlong_buffer 0.2)"
    assert f"not included: {added}; " in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_included"] == []


def test_failures_are_counted(capsys: Any, here: Path) -> None:
    (here / "covey_rewards_test.py").write_text("def fails(prompts, completions, letter, **c):\n    raise ValueError\n")
    words = ["rewards", "quickstart", "--samples", "samples.jsonl", "--rewards", "covey_rewards_test:fails"]
    assert cli.main([*words, "--evaluation.accuracy=", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["functions"][0]["failed"], found["verdict"], found["setting"]) == (4, "no", "rewards")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ('{"prompt": "x"}\n', "samples.jsonl:1: has no column 'text'"),
        ('{"prompt": [], "text": "x"}\n', "row 1: prompt and text are not both text"),
        ('{"prompt": "x", "text": "x"}\n', "asks for 'letter', which no data column gives"),
    ],
)
def test_files_of_another_form_are_refused(text: str, told: str, capsys: Any) -> None:
    Path("samples.jsonl").write_text(text)
    assert cli.main(["rewards", "quickstart", "--samples", "samples.jsonl"]) == 2
    assert told in capsys.readouterr().err


def test_what_is_scored_over_several_turns_is_refused(capsys: Any) -> None:
    """docs/mistakes.md has an environment; this is the answer for tools."""
    assert cli.main(["rewards", "tools-smollm2"]) == 2
    assert "this recipe scores by what the model does with tools, in several turns" in capsys.readouterr().err
