"""A run with delta nets: killed and resumed it is the run that was never killed, and trainer and sampler agree."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.cli.main import main

REPOSITORY = Path(__file__).parents[3]
SETTINGS = [
    "--max-steps", "4", "--prompts-per-step", "4", "--num-generations", "4", "--checkpoint-every-n-steps", "1",
    "--max-sampling-rounds", "1", "--eval-every-n-steps", "0", "--evaluation.prompts", "8", "--row-length", "64",
    "--slots", "16", "--training.max-tokens-per-micro-batch", "64", "--rewards", "digits:share",
]  # fmt: skip


REWARD = "def share(completions):\n    return [sum(map(str.isdigit, c)) for c in completions]\n"


def killed_after(step: int, words: list[str], out: Path) -> None:
    """Run `covey` in a process, and kill it when it has written this many steps."""
    from benchmarks.soak import steps_of

    paths = os.pathsep.join([str(REPOSITORY), str(out.parent)])
    with subprocess.Popen([sys.executable, "-m", "covey", *words], env=os.environ | {"PYTHONPATH": paths}) as run:
        while run.poll() is None and steps_of(out) < step:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_a_killed_run_is_the_run_that_was_never_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, optimizer, metrics and samples by bit; rows of 64 tokens hold several groups, in two micro-batches."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    from benchmarks.small_models import write_model
    from benchmarks.soak import differences, steps_of

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "digits.py").write_text(REWARD)
    write_model(tmp_path / "model", "qwen3.5", width=32)
    words = ["train", "arithmetic-tiny", *SETTINGS, "--model.source", str(tmp_path / "model"), "--out"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert main([*words, str(straight)]) == 0
    killed_after(2, [*words, str(killed)], killed)
    assert steps_of(killed) < 4
    assert main(["train", "--resume", str(killed)]) == 0
    assert differences(straight, killed) == []
    steps = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [step["sampling/token_agreement"] for step in steps] == [1.0] * 4
    assert min(step["grad_norm"] for step in steps) > 0


@pytest.mark.slow
def test_a_model_whose_first_layer_has_a_state_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    from benchmarks.small_models import write_model

    write_model(tmp_path / "model", "qwen3.5", width=32)
    words = ["arithmetic-tiny", *SETTINGS[:-2], "--model.source", str(tmp_path / "model")]
    assert main(["plan", *words, "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)["phases"]
    assert {"rollout", "update"} <= {phase["name"] for phase in phases}
