"""A short soak: the long one is `python -m benchmarks.soak`, whose result is in benchmarks/RESULTS.md."""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main

REPOSITORY = Path(__file__).parents[2]
TINY = str(REPOSITORY / "tests" / "parity" / "golden" / "tiny-llama")
SMALL = [
    "data.train_fraction=0.1", "training.prompts_per_step=4", "grpo.num_generations=2", "rollout.slots=8",
    "evaluation.prompts=4", "training.max_tokens_per_micro_batch=256", "training.off_policy_steps=1",
    "model.lora.rank=4", "rollout.max_prompt_length=32",
]  # fmt: skip


class Inside:
    """A run of the command in a thread of this process, as `benchmarks.soak` sees a process."""

    def __init__(self, words: Sequence[str], environment: object):
        self.args, self.pid, self.returncode = words, os.getpid(), None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        code: Any = "an exception"
        try:
            code = main(self.args)
        finally:
            self.returncode = code

    def __enter__(self) -> "Inside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> Any:
        return self.returncode

    def wait(self) -> None:
        self._thread.join()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_a_run_killed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Ends as the one left alone, bit for bit, which leaks no thread and no file. The one that is killed is a process;
    what it leaves is gone on with here, where the other one has made the programs.
    """
    monkeypatch.syspath_prepend(str(REPOSITORY))
    from benchmarks import soak

    start, victim = soak._started, ["--out", str(tmp_path / "killed")]
    monkeypatch.setattr(soak, "_started", lambda words, *how: (start if words[-2:] == victim else Inside)(words, *how))
    monkeypatch.setattr(soak, "caching", lambda folder: os.environ["JAX_COMPILATION_CACHE_DIR"])
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    words = ["--steps", "30", "--kills", "1", "--every", "5", "--linger", "0.3", "--folder", str(tmp_path)]
    assert soak.main([*words, "--model", TINY, *SMALL]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["differences"] == []
    assert told["kills"] == 1
    for name in ("threads", "files"):
        early, late = told[name]
        assert late < early + 12  # pools fill up early in a run; a leak a step would be more than 13
    first, last = told["memory_mb"]
    assert last < first + 100
