"""The rehearsal: environments that depend on more than their row and their replies are told apart from others."""

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from covey import EnvironmentRunner, Step
from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError
from covey.parallel import processes
from covey_envs.rehearsal import rehearse
from covey_envs.trl import TrlFactory

ROWS = [{"prompt": [{"role": "user", "content": f"Play {number}."}], "number": number} for number in range(2)]


class Counts:
    """Depends on its row and its replies alone."""

    closed: ClassVar[list[Any]] = []

    def __init__(self, row: Mapping[str, Any]):
        self.row, self.turns = row, 0

    def reset(self) -> Any:
        return self.row["prompt"]

    def step(self, reply: str) -> Step:
        self.turns += 1
        return Step(f"{self.turns}", float(self.turns), self.turns == 3)

    def close(self) -> None:
        Counts.closed.append(self)


class KeepsTurnsInTheClass(Counts):
    """Begins anew at each reset, so that only episodes that overlap disturb each other."""

    turns_of_all = 0

    def reset(self) -> Any:
        type(self).turns_of_all = 0
        return super().reset()

    def step(self, reply: str) -> Step:
        type(self).turns_of_all += 1
        return Step(f"{self.turns_of_all}")


class KeepsTheNumberInTheClass(Counts):
    """The last row that was begun is that of all episodes."""

    def reset(self) -> Any:
        type(self).number = self.row["number"]  # type: ignore[attr-defined]
        return super().reset()

    def step(self, reply: str) -> Step:
        return Step(reward=float(self.number))  # type: ignore[attr-defined]


class EndsLaterEachTime(Counts):
    played = 0

    def reset(self) -> Any:
        type(self).played += 1
        return super().reset()

    def step(self, reply: str) -> Step:
        return Step("on", done=self.played > 1)


class RandomStart(Counts):
    def reset(self) -> Any:
        return [{"role": "user", "content": str(random.random())}]


class FailsSometimes(Counts):
    played = 0

    def step(self, reply: str) -> Step:
        type(self).played += 1
        return Step() if self.played < 2 else 1 / 0  # type: ignore[return-value]


class SharesItsBoard:
    """In the shape of TRL's `environment_factory`; only a call of its tool shows it."""

    board: ClassVar[list[int]] = []

    def reset(self, **row: Any) -> None:
        pass

    def put(self, number: int) -> str:
        """Put a number on the board.

        Args:
            number: The number.
        """
        self.board.append(number)
        return str(self.board)


def rehearsed(factory: Any, **settings: Any) -> None:
    with EnvironmentRunner(factory, EnvsConfig(environment="guess", tool_format="hermes", **settings)) as runner:
        runner.prepare("{{ messages }}")
        rehearse(runner, ROWS)


@pytest.mark.parametrize(
    ("factory", "what"),
    [
        (KeepsTurnsInTheClass, "message of turn 1 '1', then '2'|message of turn 2 '2', then '3'"),
        (KeepsTheNumberInTheClass, "reward of turn 1 0.0, then 1.0"),
        (EndsLaterEachTime, "end of the episode in turn 1 False, then True"),
        (RandomStart, "prompt"),
        (FailsSometimes, "failure in turn 1 '', then 'raised ZeroDivisionError"),
        (TrlFactory(SharesItsBoard), r"message of turn 1 .*\[1\].*\[1, 1"),
    ],
)
def test_what_depends_on_more_than_row_and_replies_is_named(factory: Any, what: str) -> None:
    with pytest.raises(EpisodeError, match=rf"{what}(.|\n)*keep the state in self(.|\n)*envs\.rehearsal: false"):
        rehearsed(factory)


def test_an_environment_that_depends_on_row_and_replies_passes_and_is_closed() -> None:
    Counts.closed.clear()
    rehearsed(Counts)
    assert len(Counts.closed) == 3
    for name in ("guess", "wordle"):
        with EnvironmentRunner(name) as runner:
            rehearse(runner, [{**row, "word": "cat"} for row in ROWS])


def test_an_environment_that_always_fails_is_left_to_the_run() -> None:
    class Fails(Counts):
        def step(self, reply: str) -> Step:
            raise ValueError(f"at {id(self)}")

    with EnvironmentRunner(Fails, EnvsConfig(environment="guess", on_error="none")) as runner:
        rehearse(runner, ROWS)
        assert runner.failed == 0


def test_it_is_due_for_environments_in_this_process_unless_a_setting_says_otherwise() -> None:
    def due(environment: Any = Counts, tools: Any = (), **settings: Any) -> bool:
        named = {"environment": environment} if isinstance(environment, str) else {}
        runner = EnvironmentRunner(None if tools else environment, EnvsConfig(**named, **settings), tools=tools)
        return runner.rehearses

    assert due()
    assert due("guess")
    assert not due("openenv:http://games.example")
    assert due("openenv:http://games.example", rehearsal=True)
    assert not due(tools=["calculator"])
    assert not due(rehearsal=False)
    assert not due(different_prompts="group")


def test_one_process_plays_and_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 of 2 plays nothing and has the error of process 0."""
    monkeypatch.setattr(processes.ALONE, "index", 1)
    monkeypatch.setattr(processes.ALONE, "broadcast", lambda value, about: value or "the prompt 'a', then 'b'")
    never_played = SimpleNamespace(name="game", config=EnvsConfig())
    with pytest.raises(EpisodeError, match="the prompt 'a', then 'b'"):
        rehearse(never_played, ROWS)  # type: ignore[arg-type]
