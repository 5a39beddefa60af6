"""Run folders and files with a content that no run has written: each command says what is wrong, at once and without a
traceback.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from covey.cli.main import main
from covey.config import recipe
from covey.config.recipe import chain_of_runs
from covey.errors import RecipeError, ResumeError, WeightsError
from covey.files import check_file, require_entry
from covey.recipes.load_model import abstract_for, load_source
from covey.train.checkpoint import Checkpointer
from covey.train.storage import POINTER

DEEP = "[" * 100_000


def write_run(folder: Path, *settings: str) -> Path:
    """Write a run folder with a checkpoint, as far as commands look before they import JAX."""
    (folder / "checkpoints" / "00000001").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart", settings)))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "step_time": 1.0}\n')
    return folder


# --- runs that name each other


@pytest.fixture
def circle(tmp_path: Path) -> str:
    """Run of which the model is that of another run, of which the model is that of the first."""
    write_run(tmp_path / "a", f"model.source={tmp_path / 'b'}")
    write_run(tmp_path / "b", f"model.source={tmp_path / 'a'}")
    return str(tmp_path / "a")


@pytest.mark.parametrize("words", [["export", "--out", "new"], ["chat"], ["generate"], ["eval"], ["push", "--yes"]])
def test_runs_that_name_each_other_are_refused(circle: str, words: list[str], capsys: Any) -> None:
    command, *more = words
    if command in ("export", "push"):
        pytest.importorskip("covey_formats")
    if command in ("chat", "generate"):
        pytest.importorskip("covey_shell")
    more += {"generate": ["hello"], "push": ["hf:me/run"]}.get(command, [])
    assert main([command, circle, *more]) == 2
    told = capsys.readouterr().err
    assert f"a → {Path(circle).parent / 'b'} → {circle}" in told
    assert "fix: set model.source in the recipe of one of them" in told


@pytest.mark.parametrize(
    "follow",
    [
        lambda source: pytest.importorskip("covey_formats.export").Lineage.of(source),
        lambda source: abstract_for(recipe.load(source), "cpu"),
        lambda source: load_source(recipe.load(source).model, source),
    ],
)
def test_nothing_follows_runs_in_a_circle(circle: str, follow: Callable[[str], object]) -> None:
    with pytest.raises(RecipeError, match="these runs name each other"):
        follow(circle)


def test_a_chain_of_runs_leads_to_its_first_model(tmp_path: Path) -> None:
    write_run(tmp_path / "first", "model.source=scratch:arithmetic-tiny")
    write_run(tmp_path / "second", f"model.source={tmp_path / 'first'}")
    runs, base = chain_of_runs(str(tmp_path / "second"))
    assert (runs, base) == ([tmp_path / "second", tmp_path / "first"], "scratch:arithmetic-tiny")
    assert chain_of_runs("hf:org/name") == ([], "hf:org/name")


# --- reports


@pytest.mark.parametrize("value", [".inf", ".nan", "-1", "1e400", "[[.inf]]", "{a: .nan}", "text", "null"])
def test_a_report_is_written_whatever_a_recipe_says(tmp_path: Path, value: str) -> None:
    run = write_run(tmp_path / "run")
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("max_steps: 16", f"max_steps: {value}"))
    assert f"max_steps: {value}" in (run / "recipe.yaml").read_text()
    page = pytest.importorskip("covey_report.page")
    page.write_report(tmp_path / "page.html", [run])
    assert page.page_data([page.read_run(run)])["runs"][0]["steps"] == [1, 1, None]


def test_no_chart_of_a_report_is_without_values(tmp_path: Path) -> None:
    """Figures before and after training may come without their standard error."""
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5}}))
    page = pytest.importorskip("covey_report.page")
    series = page.page_data([page.read_run(run)])["runs"][0]["series"]
    assert "eval/accuracy" in series
    assert [name for name, (steps, values) in series.items() if not steps or not values] == []


# --- checkpoints


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "",
        "not JSON",
        DEEP,
        '{"address": 1, "run": "x"}',
        '{"address": "gs://b/c"}',
        '{"address": "/x", "run": "x"}',
    ],
)
def test_a_pointer_to_no_bucket_is_refused(tmp_path: Path, content: str) -> None:
    pytest.importorskip("covey_bucket")
    (tmp_path / POINTER).write_text(content)
    with pytest.raises(ResumeError, match=r"does not name the bucket(.|\n)*fix: put the file back") as error:
        Checkpointer(tmp_path, read_only=True)
    assert error.value.where == str(tmp_path / POINTER)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder) as saves:
        saves.save(1, {"w": jnp.ones(2)}, {"model": "m"})
    return folder


LEAF = {"dtype": "float32", "shape": [2]}


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        "[]",
        "{}",
        '{"leaves": {}}',
        '{"extra": {}}',
        '{"leaves": [], "extra": {}}',
        *(
            json.dumps({"leaves": {"w": leaf}, "extra": {}})
            for leaf in (
                1, {}, {"dtype": "float32"}, {"shape": [2]}, LEAF | {"dtype": "no"}, LEAF | {"dtype": 3},
                LEAF | {"shape": 2}, LEAF | {"shape": ["2"]}, LEAF | {"shape": [-2]}, LEAF | {"key": "no"},
            )
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_described_by_no_run_is_damaged(saved: Path, content: str, write_meta: Any) -> None:
    """Its digests agree with its files: whoever wrote them can write digests too."""
    write_meta(saved / "00000001", content)
    with Checkpointer(saved, read_only=True) as saves:
        with pytest.raises(ResumeError, match=r"checkpoint 1 is damaged: meta\.json (cannot|has not|describes no)"):
            saves.restore(1)
        assert saves.best() is None


@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [
        ("settings", dict, {}),
        ("settings", dict, {"settings": []}),
        ("model", str, {"model": None}),
        ("seconds", float, {"seconds": "1"}),
        ("seconds", float, {"seconds": float("inf")}),
        ("seconds", float, {"seconds": True}),
        ("prompts", int, {"prompts": 1.5}),
        ("prompts", int, {"prompts": -1}),
    ],
)
def test_an_entry_of_a_checkpoint_has_its_kind(name: str, kind: type, content: dict[str, Any]) -> None:
    with pytest.raises(ResumeError, match=rf"meta\.json of the checkpoint has (no )?{name}"):
        require_entry(content, name, kind)
    assert require_entry({"seconds": 2}, "seconds", float) == 2.0


# --- pipes and devices


def pipe(folder: Path, name: str) -> str:
    os.mkfifo(folder / name)
    return str(folder / name)


@pytest.mark.parametrize("words", [["validate"], ["train", "--out", "never"], ["train", "--dry-run"], ["rewards"]])
@pytest.mark.parametrize("key", ["data.path", "data.test_path"])
def test_data_are_not_read_from_a_pipe_or_a_device(tmp_path: Path, words: list[str], key: str, capsys: Any) -> None:
    if "--dry-run" in words:
        pytest.importorskip("covey_plan")
    if words[0] in (of := {"rewards": "covey_report", "validate": "covey_shell"}):
        pytest.importorskip(of[words[0]])
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a"}\n')
    for path in ("/dev/zero", pipe(tmp_path, "pipe.jsonl")):
        settings = ["--data.task", "jsonl", "--data.path", str(data), f"--{key}", path]
        assert main([words[0], "quickstart", *words[1:], *settings]) == 2
        assert f"{path}: this is a pipe or a device, and no file" in capsys.readouterr().err


def test_recorded_completions_and_models_are_not_read_from_a_pipe(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(WeightsError, match=r"config\.json: this is a pipe or a device"):
        check_file(Path(pipe(tmp_path, "config.json")))
    pytest.importorskip("covey_report")
    assert main(["rewards", "quickstart", "--samples", pipe(tmp_path, "samples.jsonl")]) == 2
    assert "this is a pipe or a device, and no file" in capsys.readouterr().err


# --- a bucket that does not answer


class Unanswered:
    """Answer of the driver that does not come."""

    cancelled = False

    def exception(self, timeout: float) -> None:
        raise TimeoutError

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_bucket_that_never_answers_is_told_and_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, answer = pytest.importorskip("covey_bucket.bucket"), Unanswered()
    monkeypatch.setattr(bucket, "_open", lambda name: SimpleNamespace(list=lambda *_, **__: answer))
    with pytest.raises(ResumeError, match="no answer for 20 seconds") as error:
        bucket.Bucket("gs://never-there/runs").names()
    assert "check the network" in error.value.fix
    assert answer.cancelled
    assert [record.getMessage() for record in caplog.records] == [
        f"gs://never-there/runs has not answered for {seconds} s: trying again" for seconds in (5, 10, 15)
    ]


def test_a_bucket_that_has_answered_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run at night outlasts an outage that the driver outlasts."""
    bucket, answers = pytest.importorskip("covey_bucket.bucket"), iter([TimeoutError] * 10)

    def exception(timeout: float) -> None:
        for error in answers:
            raise error

    late = SimpleNamespace(exception=exception, done=lambda: False, result=lambda: [b"runs/a"])
    monkeypatch.setattr(bucket, "_open", lambda name: SimpleNamespace(list=lambda *_, **__: late))
    monkeypatch.setattr(bucket, "_ANSWERED", {"there-before"})
    assert bucket.Bucket("gs://there-before/runs").names() == ["runs/a"]
