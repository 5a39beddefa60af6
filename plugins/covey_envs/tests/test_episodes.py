"""Episodes without a model: conversations, rewards and limits, and environments that raise, hang, exit or flood."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey import EnvironmentRunner, Step
from covey.config.metrics import metric
from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError, RecipeError
from covey.rl.step_data import table_of
from covey.sampling.responder import NewBranch, SamePrompt, Turn
from covey.sampling.scheduler import Sample
from covey.sampling.sequence import Ending
from covey.text.tokenizer import Tokenizer
from covey.types import Branch, Completion, Episode, FinishReason, Group
from covey_envs.episodes import Episodes
from covey_envs.metrics import episode_metrics

TINY = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"
TOKENIZER = Tokenizer.from_folder(TINY)
END = int(TOKENIZER.encode("<|im_end|>")[0])
STOPPED = Ending(1, FinishReason.STOP)
ASK = [{"role": "user", "content": "Count."}]


class Counts:
    """Answers each reply with its length, gives half a point for it, and ends after the row's number of turns."""

    def __init__(self, row: Mapping[str, Any]):
        self.row, self.turns = row, 0

    def reset(self) -> Any:
        return self.row["prompt"]

    def step(self, reply: str) -> Any:
        self.turns += 1
        return Step(f"{len(reply)} characters", reward=0.5, done=self.turns >= self.row["turns"])


class CountsLater(Counts):
    async def step(self, reply: str) -> Any:
        await asyncio.sleep(0.01)
        return super().step(reply)


class Play:
    """An episode that is played by hand."""

    def __init__(self, factory: Any = Counts, *, turns: int = 2, prompt: Any = ASK, samples: int = 1, **settings: Any):
        config = EnvsConfig(environment="guess", **{"timeout": 5.0, **settings})
        self.runner = EnvironmentRunner(factory, config)
        row = {"prompt": prompt, "turns": turns}
        self.episodes = Episodes(self.runner, [row], samples, TOKENIZER)
        self.prompts = self.episodes.begin()
        self.tokens = np.zeros(0, np.int32)

    def says(self, text: str, *, room: int = 100, end: int | None = END) -> np.ndarray | None:
        """The response to a turn of the model."""
        said = np.append(TOKENIZER.encode(text), [] if end is None else end).astype(np.int32)
        self.tokens = np.concatenate([self.tokens, said])
        ending = STOPPED if end is not None else Ending(len(said), FinishReason.LENGTH)
        response = self.episodes.answer(Turn(Sample(0, 0), self.tokens, room, ending)).result(10)
        if response is not None:
            self.tokens = np.concatenate([self.tokens, response])
        return response

    def over(self) -> tuple[Episode, FinishReason]:
        none = np.zeros(len(self.tokens), np.float32)
        completion = Completion(self.tokens, none, none, FinishReason.STOP)
        found = self.episodes.completion(0, 0, completion)
        assert found.episode is not None
        return found.episode, found.finish


@pytest.mark.parametrize("factory", [Counts, CountsLater])
def test_a_conversation_goes_on_until_the_environment_ends_it(factory: Any) -> None:
    play = Play(factory)
    assert play.prompts == [ASK]
    response = play.says("one")
    assert TOKENIZER.decode(response, skip_special=False) == (
        "\n<|im_start|>user\n3 characters<|im_end|>\n<|im_start|>assistant\n"
    )
    assert play.says("three") is None
    episode, finish = play.over()
    assert [m["role"] for m in episode.messages] == ["assistant", "user", "assistant", "user"]
    assert [m["content"] for m in episode.messages] == ["one", "3 characters", "three", "5 characters"]
    assert (episode.turn_rewards, episode.reward, episode.done) == ((0.5, 0.5), 1.0, True)
    assert finish is FinishReason.STOP
    assert play.tokens[: episode.turn_ends[0]][-1] == END
    assert episode.turn_ends[1] == len(play.tokens)


def test_rewards_that_cancel_are_0() -> None:
    """0.1 + 0.2 − 0.3 is 5.6e-17, which would be better than 0."""

    class Pays(Counts):
        def step(self, reply: str) -> Any:
            return replace(super().step(reply), reward=(0.1, 0.2, -0.3)[self.turns - 1])

    play = Play(Pays, turns=3)
    for word in ("one", "two", "three"):
        play.says(word)
    episode = play.over()[0]
    assert (episode.turn_rewards, episode.reward) == ((0.1, 0.2, -0.3), 0.0)


def test_plain_text_goes_on_as_plain_text() -> None:
    play = Play(prompt="Count:")
    assert TOKENIZER.decode(play.says("one", end=TOKENIZER.eos_id)) == "3 characters"
    assert play.over()[0].messages[1] == {"role": "environment", "content": "3 characters"}


def test_a_turn_that_was_cut_is_answered_too_and_gets_its_end() -> None:
    play = Play()
    response = play.says("one", end=None)
    assert response is not None
    assert response[0] == END
    assert [message["content"] for message in play.over()[0].messages] == ["one", "3 characters"]


def test_seconds_are_those_of_reset_and_of_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr("covey_envs.episodes.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    play = Play(turns=3)
    for text in ("one", "two"):
        play.says(text)
    assert play.over()[0].seconds == 3.0


ENDS = [
    # settings, ends of the turns, room for tokens, and how the episode of two turns ends
    ({}, [END, END], 100, "stop"),
    ({}, [END, None], 100, "length"),  # the environment ends an episode whose last turn was cut
    ({}, [None, END], 100, "stop"),  # an earlier turn that was cut was answered
    ({"max_turns": 1}, [None], 100, "length"),  # the limit of turns, too
    ({"max_turns": 1}, [END], 100, "turns"),
    ({}, [END], 0, "length"),
]


@pytest.mark.parametrize(("settings", "ends", "room", "how"), ENDS)
def test_an_episode_says_how_it_ended_and_keeps_its_reward(
    settings: dict[str, int], ends: list[int | None], room: int, how: str
) -> None:
    play = Play(turns=2, **settings)
    responses = [play.says("one", room=room, end=end) for end in ends]
    assert responses[-1] is None
    episode, finish = play.over()
    assert (episode.reward, episode.done) == (0.5 * len(ends), len(ends) == 2)
    assert (finish, finish.was_cut) == (how, how == "length")


class PaysAtItsEnd(Counts):
    """Pays 1 if it was told three characters at last, and takes 1 otherwise."""

    def step(self, reply: str) -> Any:
        self.turns, self.right = self.turns + 1, reply == "one"
        return Step("go on", done=True, reward=self.end()) if self.turns == self.row["turns"] else Step("go on")

    def end(self) -> float:
        return 1.0 if self.right else -1.0


class CanSay(PaysAtItsEnd):
    def get_reward(self) -> Any:
        return self.end()


class SaysLater(CanSay):
    async def get_reward(self) -> Any:
        await asyncio.sleep(0.01)
        return self.end()


class CannotSay(PaysAtItsEnd):
    def get_reward(self) -> Any:
        return None


class PaysOnTheWay(CanSay):
    def step(self, reply: str) -> Any:
        return replace(super().step(reply), reward=0.25)


CUTS: list[tuple[dict[str, Any], int | None, int, str]] = [
    ({"max_turns": 1}, END, 100, "turns"),
    ({"max_turns": 1}, None, 100, "length"),
    ({}, None, 0, "length"),  # no token is left
    ({}, END, 2, "length"),  # the response has no room
]


@pytest.mark.parametrize(("settings", "end", "room", "how"), CUTS)
@pytest.mark.parametrize(
    ("factory", "told", "reward"),
    [
        (
            PaysAtItsEnd,
            "one",
            None,
        ),  # neither better than what ends by itself and is wrong, nor worse than what is right
        (PaysAtItsEnd, "two", None),
        (CanSay, "one", 1.0),
        (CanSay, "two", -1.0),
        (SaysLater, "one", 1.0),
        (CannotSay, "one", None),
        (PaysOnTheWay, "one", 1.25),
        (Counts, "one", 0.5),
    ],
)
def test_an_episode_that_a_limit_ends_earns_what_the_environment_says(
    factory: Any, told: str, reward: float | None, settings: dict[str, Any], end: int | None, room: int, how: str
) -> None:
    play = Play(factory, **settings)
    assert play.says(told, end=end, room=room) is None
    episode, finish = play.over()
    assert (episode.reward, episode.done, finish) == (reward, False, how)
    assert episode.turn_rewards == (reward or 0.0,)


def test_what_an_environment_pays_at_an_end_of_its_own_is_paid_once(caplog: pytest.LogCaptureFixture) -> None:
    for factory, told, reward in ((CanSay, "one", 1.0), (PaysAtItsEnd, "two", -1.0), (CannotSay, "one", 1.0)):
        play = Play(factory, turns=1)
        assert play.says(told) is None
        assert play.over()[0].reward == reward
    silent = type("Silent", (Counts,), {"step": lambda self, reply: Step(done=True)})
    assuming = type("Assuming", (silent,), {"get_reward": lambda self: 0.5})
    for factory, reward in ((silent, 0.0), (assuming, 0.5)):
        play = Play(factory)
        assert play.says("one") is None
        assert play.over()[0].reward == reward
    assert not caplog.messages
    Play(PaysAtItsEnd, max_turns=1).says("one")
    assert ["a limit ended an episode" in message for message in caplog.messages] == [True]


def test_a_reward_that_cannot_be_asked_for_is_a_failure() -> None:
    for answer, what in ((lambda self: "much", "gave the reward 'much'"), (lambda self: 1 / 0, "in get_reward")):
        factory = type("Fails", (PaysAtItsEnd,), {"get_reward": answer})
        with pytest.raises(EpisodeError, match=what):
            Play(factory, max_turns=1).says("one")
        play = Play(factory, max_turns=1, on_error="value", value=-2.0)
        assert play.says("one") is None
        assert (play.over()[0].reward, play.over()[1]) == (-2.0, "failure")


def failing(method: str, act: Callable[[], Any]) -> type[Counts]:
    return type("Failing", (Counts,), {method: lambda self, *args: act()})


FAILURES = [
    (lambda: 1 / 0, "raised ZeroDivisionError in step"),
    (lambda: sys.exit(0), "raised SystemExit"),
    (lambda: os._exit(0), "raised SystemExit"),
    pytest.param(lambda: time.sleep(20), "took longer than 1 s in step", marks=pytest.mark.slow),
    pytest.param(lambda: asyncio.sleep(20), "took longer than 1 s in step", marks=pytest.mark.slow),
    (lambda: Step("x" * 1_000_000), "returned 1,000,000 characters from step"),
    (lambda: Step(reward=float("nan")), "gave the reward nan"),
    (lambda: Step(reward=10**400), "gave the reward 10000"),
    (lambda: Step(done="no"), "said 'no' for done"),  # type: ignore[arg-type]
    (lambda: ("hi", 1.0, False), "want|returned"),
    (lambda: Step([{"role": "user"}]), "what is no chat"),  # type: ignore[list-item]
    (lambda: Step([{"role": "user", "content": 5}]), "what is no chat"),  # type: ignore[list-item, dict-item]
]


@pytest.mark.parametrize(("act", "what"), FAILURES)
def test_a_failure_ends_its_episode_by_the_policy(act: Callable[[], Any], what: str) -> None:
    settings = {"timeout": 1.0 if "took longer" in what else 2.0}
    with pytest.raises(EpisodeError, match=what):
        Play(failing("step", act), **settings).says("one")
    for policy, reward in (("none", None), ("value", -1.0)):
        play = Play(failing("step", act), on_error=policy, value=-1.0, **settings)
        assert play.says("one") is None
        episode, finish = play.over()
        assert episode.reward == reward
        assert episode.failure
        assert finish is (FinishReason.TIME if "took longer" in what else FinishReason.FAILURE)
        assert finish.was_cut == ("took longer" in what)
        assert play.runner.failed == 1


def test_an_environment_that_fails_at_its_beginning_gives_its_sample_no_turn() -> None:
    made: list[int] = []

    class Second(Counts):
        def reset(self) -> Any:
            made.append(1)
            return super().reset() if len(made) != 1 else 1 / 0

    play = Play(Second, samples=2, on_error="none")
    assert play.prompts == [ASK]  # that of the other sample
    assert play.runner.failed == 1
    with pytest.raises(EpisodeError, match="ZeroDivisionError in reset"):
        Play(failing("reset", lambda: 1 / 0))
    every = Play(failing("reset", lambda: 1 / 0), on_error="none")
    assert every.prompts == [ASK]
    assert every.says("one") is None
    assert every.over()[0].reward is None


def test_failures_beyond_the_budget_stop_the_run() -> None:
    with pytest.raises(EpisodeError, match=r"3 failures of the environment 'failing'(.|\n)*at most 2"):
        Play(failing("reset", lambda: 1 / 0), samples=3, on_error="none", budget=2)


def test_samples_with_equal_prompts_are_one_request_where_they_may_differ() -> None:
    prompts = iter(["a", "b", "a", "c", "b"])

    class Rotates(Counts):
        def reset(self) -> str:
            return next(prompts)

    play = Play(Rotates, samples=5, different_prompts="group", concurrency=1)
    assert play.prompts == ["a", "b", "c"]
    assert play.episodes.requests == [SamePrompt(0, 0, 2), SamePrompt(0, 2, 2), SamePrompt(0, 4, 1)]


@pytest.mark.parametrize("more", [[5, 6], []])
def test_a_branch_has_a_token_to_compute(more: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the history that the template renders begins with all of the sequence, or is its beginning."""
    play = Play(history="template", turns=9)
    said = np.append(TOKENIZER.encode("one"), END).astype(np.int32)
    before = np.concatenate([play.episodes.encode_prompt(ASK), said])
    rendered = np.append(before, more) if more else before[:-2]
    monkeypatch.setattr("covey_envs.episodes.keeps_history", lambda *_, **__: False)
    monkeypatch.setattr(Episodes, "encode_prompt", lambda *_: rendered)
    branch = play.episodes.answer(Turn(Sample(0, 0), said, 100, STOPPED)).result(10)
    assert isinstance(branch, NewBranch)
    assert branch.kept == min(len(before), len(rendered)) - 1
    np.testing.assert_array_equal(branch.tokens, rendered[branch.kept :])


def test_a_rewritten_history_is_warned_of_once_by_the_first_sample_of_a_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rendering takes time, and the samples of a row are alike."""
    asked = []
    monkeypatch.setattr("covey_envs.episodes.keeps_history", lambda *_, **__: bool(asked.append(True)))
    play = Play(samples=2, turns=9)
    said = np.append(TOKENIZER.encode("one"), END).astype(np.int32)
    for number, count_of_warnings in ((1, 0), (0, 1)):
        play.episodes.answer(Turn(Sample(0, number), said, 100, STOPPED)).result(10)
        assert len(asked) == caplog.text.count("renders earlier turns") == count_of_warnings


def test_calls_run_at_once_up_to_the_limit() -> None:
    running, most, lock = [0], [0], threading.Lock()

    class Busy(Counts):
        def reset(self) -> Any:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.05)
            with lock:
                running[0] -= 1
            return super().reset()

    Play(Busy, samples=12, concurrency=4)
    assert 2 <= most[0] <= 4


def test_an_environment_is_closed_and_its_row_is_its_own() -> None:
    def reset(self: Any) -> str:
        self.row["prompt"] = None
        return "Count:"

    sandbox = counting(reset=reset, step=Counts.step)
    play = Play(sandbox, turns=1)
    play.says("one")
    assert sandbox.closed == 1
    assert play.episodes._states[0][0].row["prompt"] == ASK


def test_names_are_found_or_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_game.py").write_text("class Hangman:\n    def __init__(self, row): pass\n")
    assert EnvironmentRunner("my_game:Hangman").name == "hangman"
    with pytest.raises(RecipeError, match=r"no environment 'gues'(.|\n)*did you mean 'guess'"):
        EnvironmentRunner("gues")
    with pytest.raises(RecipeError, match="no class 'Hangmen'"):
        EnvironmentRunner("my_game:Hangmen")
    with pytest.raises(RecipeError, match="environment 'nothing_here:X': importing"):
        EnvironmentRunner("nothing_here:X")


def metrics_of(*completions: Completion) -> dict[str, float]:
    return episode_metrics(table_of([Group("", np.zeros(1, np.int32), completions)]))


def test_branches_are_counted_where_a_history_may_make_them() -> None:
    none = np.zeros(3, np.float32)
    plain = Completion(np.zeros(3, np.int32), none, none, FinishReason.STOP, episode=Episode(turn_ends=(3,)))
    branched = [replace(plain, branches=found) for found in ((), (Branch(1, 2), Branch(2, 2)))]
    assert metrics_of(*branched)["env/branches"] == 1.0
    assert "env/branches" not in metrics_of(plain)


class Sandbox(Counts):
    """Holds something until it is closed, and fails in step if its row says so."""

    opened = closed = 0

    def __init__(self, row: Any):
        super().__init__(row)
        type(self).opened += 1

    def step(self, reply: str) -> Any:
        return 1 / 0

    def close(self) -> None:
        type(self).closed += 1


def counting(**members: Any) -> Any:
    return type("Sandbox", (Sandbox,), {"opened": 0, "closed": 0, **members})


def test_under_raise_every_environment_is_closed_also_those_that_play_on() -> None:
    sandbox = counting()
    play = Play(sandbox, samples=16)
    with pytest.raises(EpisodeError, match="ZeroDivisionError in step"):
        play.says("one")
    assert (sandbox.opened, sandbox.closed) == (16, 1)
    play.runner.close()
    assert sandbox.closed == 16
    begins = counting(reset=lambda self: 1 / 0)
    with pytest.raises(EpisodeError, match="ZeroDivisionError in reset"):
        Play(begins)
    assert begins.closed == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_raised_in_close_is_logged_once_and_hides_nothing(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def later(self: Any) -> None:
        raise OSError("no such sandbox")

    def now(self: Any) -> None:
        raise OSError("no such sandbox")

    play = Play(counting(close=later if asynchronous else now), samples=4)
    with pytest.raises(EpisodeError, match="ZeroDivisionError in step"):
        play.says("one")
    play.runner.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert "raised OSError in close: no such sandbox; what it holds may be left behind" in first
    assert last == "4 environments 'sandbox' could not be closed"


def test_an_environment_that_does_not_close_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("covey_envs.runner.CLOSE_SECONDS", 0.1)
    release = threading.Event()
    play = Play(counting(close=lambda self: release.wait(30)))
    play.runner.close()
    release.set()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "the environment 'sandbox' took longer than 0.1 s in close, at the end of the run"
    ]


def telling(*infos: Any) -> Any:
    """An environment whose steps give these infos, one in each turn."""

    class Tells(Counts):
        def step(self, reply: str) -> Any:
            return replace(super().step(reply), info=infos[self.turns - 1])

    return Tells


def test_the_environments_own_numbers_are_metrics(caplog: pytest.LogCaptureFixture) -> None:
    infos = [{"moves": 1, "won": False, "board": [1], "level": "easy", "x": None}, {"moves": 2.5, "tool_calls": 3}]
    play = Play(telling(*infos))
    play.says("one")
    play.says("two")
    episode, _ = play.over()
    assert not caplog.records, "info may hold anything else"
    assert episode.numbers == {"moves": 2.5, "won": 0.0}
    none = Completion(np.zeros(3, np.int32), np.zeros(3, np.float32), np.zeros(3, np.float32), FinishReason.STOP)
    others = [Episode(numbers={"moves": 1.5, "won": 1.0, "rare": 7.0}), Episode()]
    found = metrics_of(*(replace(none, episode=one) for one in (episode, *others)))
    own = {name: value for name, value in found.items() if metric(name) is metric("env/won")}
    assert own == {"env/moves": 2.0, "env/rare": 7.0, "env/won": 0.5}
    assert found["env/tool_calls"] == 1.0


UNUSABLE = [
    ({"score": float("nan")}, "it is not finite"),
    ({"score": -1e101}, "beyond 1e+100"),
    ({"score": 10**400}, "it is not finite"),
    ({"Wall Time": 1.0}, "small letters"),
    ({"turns": 1.0}, "a metric of every environment has its name"),
    ({f"n{number}": 1.0 for number in range(40)}, "there are 32 others"),
]


@pytest.mark.parametrize(("info", "reason"), UNUSABLE)
def test_numbers_that_cannot_be_metrics_are_left_out_with_one_warning(
    info: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    play = Play(telling(info, info), samples=2)
    play.says("one")
    play.says("two")
    assert len(play.over()[0].numbers) == (32 if len(info) == 40 else 0)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert reason in warning
    assert "in the info of the environment 'tells' is no metric" in warning
