"""What is told of a run: its outputs in their order, and nothing of them ends it."""

from types import SimpleNamespace
from typing import Any

import pytest

from covey.display import show_log
from covey.run import saved_run
from covey.run.folder import describe_environment
from covey.run.outputs import Output
from covey.run.saved_run import SavedRun
from covey.run.trainee import Trainee


class Heard(Output):
    """An output that remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, run: Any, summary: Any) -> None:
        self.told.append(("begin", summary["steps"]))

    def evaluation(self, name: str, metrics: Any) -> None:
        self.told.append((name, metrics))

    def step(self, record: Any) -> None:
        self.told.append(("step", record))


class Fails(Heard):
    def step(self, record: Any) -> None:
        raise ValueError("broken")


class CannotBeMade(Output):
    def __init__(self) -> None:
        raise ValueError("no room")


def missing() -> Any:
    raise ImportError("no such module")


def begun(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, Any]) -> Any:
    monkeypatch.setattr(saved_run, "all_offered", lambda group: outputs)
    run: Any = object.__new__(SavedRun)
    run.learner = SimpleNamespace(evaluations={"before": {"loss": 1.0}})
    run.summary, run.outputs = {"steps": 2}, {}
    run.folder = SimpleNamespace(write_summary=lambda summary: None)
    run.begin()
    return run


def test_outputs_are_told_of_the_evaluation_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(monkeypatch, {"heard": lambda: Heard})
    assert run.outputs["heard"].told == [("begin", 2), ("before", {"loss": 1.0})]


def test_an_output_that_raises_is_told_once_and_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose module cannot be imported, or that cannot be made."""
    said: list[str] = []
    outputs = {"gone": missing, "none": lambda: CannotBeMade, "fails": lambda: Fails, "heard": lambda: Heard}
    with show_log(info=said.append, warning=said.append):
        run = begun(monkeypatch, outputs)
        for step in (1, 2):
            run._tell("step", step)
    assert run.outputs.keys() == {"heard"}
    assert run.outputs["heard"].told[-2:] == [("step", 1), ("step", 2)]
    assert [line.split(":")[0] for line in said] == [f"the output {name} failed" for name in ("gone", "none", "fails")]


def test_the_folder_has_a_bad_batch_before_the_user_hears_of_it() -> None:
    """The trap: a function of the user's that raises would leave nothing to look at."""
    order: list[str] = []
    learner: Any = SimpleNamespace(
        outputs=SimpleNamespace(bad_batch=lambda *_: order.append("folder"), phase=lambda _: order.append("folder")),
        _on_bad_batch=lambda *_: order.append("user"),
        _on_phase=lambda _: order.append("user"),
    )
    Trainee.on_bad_batch(learner, 1, [], {}, None)
    Trainee.on_phase(learner, "update")
    assert order == ["folder", "user"] * 2


def test_the_environment_is_recorded_without_names_of_machine_or_user() -> None:
    found = describe_environment()
    assert {"covey", "python", "jax", "jaxlib", "devices", "cores"} <= found.keys()
    assert "cpu" in found["devices"]
    assert all(isinstance(text, str) and "/" not in text for text in found.values())
