"""Environments that ask the model, played turn by turn."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from covey.errors import EpisodeError
from covey_envs.verifiers import Ask, Dialogue

ASK = {"role": "user", "content": "Count."}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def count(ask: Ask) -> float:
    """Ask twice, and give a tenth of a point for each character."""
    first = await ask([ASK])
    second = await ask([ASK, said(first), {"role": "user", "content": "Go on."}])
    return (len(first) + len(second)) / 10


def played(play: Any, *replies: str) -> list[Any]:
    """The prompt and the steps of an episode."""

    async def run() -> list[Any]:
        dialogue = Dialogue(play)
        shown: list[Any] = [await dialogue.reset()]
        shown += [await dialogue.step(reply) for reply in replies]
        await dialogue.close()
        return shown

    return asyncio.run(run())


def test_questions_become_messages_and_the_result_the_reward() -> None:
    prompt, first, last = played(count, "one", "three")
    assert prompt == [ASK]
    assert (first.messages, first.reward, first.done) == ([{"role": "user", "content": "Go on."}], None, False)
    assert (last.messages, last.reward, last.done) == ((), 0.8, True)


def test_an_episode_that_is_left_is_ended() -> None:
    ended = []

    async def play(ask: Ask) -> float:
        try:
            return await count(ask)
        finally:
            ended.append(True)

    played(play, "one")
    assert ended == [True]


async def nothing(ask: Ask) -> float:
    return 0.0


async def breaks(ask: Ask) -> float:
    await ask([ASK])
    raise ValueError("broken")


async def forgets(ask: Ask) -> float:
    await ask([ASK])
    return float(await ask([ASK]))


async def twice(ask: Ask) -> float:
    await asyncio.gather(ask([ASK]), ask([ASK]))
    return 0.0


@pytest.mark.parametrize(
    ("play", "error", "what"),
    [
        (nothing, EpisodeError, "ended before it asked"),
        (breaks, ValueError, "broken"),
        (forgets, EpisodeError, "another conversation"),
        (twice, EpisodeError, "twice at the same time"),
    ],
)
def test_what_is_no_single_conversation_is_refused(play: Callable[[Ask], Any], error: type, what: str) -> None:
    with pytest.raises(error, match=what):
        played(play, "one")
