"""`covey rewards`: the table of recorded completions, and of fresh samples."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.config import recipe
from covey.data import sources
from covey.monitor.formats import prompt_text

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "tests" / "parity" / "golden" / "tiny-llama")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with recorded completions of two prompts of the recipe quickstart."""
    monkeypatch.chdir(tmp_path)
    rows = sources.load_data(recipe.load("quickstart").data).train[:2]
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
    assert shown.startswith("2 completions of 1 prompts, 0% cut at the limit, 0% empty\n")
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


def test_a_recorded_text_is_no_episode(capsys: Any) -> None:
    """MISTAKES.md has an environment; this is the answer for tools."""
    assert cli.main(["rewards", "tools-smollm2", "--completion", "4"]) == 2
    assert "this recipe scores episodes of several turns, and a text is not an episode" in capsys.readouterr().err


def test_one_answer_is_scored_by_hand(capsys: Any) -> None:
    words = ["rewards", "arithmetic-smollm2", "--row", "2"]
    row = sources.iter_rows(recipe.load("arithmetic-smollm2").data)[0]
    second = [*row][1]
    assert cli.main([*words, "--completion", second["answer"], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completions"], found["examples"][-1]["best"]["reward"]) == (1, 1.0)
    assert cli.main([*words, "--completion", ""]) == 0
    assert "completion  (empty)\n" in capsys.readouterr().out
    assert cli.main(["rewards", "arithmetic-smollm2", "--row", "9999", "--completion", "4"]) == 2
    assert "there is no training row 9999" in capsys.readouterr().err
    assert cli.main([*words, "--completion", "4", "--prompts", "3"]) == cli.main(words) == 2


def test_empty_completions_are_marked_and_named(capsys: Any) -> None:
    rows = sources.load_data(recipe.load("quickstart").data).train[:4]
    lines = [
        {"group": n, "prompt": prompt_text(rows[n]["prompt"]), "text": text}
        for n in range(4)
        for text in ("", "a", "b b", "cc")
    ]
    Path("samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("covey_rewards_blank.py").write_text(
        "def blank(completions, **c):\n    return [float(not t) for t in completions]\n"
    )
    words = ["rewards", "quickstart", "--samples", "samples.jsonl", "--rewards", "covey_rewards_blank:blank"]
    assert cli.main([*words, "--evaluation.accuracy="]) == 0
    shown = capsys.readouterr().out
    assert "But empty completions get the best reward, 1: 4 of 16 are empty." in shown
    assert "+1  (empty)" in shown
    assert "0 × 12, 1 × 4" in shown


@pytest.mark.slow
def test_episodes_are_played_and_scored_by_the_environment(capsys: Any) -> None:
    pytest.importorskip("covey_envs")
    words = ["rewards", "guess-tiny", "--model.source", "scratch:guess-tiny", "--prompts", "1", "--rollout.slots", "2"]
    assert cli.main([*words, "--num-generations", "2", "--envs.max-turns", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["functions"]] == ["guess", "total reward"]
    assert (found["completions"], found["functions"][0]["scored"]) == (2, 2)
    assert found["examples"][0]["best"]["text"].startswith("assistant: ")
