"""Environments of an OpenEnv server, over its WebSocket: `openenv:URL`.

    reset ─▶ {"type": "reset", "data": {"seed": …}}     ◀─ {"type": "observation", "data": {"observation": {…}, …}}
    step  ─▶ {"type": "step", "data": {action}}         ◀─ the same, with reward and done

The server keeps one environment for each connection, so an episode is a connection. The server is an untrusted peer: it
sends JSON and nothing that is run, its messages are limited in size, depth and time, it cannot redirect, and it is
reached at a private address only if the settings say so.
"""

import asyncio
import ipaddress
import json
import socket
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError, RecipeError
from covey.registry import import_package
from covey.rewards.call import excerpt
from covey.types import Prompt
from covey_envs.protocol import Factory, Step, checked_step
from covey_envs.tool_calls import read_json

MAX_BYTES = 1 << 20
"""Largest message that is taken from a server."""
MAX_BRACKETS = 10_000
"""Largest number of brackets in a message: deep nesting exhausts the stack of a JSON parser."""
MAX_ERROR = 500
"""Maximum characters kept of a server's error."""
CLOSE_SECONDS = 1.0
"""Time to wait for the server's part of closing a connection."""

MORE_SESSIONS = (
    "at the server create_app(..., max_concurrent_envs=N), which is 1 by default, and SUPPORTS_CONCURRENT_SESSIONS = "
    "True in the environment's class; N is the number of episodes of a step. Or fewer episodes in a step"
)
"""Fix for a server that takes no more connections."""
FENCE = "```"
WHERE = "envs.environment"
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def factory(url: str, config: EnvsConfig) -> Factory:
    """Return the factory of the environments of the server at `url`. It is not connected to yet.

    Raises:
        RecipeError: `url` is not an address of a server, or the package websockets is missing.
    """
    import_package("websockets.asyncio.client", RecipeError, "OpenEnv needs the package websockets", "openenv", WHERE)
    server = Server(_websocket_url(url), config.action_field, config.private_addresses, config.arguments)
    return lambda row: OpenEnv(server, row)


@dataclass(frozen=True)
class Server:
    """An OpenEnv server.

    Attributes:
        url: address of its WebSocket.
        action_field: field of an action that takes a reply that is no JSON object; None if actions are JSON only.
        private_addresses: whether it may have a private address.
        arguments: arguments of every `reset`.
    """

    url: str
    action_field: str | None = None
    private_addresses: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    async def connect(self) -> Any:
        """Connect to the server, at an address that has been checked.

        Raises:
            EpisodeError: it has no address that may be used.
        """
        from websockets.asyncio.client import connect

        class Direct(connect):  # type: ignore[misc]  # it has no types here
            """Connect without following redirects; websockets follows ten, to any address."""

            def process_redirect(self, exc: Exception) -> Exception | str:
                return exc

        # No limits of time here: the whole call has one.
        times = {"open_timeout": None, "ping_interval": None, "close_timeout": CLOSE_SECONDS}
        address, limits = await self._address(), {"max_size": MAX_BYTES, "compression": None}
        return await Direct(self.url, host=address, proxy=None, **times, **limits)

    async def _address(self) -> str:
        """Resolve the server's name to an address that may be used."""
        parts = urlsplit(self.url)
        entries = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in entries]
        allowed = [address for address in addresses if self.private_addresses or is_public(address)]
        if not allowed:
            raise EpisodeError(
                f"has a private address: {parts.hostname} is {', '.join(sorted(set(addresses)))}",
                want="a public address",
                fix="envs.private_addresses: true, if you trust what is reached there",
            )
        return allowed[0]


class OpenEnv:
    """One episode on a server.

    The row's `reset`, a mapping, is what the environment is begun with beside `envs.arguments`; by default that is a
    seed made from the row.
    """

    def __init__(self, server: Server, row: Mapping[str, Any]):
        self._server, self._prompt = server, row["prompt"]
        own = row["reset"] if isinstance(row.get("reset"), Mapping) else {"seed": row_seed(row)}
        self._start = {**server.arguments, **own}
        self._socket: Any = None

    async def reset(self) -> Prompt:
        """Connect, and return the row's prompt followed by the first observation."""
        self._socket = await self._server.connect()
        try:
            return with_text(self._prompt, str((await self._ask("reset", self._start)).messages))
        except BaseException:  # also where a limit of time cancels this
            self._socket.transport.abort()
            raise

    async def step(self, reply: str) -> Step:
        """Carry out the action that `reply` describes."""
        action = action_of(reply, self._server.action_field)
        return Step("Answer with a JSON object.") if action is None else await self._ask("step", action)

    async def close(self) -> None:
        """Close the connection, which ends the environment."""
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Step:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # what the server said before it closed can still be read
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            return read_step(parse_object(await self._socket.recv()))
        except ConnectionClosed as error:
            if error.rcvd is None or not error.rcvd_then_sent:
                raise
            what, fix = f"closed the connection in {kind} ({error.rcvd})", ""
            if kind == "reset":
                what += ", before the first observation, as a server does whose capacity is reached"
                fix = MORE_SESSIONS
            raise EpisodeError(what, fix=fix) from None


def is_public(address: str) -> bool:
    """Tell whether an IP address belongs to the public internet.

    >>> is_public("127.0.0.1"), is_public("10.0.0.1"), is_public("::ffff:169.254.169.254"), is_public("1.1.1.1")
    (False, False, False, True)
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_global and not ip.is_multicast


def parse_object(text: Any) -> dict[str, Any]:
    """Parse a text that is a JSON object.

    Raises:
        EpisodeError: it holds none, a number that JSON does not have, or too many brackets.
    """
    if not isinstance(text, str):
        raise EpisodeError("sent bytes", want="a JSON object as text")
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise EpisodeError(f"sent more than {MAX_BRACKETS:,} brackets", want="flatter JSON")
    try:
        value = read_json(text)
    except ValueError as error:
        raise EpisodeError(f"sent what is no JSON: {excerpt(text)}", want="a JSON object") from error
    if not isinstance(value, dict):
        raise EpisodeError(f"sent {excerpt(value)}", want="a JSON object")
    return value


def read_step(message: Mapping[str, Any]) -> Step:
    """Read a step from a server's message. An action that it refuses as invalid is the model's mistake, which is told
    to the model.

    Raises:
        EpisodeError: the message is an error, or no observation.
    """
    data = data if isinstance(data := message.get("data"), dict) else {}
    if message.get("type") == "error":
        return _refused(data)
    observation = data.get("observation")
    if message.get("type") != "observation" or not isinstance(observation, dict):
        raise EpisodeError(f"sent {excerpt(message)}", want='{"type": "observation", "data": {"observation": {…}, …}}')
    step = Step(format_observation(observation), data.get("reward"), data.get("done", False))
    return checked_step(step, as_chat=False, limit=MAX_BYTES)


def format_observation(observation: Mapping[str, Any]) -> str:
    """Format an observation as text: its one field if that is text, else all fields as JSON.

    >>> format_observation({"text": "higher", "metadata": {}}), format_observation({"board": [0, 1], "left": 3})
    ('higher', '{"board": [0, 1], "left": 3}')
    """
    fields = {name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")}
    only = next(iter(fields.values()), "")
    return only if len(fields) < 2 and isinstance(only, str) else json.dumps(fields, ensure_ascii=False)


def action_of(reply: str, field: str | None) -> dict[str, Any] | None:
    """Read the action that a reply of the model describes: a JSON object, also in a code fence, that has `field`, or
    else the whole reply as `field`; None if there is no field and no object.

    >>> action_of("12", "number"), action_of('```json\\n{"number": 12}\\n```', None), action_of("12", None)
    ({'number': '12'}, {'number': 12}, None)
    """
    try:
        action = parse_object(_without_fence(reply))
    except EpisodeError:
        action = None
    if field is not None and (action is None or field not in action):
        return {field: reply.strip()}
    return action


def _without_fence(reply: str) -> str:
    """Remove the code fence around a reply, if there is one."""
    text = reply.strip()
    if len(text) < 2 * len(FENCE) or not (text.startswith(FENCE) and text.endswith(FENCE)):
        return reply
    return text[len(FENCE) : -len(FENCE)].removeprefix("json").strip()


def with_text(prompt: Prompt, text: str) -> Prompt:
    """Append a text to a prompt: in a chat as a paragraph of its last message, if that is the user's.

    >>> with_text("Guess: ", "1-9"), with_text([{"role": "user", "content": "Guess."}], "1-9")
    ('Guess: 1-9', [{'role': 'user', 'content': 'Guess.\\n\\n1-9'}])
    """
    if isinstance(prompt, str):
        return prompt + text
    last = prompt[-1]
    if not text or last["role"] != "user":
        return [*prompt, {"role": "user", "content": text}] if text else prompt
    return [*prompt[:-1], {**last, "content": f"{last['content']}\n\n{text}" if last["content"] else text}]


def row_seed(row: Mapping[str, Any]) -> int:
    """Make a seed from a data row, the same in every run: its column `seed`, or a checksum of all columns.

    >>> row_seed({"prompt": "Play.", "seed": 7}), row_seed({"prompt": "Play."})
    (7, 287880085)
    """
    seed = row.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed
    return zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode()) & 0x7FFFFFFF


def _refused(error: Mapping[str, Any]) -> Step:
    """Tell the model why its action is invalid; raise any other error of the server."""
    code, message = error.get("code"), str(error.get("message", ""))[:MAX_ERROR]
    if code == "VALIDATION_ERROR":
        return Step(f"Invalid action: {message}")
    raise EpisodeError(
        f"answered with the error {excerpt(code)}: {excerpt(message)}",
        fix=MORE_SESSIONS if code == "CAPACITY_REACHED" else "",
    )


def _websocket_url(url: str) -> str:
    """Derive the address of a server's WebSocket.

    >>> _websocket_url("https://games.example/guess"), _websocket_url("http://[::1]:8000/ws")
    ('wss://games.example:443/guess/ws', 'ws://[::1]:8000/ws')
    """
    try:
        parts = urlsplit(url)
        port = parts.port or {"ws": 80, "wss": 443}[SCHEMES[parts.scheme]]
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError
    except (KeyError, ValueError):
        raise RecipeError(
            f"{excerpt(url)} is not the address of an OpenEnv server",
            want="openenv:https://HOST or openenv:http://HOST:PORT",
            where=WHERE,
        ) from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((SCHEMES[parts.scheme], f"{host}:{port}", path, "", ""))
