"""What may happen to the folder of a run: two runs that want it at one moment, a change of the working directory, files
that somebody removed or edited. Each is done for real, to a run of a tiny model or to the piece that has to bear it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey import recipes
from covey.cli.main import main
from covey.config import recipe
from covey.errors import STOPPED, DataError, NumbersError, ResumeError
from covey.monitor.writer import MetricsWriter
from covey.run import loop
from covey.run.saved_run import SavedRun
from covey.train.checkpoint import Checkpointer
from tests.one_layer import ONE_LAYER

REPOSITORY = Path(__file__).parents[2]
TINY = str(ONE_LAYER)
SMALL_RUN = Path(__file__).with_name("small_run.txt").read_text(encoding="utf-8").split()
SETTINGS = [
    f"model.source={TINY}",
    "data.task=jsonl",
    f"data.path={REPOSITORY / 'tests' / 'letters.jsonl'}",
    *SMALL_RUN,
    "training.checkpoint_every_n_steps=2",
    "training.max_to_keep=9",
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]


def ready(*more: str) -> recipe.Recipe:
    return recipe.load("quickstart", [*SETTINGS, *more])


# --- two at one moment

STARTING = """
    import json, sys
    from covey import recipes
    from covey.cli import main as cli, train

    def wait(word):
        print(word, flush=True)
        sys.stdin.readline()

    def looked(look):
        def look_and_wait(recipe):
            found = look(recipe)
            wait("looked")
            return found
        return look_and_wait

    def hold(recipe, folder, make):
        wait(f"holds {folder.path.resolve()}")
        folder.write_summary({"steps": 0})
        return {}

    train.new_run_folder = looked(train.new_run_folder)
    recipes.train_in_folder = hold
    print("codes", *map(cli.main, json.loads(sys.argv[1])))
"""
"""Commands of `covey`. Each stops behind its first look at the folder, and again where training would begin."""


def answer(process: "subprocess.Popen[str]") -> str:
    """The next word of the process behind what it says of its data, after a line that lets it go on; empty when it has
    ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return next((line.strip() for line in process.stdout if "rows as prompt" not in line), "")


@pytest.fixture
def both(tmp_path: Path) -> "Iterator[list[subprocess.Popen[str]]]":
    """Two processes that begin a run in one folder, and then one without a folder of its own: of seeds 1 and 2."""
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with ExitStack() as stack:
        started = []
        for seed in (1, 2):
            words = ["train", "quickstart", *SETTINGS, f"--seed={seed}"]
            command = [sys.executable, "-c", textwrap.dedent(STARTING), json.dumps([[*words, "--out", "here"], words])]
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)
            started.append(stack.enter_context(process))
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "looked\n"
        yield started


def test_of_two_runs_that_begin_at_one_moment_each_has_a_folder(both: Any, tmp_path: Path) -> None:
    """Of two that name the same one, one is refused, and nothing of the other's is overwritten or removed. Where none
    is named, each gets its own.
    """
    found = {answer(process): process for process in both}
    holder, refused = found.pop(f"holds {tmp_path / 'here'}"), found.pop("looked")
    assert recipe.load(tmp_path / "here").seed == 1 + both.index(holder)
    assert answer(holder) == "looked"
    assert (tmp_path / "here" / "summary.json").exists()
    folders = [answer(process) for process in both]
    assert sorted(folders) == [f"holds {tmp_path / 'runs' / f'quickstart-{number}'}" for number in (1, 2)]
    told = {process: process.communicate("\n", timeout=60) for process in both}
    assert [told[process][0].splitlines()[-1] for process in (holder, refused)] == ["codes 0 0", "codes 2 0"]
    assert "fix: --out ANOTHER" in told[refused][1]
    for seed, where in enumerate(folders, 1):
        assert recipe.load(Path(where.removeprefix("holds "))).seed == seed


def stopping_with(act: Callable[[], object]) -> Callable[..., Any]:
    """A training that does `act` and then ends with a mistake of the user."""

    def train(*_: Any) -> Any:
        act()
        raise DataError("row 0 is too long")

    return train


def test_a_run_that_fails_at_once_leaves_an_empty_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train", stopping_with(lambda: None))
    with pytest.raises(DataError):
        recipes.train(ready(), tmp_path)
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_at_once_does_not_remove_what_took_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def replaced() -> None:
        out.rename(tmp_path / "moved")
        (out / "checkpoints").mkdir(parents=True)
        for name in ("recipe.yaml", "checkpoints/lock"):
            (out / name).write_text("of another run")

    monkeypatch.setattr(loop, "train", stopping_with(replaced))
    with pytest.raises(DataError):
        recipes.train(ready(), out)
    assert (out / "recipe.yaml").read_text() == "of another run"


def test_a_folder_with_anything_in_it_is_not_written_in(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    with pytest.raises(ResumeError, match="this folder is taken"):
        recipes.train(ready(), tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("recipe.yaml", "mine")]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["train", "quickstart", "--out", str(tmp_path / "file" / "run"), *SETTINGS]) == 2
    assert "this folder cannot be made" in capsys.readouterr().err


# --- what is worth keeping


def test_a_batch_that_is_kept_survives_a_run_that_learnt_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trap: an error before the first row clears the folder, and takes the batch along that it speaks of."""
    from covey.train.trainer import Trainer

    def not_finite(self: Trainer, parts: Any) -> Any:
        list(parts)
        raise NumbersError("the gradient of update 1 is not finite")

    monkeypatch.setattr(Trainer, "update", not_finite)
    with pytest.raises(NumbersError):
        recipes.train(ready(), tmp_path / "run")
    assert (tmp_path / "run" / "bad" / "00000001.jsonl").read_text().count("\n") == 2 * 4
    assert (tmp_path / "run" / "bad" / "00000001.npz").exists()


# --- another working directory

WANDERING = """
import os
def wandering(completions):
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return [float(len(c)) for c in completions]
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_reward_may_change_the_working_directory(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of a run is relative by default; it stays where it was begun, and is shown as it was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wandering.py").write_text(WANDERING)
    if stopped:
        ask = before(MetricsWriter.step, lambda *_: signal.raise_signal(signal.SIGTERM))
        monkeypatch.setattr(MetricsWriter, "step", ask)
    words = ["train", "quickstart", *SETTINGS, "rewards=wandering:wandering", "training.max_steps=1"]
    assert main(words) == (STOPPED if stopped else 0)
    shown = "".join(capsys.readouterr())
    assert ("covey train --resume runs/quickstart-1" if stopped else "covey chat runs/quickstart-1") in shown
    assert Path.cwd() != tmp_path
    assert (tmp_path / "runs" / "quickstart-1" / "checkpoints" / "00000001").is_dir()
    assert (tmp_path / "runs" / "quickstart-1" / "after.jsonl").exists() != stopped
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] in ([], ["elsewhere"])


# --- files that were removed or edited


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps with checkpoints of the second and the fourth; to be copied."""
    out = tmp_path_factory.mktemp("done") / "run"
    recipes.train(ready(), out)
    return out


@pytest.fixture
def copied(done: Path, tmp_path: Path) -> Path:
    """A copy of `done`."""
    return shutil.copytree(done, tmp_path / "run")


def steps_in(file: Path) -> list[int]:
    return sorted({json.loads(line)["step"] for line in file.read_text().splitlines()})


@pytest.mark.parametrize("left", [3, 0, None])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_rows_that_end_before_the_checkpoint_are_refused(name: str, left: int | None, copied: Path) -> None:
    """And the fix that is told leads to the run as it was, with the rows that were lost."""
    file, whole = copied / name, (copied / name).read_text()
    if left is None:
        file.unlink()
    else:
        file.write_text("".join(row + "\n" for row in whole.splitlines() if json.loads(row)["step"] <= left))
    told = f"the last step with a row here is {left or 'none'}, and the last checkpoint is of step 4"
    with pytest.raises(ResumeError, match=f"{name}: {told}") as error:
        recipes.resume(copied)
    assert "put the file back" in str(error.value)
    if left == 3 and name == "samples.jsonl":
        assert "remove the checkpoints behind step 3" in str(error.value)
        shutil.rmtree(copied / "checkpoints" / "00000004")
        recipes.resume(copied)
        assert file.read_text() == whole


@pytest.mark.parametrize("text", ["[]", "{}", '{"before": 3}', "{", '{"before": {"reward": "high"}}'])
def test_a_summary_that_is_none_is_refused_and_named(text: str, copied: Path) -> None:
    """The trap: an empty list reads as nothing, and the weights that are trained are evaluated as those before."""
    (copied / "summary.json").write_text(text)
    with pytest.raises(ResumeError, match=r"summary\.json") as error:
        recipes.resume(copied)
    assert "remove it" in str(error.value)
    assert (copied / "summary.json").read_text() == text


def test_without_a_summary_trained_weights_are_not_evaluated_as_those_before(copied: Path, capsys: Any) -> None:
    (copied / "summary.json").unlink()
    (copied / "before.jsonl").unlink()
    summary = recipes.resume(copied)
    assert summary["before"] is None
    assert not (copied / "before.jsonl").exists()
    assert "the evaluation before training is left out" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("owner", "name", "first"),
    [(SavedRun, "step", None), (Checkpointer, "save", 4), (SavedRun, "evaluation", "before")],
)
def test_a_folder_that_vanishes_stops_the_run(
    owner: Any, name: str, first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The trap: what is written into a file that was removed goes nowhere, without an error."""
    out = tmp_path / "run"

    def remove(self: Any, given: Any, *rest: Any) -> None:
        if first in (None, given) and out.exists():
            out.rename(tmp_path / "moved")

    monkeypatch.setattr(owner, name, before(getattr(owner, name), remove))
    assert main(["train", "quickstart", "--out", str(out), *SETTINGS]) == 2
    assert f"{out}: the run folder was removed or replaced" in capsys.readouterr().err


def test_a_run_that_loses_its_rows_keeps_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: a new run without rows is taken for one that learnt nothing, and removed with its checkpoints."""
    out = tmp_path / "run"

    def remove(self: Any, record: Any, *rest: Any) -> None:
        if record.step == 3:
            (out / "metrics.jsonl").unlink()

    monkeypatch.setattr(SavedRun, "step", before(SavedRun.step, remove))
    with pytest.raises(ResumeError, match="put the file back and resume"):
        recipes.train(ready(), out)
    assert (out / "checkpoints" / "00000002").is_dir()
    assert (out / "samples.jsonl").exists()


def test_a_file_of_rows_that_vanishes_stops_the_run(tmp_path: Path) -> None:
    """An editor that writes a new file in place of the old one removes it too."""
    with MetricsWriter(tmp_path) as writer:
        writer.rows("metrics.jsonl", [{"step": 1}])
        (tmp_path / "metrics.jsonl").rename(tmp_path / "old")
        (tmp_path / "metrics.jsonl").write_text("{}")
        with pytest.raises(ResumeError, match=r"metrics\.jsonl: this file was removed or replaced"):
            writer.rows("metrics.jsonl", [{"step": 2}])


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is lost with the power, no checkpoint is there without its rows."""
    out, synced, found = tmp_path / "run", dict[str, int](), list[tuple[int, dict[str, int]]]()
    sync = os.fsync

    def noted(descriptor: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if place.parent == out and place.suffix == ".jsonl":
            synced[place.name] = steps_in(place)[-1]
        if place.suffix == ".partial":
            found.append((int(place.stem), dict(synced)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    recipes.train(ready(), out)
    assert {step for step, _ in found} == {2, 4}
    assert all(rows.keys() == {"metrics.jsonl", "samples.jsonl"} for _, rows in found)
    assert all(min(rows.values()) >= step for step, rows in found)  # the next step may be quicker than the save


# --- a run that is finished, and what may change in one


def test_a_finished_run_says_so_and_how_to_train_longer(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """And nothing is loaded, evaluated or written for it."""
    monkeypatch.setattr(recipes, "build", pytest.fail)
    held = {path.name: path.read_bytes() for path in copied.glob("*.*")}
    assert main(["train", "--resume", str(copied)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "this run is finished: it has made its 4 steps" in shown
    assert f"covey train --resume {copied} --max-steps MORE" in shown
    assert {path.name: path.read_bytes() for path in copied.glob("*.*")} == held


def test_a_finished_run_of_epochs_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """How many steps its epochs are is known when the data have been looked through."""
    pytest.importorskip("covey_sft")
    out, file = tmp_path / "run", tmp_path / "data.jsonl"
    file.write_text('{"text": "one text"}\n' * 8)
    words = [f"model.source={TINY}", f"data.path={file}", "training.batch_size=4", "training.num_epochs=1"]
    assert main(["sft", "sft-smollm2", "--out", str(out), *words, "evaluation.answers=0"]) == 0
    held = (out / "summary.json").read_bytes()
    monkeypatch.setattr(loop, "evaluate", None)
    assert main(["sft", "--resume", str(out)]) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert (out / "summary.json").read_bytes() == held


def test_what_may_change_may_be_given_beside_resume(copied: Path, capsys: Any) -> None:
    """It is told, and written into the recipe; the rest of the recipe is kept."""
    then = recipe.load(copied)
    assert main(["train", "--resume", str(copied), "--max-steps", "6", "--actor-optimizer.learning-rate=2e-3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "training.max_steps was 4, is 6" in shown
    assert "training.actor_optimizer.learning_rate was 0.001, is 0.002" in shown
    faster = replace(then.training.actor_optimizer, learning_rate=2e-3)
    assert recipe.load(copied) == replace(then, training=replace(then.training, max_steps=6, actor_optimizer=faster))
    assert steps_in(copied / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert json.loads((copied / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("longer", [[], ["--max-steps=6"]])
def test_what_may_not_change_is_refused_beside_resume_too(longer: list[str], copied: Path, capsys: Any) -> None:
    held = (copied / "recipe.yaml").read_bytes()
    assert main(["train", "--resume", str(copied), "--num-generations", "8", *longer]) == 2
    told = capsys.readouterr().err
    assert "grpo.num_generations was 4, is 8" in told
    assert "undo that" in told
    assert (copied / "recipe.yaml").read_bytes() == held


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "elsewhere"], "a run goes on in its own folder"),
        (["--max-stepz", "6"], "did you mean --training.max-steps?"),
        (["--max-steps=-1"], "max_steps"),
    ],
)
def test_mistakes_beside_resume_are_told_before_anything_is_loaded(
    words: list[str], told: str, copied: Path, capsys: Any
) -> None:
    assert main(["train", "--resume", str(copied), *words]) == 2
    assert told in capsys.readouterr().err


def before(call: Callable[..., Any], act: Callable[..., object]) -> Callable[..., Any]:
    """`call`, with `act` done before it with the same arguments."""

    def called(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return call(*args, **kwargs)

    return called
