"""Trackers, each played by a stand-in for its package: what they are told, what not, and that none stops a run."""

import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey import registry
from covey.config.recipe import Recipe, validate
from covey.display import show_log
from covey.errors import RecipeError
from covey.monitor.record import StepRecord
from covey.types import Completion, FinishReason, Group
from covey_trackers.output import TrackersOutput
from covey_trackers.trackers import TRACKERS, Tracked, Trackers

ROW = {"step": 3, "reward": 0.5, "eval/pass@1": 0.25, "beta": float("nan"), "grad_norm": float("inf"), "note": "text"}
SENT = {"reward": 0.5, "eval/pass@1": 0.25}


class Fake:
    """A module that notes every call by name; attributes in `broken` raise."""

    def __init__(self, *broken: str, key: str | None = "k" * 40):
        self.calls: list[tuple[str, Any, Any]] = []
        self.broken, self.url, self.api = broken, "https://example.test/run", types.SimpleNamespace(api_key=key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            if name in self.broken:
                raise ConnectionError(f"{name} failed\nand why, at length")
            self.calls.append((name, args, options))
            return self

        return call

    def named(self, name: str) -> list[tuple[Any, Any]]:
        return [(args, options) for called, args, options in self.calls if called == name]


PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
START = {"tensorboard": "SummaryWriter", "wandb": "init", "trackio": "init"}
LOG = {"tensorboard": "add_scalar", "wandb": "log", "trackio": "log"}
END = {"tensorboard": "close", "wandb": "finish", "trackio": "finish"}
Install = Callable[[str, Any], Any]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the package logs."""
    found: list[str] = []
    with show_log(info=found.append, warning=found.append):
        yield found


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(tracker, stand_in)`: the package that the tracker imports; None for one that is not there."""

    def put(name: str, stand_in: Any) -> Any:
        monkeypatch.setitem(sys.modules, PACKAGES[name], stand_in)
        return stand_in

    return put


def tracked(folder: Path, resume_at: int | None = None, **settings: Any) -> Tracked:
    return Tracked(folder, {"name": "small", "rewards": ("a", "b"), **settings}, resume_at)


def test_every_name_has_a_stand_in_here() -> None:
    assert TRACKERS.keys() == PACKAGES.keys()


@pytest.mark.parametrize("name", TRACKERS)
def test_numbers_go_out_with_their_step_and_nothing_else_does(install: Install, tmp_path: Path, name: str) -> None:
    fake = install(name, Fake())
    with Trackers([name], tracked(tmp_path)) as trackers:
        trackers.log(3, ROW)
        trackers.log(4, {"step": 4, "reward": 1})
    logged = fake.named(LOG[name])
    if name == "tensorboard":
        assert [args for args, _ in logged] == [("reward", 0.5, 3), ("eval/pass@1", 0.25, 3), ("reward", 1.0, 4)]
    else:
        assert logged == [((SENT,), {"step": 3}), (({"reward": 1.0},), {"step": 4})]
    assert len(fake.named(END[name])) == 1
    assert fake.calls[-1][0] == END[name]


# --- completions


def a_group(*texts: str) -> Group:
    tokens, logps = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    scores = np.array([1.0, math.nan])
    return Group(
        prompt="Add.\nAbut hf_verysecret",
        prompt_tokens=tokens,
        completions=tuple(Completion(tokens, logps, logps, FinishReason.STOP, text) for text in texts),
        rewards=scores,
        rewards_by_function={"exact": scores, "short": np.array([0.5, 0.25])},
        advantages=np.array([0.5, -0.5], np.float32),
    )


@pytest.mark.parametrize("name", TRACKERS)
def test_completions_go_out_as_a_table_of_so_many_rows(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without secrets. TensorBoard shows Markdown, so that no line of a text may stand where it could be some."""
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    fake = install(name, Fake())
    with Trackers([name], tracked(tmp_path)) as trackers:
        trackers.log(3, {"reward": 0.5}, [a_group("2\n\n# <b>", "")] * 9, num_completions=2)
        trackers.log(4, {"reward": 0.5})
    if name == "tensorboard":
        [((table_name, text, step), _)] = fake.named("add_text")
        assert (table_name, step) == ("completions", 3)
        assert text.count("Abut ***") == 2
        ours = [line for line in text.splitlines() if line and not line.startswith("    ")]
        assert ours == ["prompt", "completion", "---"] * 2
    else:
        [(_, table)] = fake.named("Table")
        assert table["columns"] == [
            "step",
            "prompt",
            "completion",
            "reward",
            "rewards/exact",
            "rewards/short",
            "advantage",
        ]
        first, second = table["data"]
        assert first == [3, "Add.\nAbut ***", "2\n\n# <b>", 1.0, 1.0, 0.5, 0.5]
        assert second == [3, "Add.\nAbut ***", "", None, None, 0.25, -0.5]
        assert [sent.keys() for (sent,), _ in fake.named(LOG[name])] == [{"reward", "completions"}, {"reward"}]


def test_a_recipe_sends_completions_only_if_it_says_so_and_at_its_interval() -> None:
    sent = []
    trackers = types.SimpleNamespace(log=lambda step, metrics, groups, count: sent.append((step, len(groups), count)))
    for settings in ({}, {"log_completions": True, "log_completions_every_n_steps": 2, "num_completions_to_log": 5}):
        recipe = Recipe(rewards=("exact_answer",), tracking=("wandb",), **settings)  # type: ignore[arg-type]
        output: Any = TrackersOutput()
        output._recipe, output._trackers = recipe, trackers
        for step in (1, 2, 3):
            output.step(StepRecord(step, 1, 3, {}, [a_group("2", "")]))
    assert sent == [(1, 0, 16), (2, 0, 16), (3, 0, 16), (1, 0, 5), (2, 1, 5), (3, 0, 5)]
    with pytest.raises(RecipeError, match="tracking names none"):
        validate(Recipe(rewards=("exact_answer",), log_completions=True))
    with pytest.raises(RecipeError, match="num_completions_to_log is set"):
        validate(Recipe(rewards=("exact_answer",), num_completions_to_log=4))


# --- trouble


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_said_once_with_what_brings_it(
    install: Install, said: list[str], tmp_path: Path, name: str
) -> None:
    install(name, None)
    with Trackers([name], tracked(tmp_path)) as trackers:
        for step in range(3):
            trackers.log(step, ROW)
    (line,) = said
    assert line.startswith(f"not tracked by {name}: ")
    assert registry.install_command("track") in line


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.parametrize("when", [START, LOG, END], ids=["start", "log", "end"])
def test_a_tracker_that_fails_is_said_once_and_left_out(
    install: Install, said: list[str], tmp_path: Path, name: str, when: dict[str, str]
) -> None:
    fake = install(name, Fake(when[name]))
    with Trackers([name], tracked(tmp_path)) as trackers:
        for step in range(3):
            trackers.log(step, ROW)
    told = [line for line in said if "not tracked" in line]
    assert told == [f"not tracked by {name}: ConnectionError: {when[name]} failed"]
    assert len(fake.named(LOG[name])) == (0 if when is not END else {"tensorboard": 6}.get(name, 3))


def test_the_others_go_on(install: Install, tmp_path: Path) -> None:
    install("wandb", Fake("log"))
    board = install("tensorboard", Fake())
    with Trackers(["wandb", "tensorboard"], tracked(tmp_path)) as trackers:
        trackers.log(1, {"reward": 1.0})
        trackers.log(2, {"reward": 2.0})
    assert [args for args, _ in board.named("add_scalar")] == [("reward", 1.0, 1), ("reward", 2.0, 2)]


def test_a_stop_by_the_user_is_no_trouble_of_the_tracker(install: Install, tmp_path: Path) -> None:
    def stop(**options: Any) -> None:
        raise KeyboardInterrupt

    install("wandb", types.SimpleNamespace(init=stop, api=types.SimpleNamespace(api_key="k")))
    with pytest.raises(KeyboardInterrupt):
        Trackers(["wandb"], tracked(tmp_path))


# --- who the run is


def test_a_resumed_run_is_the_same_run(install: Install, tmp_path: Path) -> None:
    fakes = {name: install(name, Fake()) for name in TRACKERS}
    for resume_at in (None, 5):
        Trackers(TRACKERS, tracked(tmp_path, resume_at)).close()
    board, wandb, trackio = ([o for _, o in fakes[name].named(START[name])] for name in TRACKERS)
    assert [o.get("purge_step") for o in board] == [None, 6]
    assert all(Path(o["logdir"]) == tmp_path / "tensorboard" for o in board)
    assert wandb[0]["id"] == wandb[1]["id"]
    assert [o["resume"] for o in wandb] == [None, "allow"]
    assert trackio[0]["name"] == trackio[1]["name"]
    assert [o["resume"] for o in trackio] == ["never", "allow"]
    (tmp_path / "other").mkdir()
    assert tracked(tmp_path / "other").identity() != wandb[0]["id"]


@pytest.mark.parametrize(
    ("key", "variable", "mode"), [("k" * 40, None, "online"), (None, None, "offline"), (None, "disabled", None)]
)
def test_nobody_is_asked_for_a_login(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, variable: str | None, mode: Any
) -> None:
    """The trap: without a login wandb.init asks on the terminal, and an unattended run waits for ever."""
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    fake = install("wandb", Fake(key=key))
    Trackers(["wandb"], tracked(tmp_path)).close()
    [(_, options)] = fake.named("init")
    assert options["mode"] == mode
    assert options["settings"]["console"] == "off"
    assert options["dir"] == str(tmp_path)


def test_where_to_look_is_said(install: Install, said: list[str], tmp_path: Path) -> None:
    install("wandb", Fake())
    Trackers(["wandb"], tracked(tmp_path))
    assert said == ["wandb: https://example.test/run"]


# --- secrets


def test_secrets_of_the_environment_are_masked(
    install: Install, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the settings that go out and in the errors that are shown; what is too short to be one stays."""
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh12345678")
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("SHORT_KEY", "1")
    fake = install("wandb", Fake())
    settings = {"data": {"path": "x?key=abcdefgh12345678", "columns": ("hf_verysecret", "a1")}, "seed": 1}
    Trackers(["wandb"], tracked(tmp_path, **settings))
    [(_, options)] = fake.named("init")
    assert options["config"]["data"] == {"path": "x?key=***", "columns": ["***", "a1"]}
    assert options["config"]["seed"] == 1
    assert options["config"]["rewards"] == ["a", "b"]

    def refuse(**options: Any) -> None:
        raise PermissionError("bad key abcdefgh12345678")

    install("wandb", types.SimpleNamespace(init=refuse, api=types.SimpleNamespace(api_key="k")))
    Trackers(["wandb"], tracked(tmp_path))
    assert said[-1] == "not tracked by wandb: PermissionError: bad key ***"


# --- a run


def test_a_run_tells_the_trackers_of_its_recipe_and_closes_them_whatever_ends_it(
    install: Install, tmp_path: Path
) -> None:
    board = install("tensorboard", Fake())
    with ExitStack() as stack:  # what the run leaves, whatever ends it
        run: Any = types.SimpleNamespace(
            learner=types.SimpleNamespace(step=0),
            recipe=Recipe(rewards=("exact_answer",), tracking=("tensorboard",)),
            folder=types.SimpleNamespace(path=tmp_path, resume_at=None, writes=True),
            stack=stack,
        )
        output = TrackersOutput()
        output.begin(run, {})
        output.evaluation("before", {"accuracy": 0.5})
        output.step(StepRecord(1, 1, 1, {"reward": 1.0}))
    assert [args for args, _ in board.named("add_scalar")] == [("eval/accuracy", 0.5, 0), ("reward", 1.0, 1)]
    assert board.calls[-1][0] == "close"
