"""Environments of an OpenEnv server: the wire, and a server that wants to harm."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest

from covey import EnvironmentRunner
from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError, RecipeError
from covey_envs.episodes import Episodes
from covey_envs.openenv import Server, action_of, factory, is_public, read_step
from covey_envs.registry import environment_name

websockets = pytest.importorskip("websockets")
from websockets.asyncio.server import serve  # noqa: E402


class NoTemplate:
    """Tokenizer of episodes that end before anything is encoded."""

    chat_template = None


UNUSED: Any = NoTemplate()
ROW = {"prompt": [{"role": "user", "content": "Guess."}], "seed": 7}
GUESS = {"type": "observation", "data": {"observation": {"text": "1..16"}, "reward": None, "done": False}}


@contextmanager
def served(handle: Callable[[Any], Any], redirect: str | None = None) -> Iterator[str]:
    """Run a server in a thread; yield its address."""
    ready, loop, port = threading.Event(), asyncio.new_event_loop(), [0]

    def process(connection: Any, request: Any) -> Any:
        if redirect is None:
            return None
        response = connection.respond(HTTPStatus.FOUND, "")
        response.headers["Location"] = redirect
        return response

    async def run() -> None:
        async with serve(handle, "127.0.0.1", 0, process_request=process, close_timeout=0.1) as server:
            port[0] = server.sockets[0].getsockname()[1]
            ready.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(5)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def opened(url: str, **settings: Any) -> EnvironmentRunner:
    config = EnvsConfig(environment=f"openenv:{url}", **{"private_addresses": True, "timeout": 5.0, **settings})
    return EnvironmentRunner(config=config)


async def guess(socket: Any) -> None:
    """Play a game for the number 11, as an OpenEnv server does."""
    async for text in socket:
        message = json.loads(text)
        number = message["data"].get("number")
        if message["type"] == "reset":
            assert message["data"] == {"seed": 7}
            reply: Any = GUESS
        elif message["type"] == "step" and str(number).isdigit():
            right = int(number) == 11
            data = {"observation": {"text": "right" if right else "no"}, "reward": float(right), "done": right}
            reply = {"type": "observation", "data": data}
        else:
            reply = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "number: not a number"}}
        await socket.send(json.dumps(reply))


def test_a_game_is_played_over_one_connection() -> None:
    async def play(environment: Any) -> list[Any]:
        prompt = await environment.reset()
        steps = [await environment.step(reply) for reply in ("8", "x", '```json\n{"number": 11}\n```')]
        await environment.close()
        return [prompt, *steps]

    with served(guess) as url:
        make = factory(url, EnvsConfig(environment="guess", private_addresses=True, action_field="number"))
        prompt, no, invalid, right = asyncio.run(play(make(ROW)))
        assert prompt == [{"role": "user", "content": "Guess.\n\n1..16"}]
        assert (no.messages, no.reward, no.done) == ("no", 0.0, False)
        assert read_step(GUESS).reward is None  # it has paid nothing yet
        assert invalid.messages == "Invalid action: number: not a number"
        assert (right.messages, right.reward, right.done) == ("right", 1.0, True)
        json_only = factory(url, EnvsConfig(environment="guess", private_addresses=True))(ROW)
        assert asyncio.run(play(json_only))[1].messages == "Answer with a JSON object."


LONG = "```" + "\n" * 20_000 + "x"
"""It takes cubic time in an expression with \\s*(.*?)\\s*."""


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ('{"a": 1}', {"a": 1}),
        (' \n```json\n {"a": 1}\n```\n', {"a": 1}),
        ('```{"a": 1}```', {"a": 1}),
        ("``````", {"text": "``````"}),
        ('```{"a": 1}', {"text": '```{"a": 1}'}),
        (LONG, {"text": LONG}),
    ],
)
def test_a_reply_is_an_object_perhaps_in_a_fence_or_a_text(reply: str, action: dict[str, Any]) -> None:
    assert action_of(reply, "text" if "text" in action else None) == action


async def one_gigabyte(socket: Any) -> None:
    """Announce a message of 1 GB, and send it as long as somebody takes it."""
    await socket.recv()
    socket.transport.write(b"\x81\x7f" + (1 << 30).to_bytes(8, "big"))
    SENT.append(0)
    while not socket.transport.is_closing() and SENT[-1] < 1 << 30:
        socket.transport.write(b"A" * (1 << 16))
        SENT[-1] += 1 << 16
        await asyncio.sleep(0.001)


async def drip(socket: Any) -> None:
    """Send a message byte by byte."""
    await socket.recv()
    socket.transport.write(b"\x81\x7e" + (1000).to_bytes(2, "big"))
    for _ in range(200):
        socket.transport.write(b"A")
        await asyncio.sleep(0.01)


async def leave(socket: Any) -> None:
    """Close the connection in the middle of a message."""
    await socket.recv()
    socket.transport.write(b"\x81\x7e" + (1000).to_bytes(2, "big") + b"A" * 10)
    socket.transport.close()


async def close_at_once(socket: Any) -> None:
    """Close the connection before a message, as a server that is full."""


async def refuse_at_once(socket: Any) -> None:
    """Say that the server is full, and close the connection before a message."""
    await socket.send('{"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1"}}')


SENT: list[int] = []


def says(reply: str | bytes) -> Callable[[Any], Any]:
    async def handle(socket: Any) -> None:
        async for _ in socket:
            await socket.send(reply)

    return handle


def observation(**data: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {}, "reward": 0, "done": False, **data}})


HOSTILE = [
    (one_gigabyte, "message too big"),
    (drip, "took longer than 1 s"),
    (leave, "ConnectionClosed"),
    (says("not json"), "sent what is no JSON: 'not json'"),
    (says(b"\x00\x01"), "sent bytes"),
    (says("[" * 100_000), "more than 10,000 brackets"),
    (says('{"a": ' * 9_000), "no JSON"),
    (says('{"type": "observation", "data": {"observation": {}, "reward": NaN}}'), "no JSON"),
    (says('{"type": "observation", "data": {"observation": {}, "reward": 1e999}}'), "the reward inf"),
    (says(observation(done="no")), "said 'no' for done"),
    (says(observation(observation=[1])), "sent {"),
    (says('{"type": "state", "data": {}}'), "sent {'type': 'state'"),
    (close_at_once, "closed the connection in reset(.|\n)*capacity is reached(.|\n)*max_concurrent_envs"),
    (refuse_at_once, "CAPACITY_REACHED(.|\n)*SUPPORTS_CONCURRENT_SESSIONS"),
    (says('{"type": "error", "data": {"code": "CAPACITY_REACHED"}}'), "CAPACITY_REACHED(.|\n)*max_concurrent_envs"),
    (says(observation(observation={"text": "x" * 30_000})), "30,\\d* characters from reset"),
]


@pytest.mark.parametrize(("handle", "what"), HOSTILE)
def test_a_hostile_server_fails_its_episode_in_time(handle: Callable[[Any], Any], what: str) -> None:
    with served(handle) as url, opened(url, timeout=1.0) as runner:
        began = time.perf_counter()
        with pytest.raises(EpisodeError, match=what):
            Episodes(runner, [ROW], 1, UNUSED).begin()
        assert time.perf_counter() - began < 5
    assert not SENT or SENT[-1] < 1 << 28


@pytest.mark.parametrize("handle", [close_at_once, refuse_at_once])
def test_a_server_that_is_full_is_named_also_when_it_has_closed_before_the_first_message(
    handle: Callable[[Any], Any],
) -> None:
    async def play(environment: Any) -> None:
        connect = environment._server.connect

        class Slow:
            async def connect(self) -> Any:
                socket = await connect()
                await socket.wait_closed()
                return socket

        environment._server = Slow()
        await environment.reset()

    with served(handle) as url, pytest.raises(EpisodeError) as raised:
        asyncio.run(play(factory(url, EnvsConfig(environment="guess", private_addresses=True))(ROW)))
    assert "max_concurrent_envs" in str(raised.value.fix)


def test_a_server_that_closes_in_a_game_is_not_said_to_be_full() -> None:
    async def one_message(socket: Any) -> None:
        await socket.recv()
        await socket.send(json.dumps(GUESS))

    async def play(environment: Any) -> None:
        await environment.reset()
        await environment.step('{"number": 1}')

    with served(one_message) as url, pytest.raises(EpisodeError, match="closed the connection in step") as raised:
        asyncio.run(play(factory(url, EnvsConfig(environment="guess", private_addresses=True))(ROW)))
    assert not raised.value.fix


def test_a_redirect_is_not_followed() -> None:
    reached = []

    async def inner(socket: Any) -> None:
        reached.append(socket)

    with (
        served(inner) as target,
        served(inner, redirect=target.replace("http", "ws") + "/ws") as url,
        opened(url) as runner,
        pytest.raises(EpisodeError, match="HTTP 302"),
    ):
        Episodes(runner, [ROW], 1, UNUSED).begin()
    assert not reached


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.1.2.3", "0.0.0.0", "2130706433"]
)
def test_a_private_address_must_be_asked_for(host: str) -> None:
    with (
        opened(f"http://{host}:9", private_addresses=False) as runner,
        pytest.raises(EpisodeError, match=r"has a private address(.|\n)*envs.private_addresses"),
    ):
        Episodes(runner, [ROW], 1, UNUSED).begin()
    assert not is_public("::ffff:10.0.0.1")


def test_the_address_is_one_of_a_server() -> None:
    for url in ("ftp://a.org", "https://", "https://me:secret@a.org", "https://a.org/?x=1", "http://a.org:99999"):
        with pytest.raises(RecipeError, match="not the address of an OpenEnv server"):
            factory(url, EnvsConfig(environment="guess"))
    assert environment_name("openenv:https://games.example:8000") == "openenv"
    assert Server("ws://a.org:80/ws").private_addresses is False


def test_a_server_that_rotates_its_tasks_can_be_played_by_groups_of_equal_prompts() -> None:
    connections = iter(range(99))

    async def rotate(socket: Any) -> None:
        number = next(connections) % 2
        async for _ in socket:
            await socket.send(json.dumps({"type": "observation", "data": {"observation": {"text": f"task {number}"}}}))

    with served(rotate) as url:
        with opened(url) as runner, pytest.raises(EpisodeError, match="different prompts"):
            Episodes(runner, [ROW], 4, UNUSED).begin()
        with opened(url, different_prompts="group") as runner:
            # One row: connections of several rows reach the server in any order, and so do its tasks.
            episodes = Episodes(runner, [ROW], 4, UNUSED)
            shown = [prompt[-1]["content"] for prompt in episodes.begin() if not isinstance(prompt, str)]
            assert sorted(shown) == ["Guess.\n\ntask 0", "Guess.\n\ntask 1"]
            assert [tuple(one) for one in episodes.requests] == [(0, 0, 2), (0, 2, 2)]
