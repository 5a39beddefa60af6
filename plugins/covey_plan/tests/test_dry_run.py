"""`covey train … --dry-run`: what it shows is what the run then does, and it writes nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli

TINY = str(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
SETTINGS = ["--model.source", TINY, "--max-prompt-length", "400", "--max-new-tokens", "4", "--rollout.slots", "8"]
SETTINGS += ["--num-generations", "2", "--prompts-per-step", "2", "--max-steps", "1", "--evaluation.prompts", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry_run(capsys: Any, *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_settings_have_their_origin(capsys: Any, here: Path) -> None:
    Path("mine.yaml").write_text("rewards: [first_letter]\ngrpo:\n  algorithm: dapo\n  epsilon: null\nseed: 3\n")
    found = dry_run(capsys, "train", "mine.yaml", *SETTINGS, "--grpo.beta=0.5", "--role_to_mesh.rollout.data=2")
    origins = {one["name"]: (one["value"], one["origin"]) for one in found["settings"]}
    assert origins["seed"] == (3, "mine.yaml:5")
    assert origins["grpo.algorithm"] == ("dapo", "mine.yaml:3")
    assert origins["grpo.beta"] == (0.5, "--grpo.beta")
    assert origins["grpo.epsilon_high"] == (0.28, "preset dapo")
    assert origins["grpo.epsilon"] == (0.2, "default")
    assert origins["training.num_epochs"] == (1, "default")
    assert "rollout.seed" not in origins
    actor, rollout = (found["memory"][name] for name in ("bytes", "bytes_of_rollout"))
    assert ("KV cache" in actor, "KV cache" in rollout, "optimizer" in rollout) == (False, True, False)
    assert [path.name for path in here.iterdir()] == ["mine.yaml"]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_the_run_does_what_a_dry_run_and_the_rewards_have_shown(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what its first line expects: the arrays beside those that are held, which are none here, and the disk."""
    monkeypatch.setattr("covey_plan.estimate.memory_in_use", lambda: 0)
    chats = [{"prompt": [{"role": "user", "content": f"{c}: tea"}], "letter": c, "topic": "tea"} for c in "ABCD"]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    settings = [*SETTINGS, "--max-prompt-length", "64", "--rollout.slots", "4", "--data.task", "jsonl"]
    words = ["quickstart", *settings, "--data.path", "chats.jsonl"]
    found = dry_run(capsys, "train", *words)
    assert not Path("runs").exists()
    assert cli.main(["rewards", *words, "--prompts", "2", "--json"]) == 0
    signal = json.loads(capsys.readouterr().out)
    assert cli.main(["train", *words]) == 0
    out = Path(found["out"])
    line = capsys.readouterr().out
    expected = re.search(r"expected: at least \S+, (.*) MB of memory, (.*) MB of disk", line)
    most = found["memory"]["bytes"]["gradients"] + found["memory"]["bytes"]["KV cache"]
    assert found["memory"]["bytes"]["gradients"] < float(expected[1]) * 1e6 <= 1.01 * most
    files = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
    assert files == pytest.approx(float(expected[2]) * 1e6, rel=0.3)
    assert {one.rstrip("/") for one in found["files"]} == {path.name for path in out.iterdir()}
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (len(found["tokens"]), found["steps"]) == (samples[0]["prompt_length"], len(metrics))
    assert samples[0]["prompt"].rpartition("user: ")[2].partition("\n")[0] in found["prompt"]
    assert found["budget"]["completions"] == len(samples)
    weights = found["memory"]["bytes"]["weights"]
    saved = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
    assert weights < saved < 1.5 * (weights + found["memory"]["bytes"]["optimizer"])
    known = {(sample["prompt"], sample["text"], sample["reward"]) for sample in samples}
    shown = [example[end] for example in signal["examples"] for end in ("best", "worst")]
    assert {(one["prompt"], one["text"], one["reward"]) for one in shown} <= known
    assert signal["functions"][-1]["mean"] == pytest.approx(sum(one["reward"] for one in samples) / len(samples))


@pytest.mark.slow
def test_a_supervised_run_is_shown_with_its_completion(capsys: Any) -> None:
    assert cli.main(["sft", "sft-arithmetic", *SETTINGS[:2], "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "its completion, which is learnt\n  | " in shown
    assert "steps     42: training.num_epochs 3 over the data\n" in shown
    assert shown.endswith("nothing was written\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-prompt-length", "20"], "has 3"),
        (["--envs.tools", "[calculator]"], "at most rollout.max_prompt_length = 400"),  # with the list of tools
        (["--max-new-tokens", "4000"], "the positions this model was made for"),
        (["--resume", "run"], "--dry-run beside --resume"),
    ],
)
def test_what_would_stop_the_run_is_told(words: list[str], told: str, capsys: Any) -> None:
    assert cli.main(["train", "quickstart", *SETTINGS, *words, "--dry-run"]) == 2
    assert told in capsys.readouterr().err
    assert not Path("runs").exists()
