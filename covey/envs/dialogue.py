"""Environments that ask the model, as environments that the model's turns are given to.

Other libraries write an environment as a coroutine that asks the model and goes on with its reply. Here the question is
the prompt, or the response to a turn, and the coroutine waits for the model's next turn:

    play(ask) ─▶ await ask(messages)   ⇄   reset() ─▶ messages, step(reply) ─▶ Step(new messages)
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from covey.envs.protocol import Step
from covey.errors import EpisodeError
from covey.rewards.call import excerpt
from covey.types import Message

Ask = Callable[[Sequence[Message]], Awaitable[str]]
"""Coroutine function that gives the model a whole conversation and returns its turn."""
Play = Callable[[Ask], Coroutine[Any, Any, float]]
"""Coroutine function that plays an episode and returns its reward."""


class Dialogue:
    """An episode of an environment that asks the model: one conversation, which only grows.

    Args:
        play: plays the episode. It runs while `reset` or `step` is awaited and in between.
    """

    def __init__(self, play: Play):
        self._play = play
        self._questions: asyncio.Queue[Sequence[Message] | None] = asyncio.Queue()
        self._reply: asyncio.Future[str] | None = None
        self._task: asyncio.Task[float] | None = None
        self._conversation: list[Message] = []

    async def reset(self) -> Sequence[Message]:
        """Begin to play; return the first question.

        Raises:
            EpisodeError: the environment ends without a question.
        """
        self._task = asyncio.create_task(self._play(self._ask))
        self._task.add_done_callback(lambda _: self._questions.put_nowait(None))
        question = await self._questions.get()
        if question is None:
            self._task.result()
            raise EpisodeError("ended before it asked the model anything")
        self._conversation = list(question)
        return question

    async def step(self, reply: str) -> Step:
        """Give the model's turn to the environment; return what it adds before it asks again, or the end.

        Raises:
            EpisodeError: it asks about another conversation than the one so far.
        """
        assert self._reply is not None, "reset comes first"
        assert self._task is not None
        self._conversation.append({"role": "assistant", "content": reply})
        self._reply.set_result(reply)
        question = await self._questions.get()
        if question is None:
            return Step(reward=self._task.result(), done=True)
        asked, known = list(question), len(self._conversation)
        if asked[:known] != self._conversation:
            what = "asks the model about another conversation than the one so far"
            raise EpisodeError(what, want="the same messages, the model's turn, and new messages")
        self._conversation = asked
        return Step(asked[known:])

    async def close(self) -> None:
        """End the environment, if it has not ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _ask(self, messages: Sequence[Message]) -> str:
        if self._reply is not None and not self._reply.done():
            raise EpisodeError("asks the model twice at the same time", want="one conversation")
        self._reply = asyncio.get_running_loop().create_future()
        self._questions.put_nowait(messages)
        return await self._reply


def plain_messages(prompt: Any) -> list[Message]:
    """Return the messages of a prompt of verifiers as chat messages.

    >>> plain_messages("Guess.")
    [{'role': 'user', 'content': 'Guess.'}]

    Raises:
        EpisodeError: a message has something else than text.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    dicts = [m if isinstance(m, Mapping) else {"role": m.role, "content": m.content} for m in prompt]
    for message in dicts:
        if not isinstance(message.get("content"), str):
            raise EpisodeError(f"has a message with {excerpt(message.get('content'))}", want="text")
    return [{"role": message["role"], "content": message["content"]} for message in dicts]
