"""Whole runs of supervised training on a tiny random model: it learns, it goes on bit for bit, and what it learnt can
be used and trained on.
"""

import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey import recipes
from covey.cli.main import main
from covey.config import recipe
from covey.config.metrics import CLOCKS, SFT, is_logged
from covey.config.recipe import SFTRecipe
from covey.config.schema import ModelOptions, RolloutConfig
from covey.errors import DataError, ResumeError
from covey.models.lora import has_lora
from covey.monitor.writer import MetricsWriter
from covey.parallel import flatten
from covey.recipes.load_model import load_source
from covey.registry import all_offered
from covey.train.checkpoint import Checkpointer
from covey_sft import run as sft_run
from covey_sft.answers import answer_examples, answering_worker, select_answerable
from covey_sft.learner import SFTLearner
from tests.one_layer import ONE_LAYER

TINY = str(ONE_LAYER)
LETTERS = str(Path(__file__).parents[3] / "tests" / "letters.jsonl")
SETTINGS = [
    "name=tiny",
    f"model.source={TINY}",
    "model.lora.rank=0",
    "training.max_steps=6",
    "training.batch_size=4",
    "training.optimizer.learning_rate=3e-3",
    "training.checkpoint_every_n_steps=3",
    "training.eval_every_n_steps=3",
    "training.row_length=128",
    "training.max_tokens_per_micro_batch=128",
    "training.max_to_keep=9",
    "rollout.max_new_tokens=6",
    "evaluation.answers=0",
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of every form, the held-out last tenth with and without a prompt."""
    rows: list[dict[str, Any]] = []
    for n in range(30):
        user, answer = {"role": "user", "content": f"Count to {n % 5}."}, " ".join(map(str, range(n % 5)))
        rows += [
            {"messages": [user, {"role": "assistant", "content": f"{answer} done"}]},
            {"prompt": f"{n % 5}: ", "completion": f"{answer} done"},
            {"text": f"one text of number {n % 5}"},
        ]
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def ready(data: str) -> Callable[..., SFTRecipe]:
    def make(*more: str) -> SFTRecipe:
        return recipe.load("sft-smollm2", [*SETTINGS, f"data.path={data}", *more], SFTRecipe)

    return make


@pytest.fixture(scope="module")
def adapted(ready: Callable[..., SFTRecipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps, with adapters."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    recipes.train(ready("training.max_steps=3", "model.lora.rank=4"), out)
    return out


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in found]


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def weights_of(folder: Path, step: int = 6) -> list[np.ndarray]:
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        state, _ = saves.restore(step)
    return [np.asarray(x) for x in jax.tree.leaves(state)]


class DiedError(Exception):
    pass


def test_a_resumed_run_is_the_run_that_was_never_stopped(
    tmp_path: Path, ready: Callable[..., SFTRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 steps straight = 3, death in step 5, and the rest: parameters and metrics, bit for bit."""
    straight, broken, more = tmp_path / "straight", tmp_path / "broken", ("model.lora.rank=4", "evaluation.answers=2")
    whole, write = recipes.train(ready(*more), straight), MetricsWriter.step

    def dying(self: MetricsWriter, row: dict[str, Any]) -> None:
        if row["step"] == 5:
            raise DiedError
        write(self, row)

    monkeypatch.setattr(MetricsWriter, "step", dying)
    with pytest.raises(DiedError):
        recipes.train(ready(*more), broken)
    monkeypatch.undo()
    assert [row["step"] for row in rows(broken, "metrics.jsonl")] == [1, 2, 3, 4]
    resumed = recipes.resume(broken)
    assert rows(straight, "metrics.jsonl") == rows(broken, "metrics.jsonl")
    for one, other in zip(weights_of(straight), weights_of(broken), strict=True):
        assert np.array_equal(one, other)
    early, late = weights_of(straight, 3), weights_of(straight)
    assert not all(np.array_equal(one, other) for one, other in zip(early, late, strict=True))  # something was learnt
    assert (whole["before"], whole["after"]) == (resumed["before"], resumed["after"])


def test_a_run_learns_and_its_folder_tells_it(
    tmp_path: Path, ready: Callable[..., SFTRecipe], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    more = ("training.checkpoint_every_n_steps=0", "training.show=perplexity,entropy", "evaluation.answers=2")
    wanted = ready("training.max_steps=30", *more)
    summary = recipes.train(wanted, out)
    shown = capsys.readouterr().out
    assert recipe.load(out, (), SFTRecipe) == wanted
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["after"]["loss"] < summary["before"]["loss"] - 1
    assert summary["steps"] == 30
    counts = {"examples": 81, "dropped": 0, "truncated": 0, "plain": 27}
    if all_offered("covey.counts"):
        counts |= {"rows": 81, "distinct": 15, "held_out": 9, "held_out_in_training": 9}
    assert summary["data"] == counts
    assert summary["before"]["examples"] == 9
    names = {name for line in (out / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert [name for name in names if not is_logged(name, SFT, ())] == []
    metrics = rows(out, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert [row["step"] for row in metrics if "eval/loss" in row] == list(range(3, 31, 3))
    assert metrics[-1]["eval/loss"] == pytest.approx(summary["after"]["loss"], rel=1e-6)
    for name in ("before", "after"):
        assert len(rows(out, f"{name}.jsonl")) == 2
        assert all(row["prompt"] for row in rows(out, f"{name}.jsonl"))
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert len(lines) == 30
    assert lines[0].startswith(f"step 1/30  loss {metrics[0]['loss']:.3f}  perplexity ")
    assert "  entropy " in lines[0]
    assert f"loss         {summary['before']['loss']:.3f} → {summary['after']['loss']:.3f}" in shown
    assert f"less {out}/after.jsonl" in shown
    pytest.importorskip("covey_report")
    assert f"report       {out}/report.html" in shown
    assert "eval/perplexity" in (out / "report.html").read_text(encoding="utf-8")


def test_long_examples_are_counted_or_refused(tmp_path: Path, ready: Callable[..., SFTRecipe]) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match=r"row \d+ of the training data has \d+ tokens"):
        recipes.train(ready("training.max_length=30"), out)
    assert not out.exists()  # so that the corrected command can have the name
    short = ("training.max_length=30", "training.max_steps=1")
    summary = recipes.train(ready(*short, "training.too_long=drop"), out)
    assert 0 < summary["data"]["dropped"] == 81 - summary["data"]["examples"]
    summary = recipes.train(ready(*short, "training.too_long=truncate"), tmp_path / "other")
    assert summary["data"]["truncated"] > 0


def test_other_settings_are_refused_on_resume(tmp_path: Path, adapted: Path) -> None:
    out = shutil.copytree(adapted, tmp_path / "run")
    edit(out / "recipe.yaml", "batch_size: 4", "batch_size: 5")
    with pytest.raises(ResumeError, match="batch_size was 4, is 5"):
        recipes.resume(out)


def test_a_run_is_a_model_for_the_next_one(tmp_path: Path, adapted: Path, ready: Callable[..., SFTRecipe]) -> None:
    """Adapters merged into the base; the next run begins with the loss at which this one ended."""
    first, second = shutil.copytree(adapted, tmp_path / "first"), tmp_path / "second"
    model, _, origin = load_source(ModelOptions(dtype="bfloat16"), str(first))
    assert not has_lora(model)
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.split(model)[1])} == {"bfloat16"}
    assert origin.startswith("checkpoint 3 of a run, sha256 ")
    assert has_lora(recipes.open_model(str(first), ModelOptions())[0])
    more = (f"model.source={first}", "model.lora.rank=2", "training.max_steps=2")
    summary = recipes.train(ready(*more), second)
    ended = json.loads((first / "summary.json").read_text())["after"]["loss"]
    assert summary["before"]["loss"] == pytest.approx(ended, rel=1e-5)
    assert summary["model"] == origin
    edit(first / "recipe.yaml", "max_steps: 3", "max_steps: 4")
    recipes.resume(first)  # goes beyond what the second began with
    edit(second / "recipe.yaml", "max_steps: 2", "max_steps: 3")
    with pytest.raises(ResumeError, match="this run began with the weights 'checkpoint 3"):
        recipes.resume(second)


def test_a_run_of_all_weights_is_a_model_too(
    tmp_path: Path, ready: Callable[..., SFTRecipe], caplog: pytest.LogCaptureFixture
) -> None:
    first = tmp_path / "first"
    recipes.train(ready("training.max_steps=1"), first)
    with caplog.at_level("INFO", "covey.recipes.load_model"):
        model, _, _ = load_source(ModelOptions(), str(first))
    assert caplog.messages == [f"loading {first}, a run that began with {TINY}"]
    with Checkpointer(first / "checkpoints", read_only=True) as saves:
        (saved, _), held = saves.restore(), flatten(nnx.to_pure_dict(nnx.split(model)[1]))
    for name, x in flatten(saved["params"]).items():
        assert np.array_equal(x, held[name]), name


def test_reinforcement_learning_goes_on_from_a_supervised_run(tmp_path: Path, adapted: Path) -> None:
    out = tmp_path / "run"
    short = ["max_new_tokens=6", "max_prompt_length=32", "grpo.num_generations=2", "prompts_per_step=1", "max_steps=1"]
    short += ["data.task=jsonl", f"data.path={LETTERS}"]
    summary = recipes.train(recipe.load("quickstart", [f"model.source={adapted}", *short, "evaluation.prompts=1"]), out)
    assert summary["model"].startswith("checkpoint 3 of a run")
    assert (out / "checkpoints" / "00000001").is_dir()


def test_the_command_trains_and_others_use_the_run(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sft", "sft-arithmetic", *SETTINGS, "lora.rank=4", "max_steps=2", "--data.task", "sums", "--out", "run"]
    assert main([*words, "--evaluation.prompts", "4", "--evaluation.answers", "4"]) == 0
    shown = capsys.readouterr().out
    assert "before: loss " in shown
    assert "accuracy 0.0%" in shown
    assert "step 2/2  loss " in shown
    learners, seen = list[Any](), list[Any]()

    def answer(*args: Any) -> Any:
        seen.extend(learner() for learner in learners)
        return answer_examples(*args)

    def watched(**options: Any) -> SFTLearner:
        learner = SFTLearner(**options)
        learners.append(weakref.ref(learner))
        return learner

    with monkeypatch.context() as patch:
        patch.setattr(sft_run, "answer_examples", answer)
        patch.setattr(sft_run, "SFTLearner", watched)
        assert main(["eval", "run"]) == 0
    assert seen == [None]  # a learner's copy of the weights is free again
    assert "run: loss " in capsys.readouterr().out
    short = ["--evaluation.prompts", "2", "--max-new-tokens", "4", "--max-prompt-length", "32"]
    short += ["--data.task", "jsonl", "--data.path", LETTERS]
    assert main(["eval", "run", "--recipe", "quickstart", *short]) == 0
    assert "run: accuracy " in capsys.readouterr().out
    assert main(["generate", "run", "2+3?", "--n", "2"]) == 0
    assert "--- 2 of 2" in capsys.readouterr().out
    said = iter(["2+2?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(["chat", "run", "--max-new-tokens", "4"]) == 0
    assert main(["sft", "--resume", "run"]) == 0
    assert main(["train", "--resume", "run"]) == 2
    assert "fix: covey sft --resume run" in capsys.readouterr().err


def test_a_held_out_example_without_room_for_an_answer_is_not_shown(
    tmp_path: Path, ready: Callable[..., SFTRecipe], capsys: pytest.CaptureFixture[str]
) -> None:
    """Room is needed to sample the answer that is shown, not to train, and not for the held-out loss."""
    test = tmp_path / "test.jsonl"
    long, short = ({"prompt": prompt, "completion": "done"} for prompt in ("word " * 155 + "end", "1: "))
    test.write_text(json.dumps(long) + "\n" + json.dumps(short) + "\n")
    more = ("rollout.max_new_tokens=60", "evaluation.answers=1", "training.max_steps=1", f"data.test_path={test}")
    summary = recipes.train(ready(*more), tmp_path / "run")
    assert summary["before"]["examples"] == 2
    assert [row["prompt"] for row in rows(tmp_path / "run", "before.jsonl")] == [short["prompt"]]
    told = capsys.readouterr().out
    assert "1 held-out example is not answered" in told
    (most,) = re.findall(r"--rollout\.max-new-tokens (\d+)", told)
    model, tokenizer, _ = load_source(ModelOptions(), TINY)
    worker = answering_worker(model, tokenizer, RolloutConfig(max_new_tokens=int(most), max_prompt_length=8))
    assert select_answerable(worker, [long, short], 1) == [long]


def test_training_needs_no_room_for_any_answer(tmp_path: Path, ready: Callable[..., SFTRecipe]) -> None:
    """An answer longer than the model leaves nothing to show, and is no reason not to train."""
    more = ("rollout.max_new_tokens=900", "evaluation.answers=2", "training.max_steps=1", "evaluation.prompts=1")
    summary = recipes.train(ready(*more), tmp_path / "run")
    assert summary["steps"] == 1
    assert rows(tmp_path / "run", "before.jsonl") == []
