"""An environment of verifiers 0.4, really run: its turns, its reward, and what is refused."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import EnvsConfig
from covey.envs import EnvironmentRunner
from covey.envs.verifiers import factory
from covey.errors import EpisodeError, RecipeError

TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int = 0


class Guess(vf.Task[Data]):
    @vf.reward
    async def right(self, trace):
        return 0.5 * (trace.last_reply == str(self.data.answer))


class GuessTaskset(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for answer in range(9):
            yield Guess(Data(prompt="Guess.", answer=answer), self.config.task)


class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as chat:
            seg = await chat.turn()
            while not seg.terminated and seg.last_reply != str(task.data.answer):
                seg = await chat.turn("No.")


__all__ = ["GuessTaskset", "GuessEnv"]
"""


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(RecipeError, match=r"need its version 0.4(.|\n)*\[verifiers\]"):
        factory("guess", EnvsConfig(environment="guess"))


def test_a_game_is_played_by_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "vf_guess.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def play(task: Any, *replies: str) -> list[Any]:
        environment = await runner.make({"prompt": "", "task": task})
        shown = [await environment.reset()]  # type: ignore[misc]
        shown += [await environment.step(reply) for reply in replies]  # type: ignore[misc]
        await environment.close()  # type: ignore[attr-defined]
        return shown

    with EnvironmentRunner(config=EnvsConfig(environment="verifiers:vf_guess", max_turns=3)) as runner:
        prompt, no, right = runner.submit(play(4, "7", "4")).result(60)
        assert prompt == [{"role": "user", "content": "Guess."}]
        assert (no.messages, no.done) == ([{"role": "user", "content": "No."}], False)
        assert (right.reward, right.done) == (0.5, True)
        assert runner.submit(play(4, "1", "2", "3")).result(60)[-1].done  # the limit of turns

        async def together() -> Any:
            return await asyncio.gather(play(1, "1"), play(2, "1", "2"))

        assert [episode[-1].reward for episode in runner.submit(together()).result(60)] == [0.5, 0.5]
        with pytest.raises(EpisodeError, match="has no task 9"):
            runner.submit(play(9)).result(60)
    with pytest.raises(RecipeError, match="cannot load 'no_such_taskset'"):
        factory("no_such_taskset", EnvsConfig(environment="guess"))
