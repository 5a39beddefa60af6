"""What may happen to a run from outside: signals, two runs in one folder, a phase that hangs, a full disk, numbers that
are none. Each is done for real, to a run of a tiny model or to the piece that has to bear it.
"""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from covey import recipes
from covey.cli.main import main
from covey.config import recipe
from covey.config.metrics import CLOCKS
from covey.config.recipe import SFTRecipe
from covey.errors import STOPPED, NumbersError, ResumeError, Stopped
from covey.monitor.writer import MetricsWriter
from covey.run.saved_run import SavedRun
from covey.run.signals import SIGNALS
from covey.train.checkpoint import Checkpointer
from tests.one_layer import ONE_LAYER

REPOSITORY = Path(__file__).parents[2]
TINY = str(ONE_LAYER)
SMALL_RUN = Path(__file__).with_name("small_run.txt").read_text(encoding="utf-8").split()
LETTERS = ["data.task=jsonl", f"data.path={REPOSITORY / 'tests' / 'letters.jsonl'}"]
SETTINGS = [f"model.source={TINY}", *LETTERS, *SMALL_RUN]
SFT_SETTINGS = [
    f"model.source={TINY}",
    *LETTERS,
    "training.max_steps=3",
    "training.batch_size=4",
    "evaluation.answers=0",
    "evaluation.prompts=4",
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]


def ready(*more: str) -> recipe.Recipe:
    return recipe.load("quickstart", [*SETTINGS, *more])


def metrics(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in found]


def weights(folder: Path) -> tuple[int | None, list[np.ndarray]]:
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        state, _ = saves.restore()
        return saves.latest(), [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], None]:
    """`at_step(n, do)`: `do` is called when step n is about to be written."""
    write = MetricsWriter.step

    def arm(step: int, do: Callable[[], Any]) -> None:
        def written(self: MetricsWriter, row: dict[str, Any]) -> None:
            if row["step"] == step:
                do()
            write(self, row)

        monkeypatch.setattr(MetricsWriter, "step", written)

    return arm


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that no signal stops."""
    out = tmp_path_factory.mktemp("straight") / "run"
    recipes.train(ready(), out)
    return out


# --- signals


def test_a_signal_ends_the_step_saves_and_leaves(tmp_path: Path, straight: Path, at_step: Any, capsys: Any) -> None:
    """With a code of its own and the command that goes on; gone on with, the run is the one never stopped."""
    pytest.importorskip("covey_report")
    stopped = tmp_path / "stopped"
    words, before = ["quickstart", "--out", str(stopped), *SETTINGS], {n: signal.getsignal(n) for n in SIGNALS}
    for step, number in enumerate(SIGNALS, 2):
        at_step(step, partial(signal.raise_signal, number))
        assert main(["train", *words]) == STOPPED
        log, told = capsys.readouterr()
        assert f"stopped by {number.name}; step {step} is saved" in told
        assert f"go on with: covey train --resume {stopped}" in told
        assert f"stopped by {number.name}; step {step} is saved; to go on: covey train --resume {stopped}" in log
        assert f"diagnosis: The run is too short to judge. Seen: {step} steps;" in log
        assert weights(stopped)[0] == step
        assert signal.getsignal(number) == before[number]
        words = ["--resume", str(stopped)]
    assert main(["train", *words]) == 0
    assert metrics(stopped) == metrics(straight)
    for one, other in zip(weights(stopped)[1], weights(straight)[1], strict=True):
        assert np.array_equal(one, other)


def test_a_signal_stops_supervised_training_too(tmp_path: Path, at_step: Any, capsys: Any) -> None:
    pytest.importorskip("covey_sft")
    out = tmp_path / "run"
    at_step(1, lambda: signal.raise_signal(signal.SIGTERM))
    assert main(["sft", "sft-smollm2", "--out", str(out), *SFT_SETTINGS]) == STOPPED
    assert f"go on with: covey sft --resume {out}" in capsys.readouterr().err
    assert weights(out)[0] == 1


LISTENER = """
    import contextlib, os, sys, time
    from covey.run.signals import SignalHandler
    from covey.errors import Stopped

    def listen(where, until):
        with SignalHandler() as signals:
            try:
                with signals.deferring() if where == "steps" else contextlib.nullcontext():
                    print(os.getpid(), flush=True)
                    while not (until == "once" and signals.requested()):
                        time.sleep(0.05)
                    print("saved", flush=True)
            except Stopped as stopped:
                print("left", stopped.signal, flush=True)

    for line in sys.stdin:
        child = os.fork()
        if not child:
            listen(*line.split())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""
"""A process that has imported everything; each line it is sent makes a child that waits for signals."""


@pytest.fixture(scope="module")
def listeners() -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", textwrap.dedent(LISTENER)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as process:  # type: ignore[call-overload]
        yield process


@pytest.mark.parametrize(
    ("how", "signals", "code", "says"),
    [
        ("steps once", ["TERM"], 0, ["saved", "left SIGTERM"]),
        ("steps never", ["TERM", "TERM"], 128 + signal.SIGTERM, []),
        ("steps never", ["INT", "INT"], 128 + signal.SIGINT, []),
        ("elsewhere never", ["TERM"], 0, ["left SIGTERM"]),
    ],
)
def test_the_first_signal_waits_for_the_step_and_the_second_for_nothing(
    listeners: "subprocess.Popen[str]", how: str, signals: list[str], code: int, says: list[str]
) -> None:
    assert listeners.stdin is not None
    assert listeners.stdout is not None
    listeners.stdin.write(f"{how}\n")
    listeners.stdin.flush()
    child = int(listeners.stdout.readline())
    for name in signals:
        os.kill(child, signal.Signals[f"SIG{name}"])
        time.sleep(0.3)
    told = [listeners.stdout.readline().strip()]
    while told[-1] and not told[-1].startswith("ended"):
        told.append(listeners.stdout.readline().strip())
    assert told == [*says, f"ended {code}"]


def signals_at(patch: pytest.MonkeyPatch, owner: Any, name: str, moment: Any, number: signal.Signals) -> None:
    """Lets the signal come when `name` of `owner` is called for `moment`."""
    call = getattr(owner, name)

    def called(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        if first == moment:
            signal.raise_signal(number)
        return call(self, first, *args, **kwargs)

    patch.setattr(owner, name, called)


def test_a_signal_in_the_last_save_or_the_last_evaluation_leaves_a_run_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The trap: noted while the checkpoint is written, and never looked at again."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        signals_at(patch, Checkpointer, "save", 3, signal.SIGTERM)
        assert main(["train", "quickstart", *SETTINGS, "--max-steps", "3", "--out", str(out)]) == STOPPED
    assert "stopped by SIGTERM; step 3 is saved" in capsys.readouterr().err
    assert weights(out)[0] == 3
    assert not (out / "after.jsonl").exists()
    with monkeypatch.context() as patch:
        signals_at(patch, SavedRun, "evaluation", "after", signal.SIGINT)
        assert main(["train", "--resume", str(out)]) == STOPPED
    told = capsys.readouterr().err
    assert "stopped by SIGINT; step 3 is saved" in told
    assert f"covey train --resume {out}" in told
    assert main(["train", "--resume", str(out)]) == 0
    assert (out / "after.jsonl").exists()


COMPILING = """
    import os
    import sys
    import threading

    import jax
    import jax.numpy as jnp

    from covey.cli import main as cli
    from covey.run.saved_run import SavedRun

    def evaluate(self):
        def program(x):
            for _ in range(10_000):
                x = jax.lax.sort(x) * x
            return x

        lowered = jax.jit(program).lower(jnp.ones(20))
        threading.Timer(0.5, os.kill, (os.getpid(), int(os.environ["SENT"]))).start()
        lowered.compile()

    SavedRun.begin = evaluate
    sys.exit(cli.main())
"""
"""The command `covey`, with an evaluation for which a program is compiled that takes long, and a signal meanwhile."""


def test_a_signal_while_jax_compiles_ends_the_run_with_its_code(tmp_path: Path) -> None:
    """The trap: a thread compiles on while the interpreter takes JAX down, and crashes every other time."""
    command = [sys.executable, "-c", textwrap.dedent(COMPILING), "train", "quickstart", *SETTINGS]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": "", "SENT": str(int(signal.SIGTERM))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (128 + signal.SIGTERM, False), done.stderr
    assert "stopped by SIGTERM; nothing is saved" in done.stderr
    assert "--resume" not in done.stderr


# --- a folder of one's own


def test_a_second_run_in_a_folder_is_refused_while_the_first_runs(tmp_path: Path, at_step: Any) -> None:
    """And the first is named. When it is gone, killed even, nothing is in the way of the next."""
    out, refused = tmp_path / "run", list[ResumeError]()

    def intrude() -> None:
        with pytest.raises(ResumeError, match=f"process {os.getpid()} on") as error:
            recipes.resume(out)
        refused.append(error.value)
        assert main(["train", "quickstart", "--out", str(out)]) == 2

    at_step(1, intrude)
    recipes.train(ready("training.max_steps=2", "training.checkpoint_every_n_steps=1"), out)
    assert len(refused) == 1
    assert [row["step"] for row in metrics(out)] == [1, 2]
    assert recipes.resume(out)["steps"] == 2


# --- time


def test_a_phase_that_takes_too_long_shows_what_every_thread_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog_module = pytest.importorskip("covey_status.watchdog")
    stop = threading.Event()

    def hanging_in_here() -> None:
        stop.wait()

    thread = threading.Thread(target=hanging_in_here)
    thread.start()
    with watchdog_module.Watchdog(tmp_path, limit=0.2, every=0.05) as watchdog:
        watchdog.phase("rollout")
        time.sleep(0.15)
        assert not (tmp_path / "stacks.txt").exists()
        watchdog.phase("reward")
        deadline = time.time() + 10
        while not caplog.messages and time.time() < deadline:
            time.sleep(0.02)
        beat = json.loads((tmp_path / "heartbeat.json").read_text())
    stop.set()
    thread.join()
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "phase 'reward'" in stacks
    assert "hanging_in_here" in stacks
    assert "test_a_phase_that_takes_too_long" in stacks
    assert len(caplog.messages) == 1  # once a phase
    assert beat["phase"] == "reward"
    assert beat["process"] == os.getpid()


def test_a_heartbeat_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watchdog_module = pytest.importorskip("covey_status.watchdog")
    looks = threading.Semaphore(0)
    (tmp_path / "heartbeat.json").mkdir()

    class Counted(watchdog_module.Watchdog):  # type: ignore[misc,name-defined]
        def _write_heartbeat(self, *given: Any) -> None:
            super()._write_heartbeat(*given)
            looks.release()

    with Counted(tmp_path, limit=0, every=0.01):
        assert all(looks.acquire(timeout=10) for _ in range(3))
    [told] = caplog.messages
    assert "heartbeat.json cannot be written" in told


def test_a_run_tells_its_phase_and_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every phase that the issue of trust names is announced, and the limit is the recipe's."""
    seen, limits = list[str](), list[float]()
    watchdog, watched = (pytest.importorskip(f"covey_status.{name}") for name in ("watchdog", "watched_run"))
    begin, make = watchdog.Watchdog.phase, watchdog.Watchdog.__init__

    def noted(self: Any, name: str) -> None:
        seen.append(name)
        begin(self, name)

    def made(self: Any, folder: Any, limit: float, every: float = 1.0, **status: Any) -> None:
        limits.append(limit)
        make(self, folder, limit, every, **status)

    monkeypatch.setattr(watchdog.Watchdog, "phase", noted)
    monkeypatch.setattr(watchdog.Watchdog, "__init__", made)
    recipes.train(ready("training.max_steps=1", "training.watchdog_seconds=77"), tmp_path / "run")
    assert {"rollout", "reward", "logps", "update", "sync", "save"} <= set(seen)
    assert limits == [77]
    beat = watched.read_heartbeat(tmp_path / "run")
    assert beat is not None
    assert (beat.ended, beat.step, beat.total) == ("finished", 1, 1)
    assert beat.memory > 100_000_000


# --- room


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; skips where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(writer: MetricsWriter) -> None:
    for step in range(5000):
        writer.rows("metrics.jsonl", [{"step": step, "text": "x" * 1000}])


def test_a_full_disk_names_its_bytes_and_keeps_what_was_there(little_disk: Path) -> None:
    with Checkpointer(little_disk / "checkpoints") as saves:
        small = {"w": jax.numpy.ones((256, 256))}
        saves.save(1, small)
        saves.wait()
        with pytest.raises(
            ResumeError, match=r"checkpoint 2 could not be written: the disk is full[^$]*8,000,\d+ byte"
        ):
            saves.save(2, {"w": jax.numpy.ones((1000, 2000))})
        assert saves.steps() == [1]
        np.testing.assert_array_equal(saves.restore()[0]["w"], small["w"])
    with MetricsWriter(little_disk / "run") as writer, pytest.raises(ResumeError, match=r"bytes are free"):
        fill(writer)
    lines = (little_disk / "run" / "metrics.jsonl").read_bytes().split(b"\n")
    assert all(json.loads(line) for line in lines[:-1])


def test_the_best_checkpoint_stays_beside_the_latest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, max_to_keep=2) as saves:
        for step, score in enumerate([0.1, 0.9, None, float("nan"), 0.5], start=1):
            saves.save(step, {"w": jax.numpy.ones(2)}, score=score)
        saves.wait()
        assert (saves.steps(), saves.best()) == ([2, 4, 5], 2)
        saves.save(6, {"w": jax.numpy.ones(2)}, score=math.nextafter(0.9, 0))  # the same mean, in another order
        saves.wait()
        assert (saves.steps(), saves.best()) == ([5, 6], 6)


def test_a_run_keeps_its_best_by_the_metric_it_names(tmp_path: Path) -> None:
    out = tmp_path / "run"
    every = ("training.checkpoint_every_n_steps=1", "training.max_to_keep=1", "training.keep_best=reward")
    summary = recipes.train(ready(*every), out)
    rewards = {row["step"]: row["reward"] for row in metrics(out)}
    best = max(rewards, key=lambda step: (rewards[step], step))
    assert summary["best"] == best
    with Checkpointer(out / "checkpoints", read_only=True) as saves:
        assert saves.steps() == sorted({best, 4})


# --- numbers


def poison(monkeypatch: pytest.MonkeyPatch, step: int, name: str = "") -> None:
    """Makes the gradient of one update NaN where it is computed: in the trainer of this name."""
    from covey.train.trainer import Trainer

    share = Trainer.gradients

    def gradients(self: Trainer, parts: Any) -> Any:
        if self.name == name and self.step + 1 == step and not self.__dict__.get("_poisoned"):
            self.__dict__["_poisoned"] = True
            parts = [part._replace(batch=jax.tree.map(_nan, part.batch)) for part in parts]
        return share(self, parts)

    monkeypatch.setattr(Trainer, "gradients", gradients)


def _nan(x: Any) -> Any:
    return x * np.nan if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x


def test_a_gradient_that_is_none_stops_before_the_update_and_keeps_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    poison(monkeypatch, step=2)
    with pytest.raises(NumbersError, match="update 2 is not finite"):
        recipes.train(ready("training.checkpoint_every_n_steps=1"), out)
    assert weights(out)[0] == 1
    assert [row["step"] for row in metrics(out)] == [1]
    kept = [json.loads(line) for line in (out / "bad" / "00000002.jsonl").read_text().splitlines()]
    assert len(kept) == 2 * 4
    assert all(row["advantage"] is not None for row in kept)
    with np.load(out / "bad" / "00000002.npz") as arrays:
        assert {"0.tokens", "0.advantage", "0.rollout_logps"} <= set(arrays)


def test_the_batch_of_a_critic_is_kept_under_the_step_of_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the critic's loss got, and the second of two updates on a batch under its own step."""
    pytest.importorskip("covey_ppo")
    out = tmp_path / "run"
    poison(monkeypatch, step=2, name="critic")
    with pytest.raises(NumbersError, match="update 2 of the critic is not finite"):
        recipes.train(ready("grpo.algorithm=ppo", "grpo.num_iterations=2"), out)
    assert sorted(path.name for path in (out / "bad").iterdir()) == ["00000002.jsonl", "00000002.npz"]
    kept = [json.loads(line) for line in (out / "bad" / "00000002.jsonl").read_text().splitlines()]
    assert {row["step"] for row in kept} == {2}
    critics = {f"0.critic.{name}" for name in ("returns", "old_values", "weight")}
    with np.load(out / "bad" / "00000002.npz") as arrays:
        assert critics | {"0.weight", "0.advantage"} <= set(arrays)
        assert all(arrays[name].shape == arrays["0.weight"].shape for name in critics)


def test_a_budget_lets_such_updates_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    poison(monkeypatch, step=2)
    recipes.train(ready("training.checkpoint_every_n_steps=1", "training.skip_nonfinite=1"), out)
    rows = metrics(out)
    assert [row["skipped"] for row in rows] == [0, 1, 0, 0]
    assert rows[1]["loss"] is None
    assert all(np.isfinite(x).all() for x in weights(out)[1])


def test_supervised_training_keeps_the_batch_too(tmp_path: Path) -> None:
    pytest.importorskip("covey_sft")
    out = tmp_path / "run"
    wild = ("training.optimizer.learning_rate=1e30", "training.optimizer.max_grad_norm=0")
    with pytest.raises(NumbersError, match="not finite"):
        recipes.train(recipe.load("sft-smollm2", [*SFT_SETTINGS, *wild], SFTRecipe), out)
    bad = out / "bad" / f"{len(metrics(out)) + 1:08d}.jsonl"
    assert bad.read_text().count("\n") == 4


def test_a_stop_is_no_mistake() -> None:
    """Whoever waits for Ctrl-C hears of it."""
    assert issubclass(Stopped, KeyboardInterrupt)
