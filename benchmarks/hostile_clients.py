"""`python -m benchmarks.hostile_clients [--connections N] [--turns N] [--rounds N] [--only NAME]`: serve an honest
client among hostile ones.

Starts `covey serve` twice. The first server has the honest client alone, which trains, samples and asks for a
completion in each turn. At the second, the hostile clients of `REQUESTS`, `ACTING` and `WAITING` come meanwhile. Each
must get what is wanted of it, and the honest client the same bits as alone. At the end no sample may run or wait,
nothing in the log may be a traceback, and the memory after the last round of hostile clients may be `MAX_GROWTH` above
that after the first. Prints a line for each hostile client with what it got, and ends with one line of JSON. Takes
about three minutes.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from covey_serve.wire import CLASSES

BODY = 2**20
"""Largest body of the server."""
MODEL = "scratch:arithmetic-tiny"
LATE = 90.0
"""Seconds for which a hostile client waits for the server."""
PATHS = ("../x", "/etc/passwd", "tinker://a/weights/../../x", "tinker://../weights/x", "tinker://a/weights/x\n", "a\0b")
CLOSED = "closed"
MAX_GROWTH = 256
"""MB by which memory may grow between the first round and the last. Measured in 7 rounds: 554, 739, 742, 575, 575, 586,
589 MB, because what 10,000 connections need is given back late.
"""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Start a server; yield its port and its process. Its log is `folder/log`."""
    sizes = {
        "slots": 4, "rollout.max-prompt-length": 32, "rollout.max-new-tokens": 16, "max-body-bytes": BODY, "port": 0,
        "name": "tiny", "state": folder / "state",
    }  # fmt: skip
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "covey", "serve", MODEL, *words]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        while (found := re.search(r"listening on http://127.0.0.1:(\d+)", (folder / "log").read_text())) is None:
            if server.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.2)
        yield int(found[1]), psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


# --- requests


async def send(port: int, *parts: bytes, pause: float = 0.0, half: bool = False) -> bytes:
    """Send parts of a request to the server, and return all that it answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    answer = bytearray()

    async def read() -> None:
        with suppress(ConnectionError):
            while part := await reader.read(2**16):
                answer.extend(part)

    reading = asyncio.create_task(read())
    try:
        with suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
                if reading.done():
                    break
            if half:
                writer.write_eof()
        await asyncio.wait({reading}, timeout=LATE)
        return bytes(answer)
    finally:
        reading.cancel()
        writer.close()


def http(path: str, body: bytes | dict[str, Any] = b"", method: str = "POST", **headers: str) -> bytes:
    """Return a whole request, after which the server closes the connection."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "127.0.0.1", "content-type": "application/json", "connection": "close"}
    lines |= {"content-length": str(len(data))} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def status(answer: bytes) -> str:
    """Return the status of an answer."""
    found = re.match(rb"HTTP/1.1 (\d+)", answer)
    return found[1].decode() if found else CLOSED


async def ask(port: int, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> tuple[str, Any]:
    """Return status and body of the answer to a request; one that is refused for want of connections is repeated."""
    while True:
        answer = b""
        with suppress(ConnectionError):
            answer = await send(port, http(path, body, **headers))
        if status(answer) not in ("503", CLOSED):
            break
        await asyncio.sleep(0.5)
    data = answer.partition(b"\r\n\r\n")[2]
    return status(answer), json.loads(data) if data[:1] in (b"{", b"[") else data


# --- the honest client


def gradients(model: str, number: int, seed: int, **inputs: Any) -> bytes:
    """Return a request for gradients of one datum; `inputs` replace its arrays."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 10, 6)
    message = CLASSES["Request"](model_id=model, seq_id=number, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
    arrays = {"target_tokens": tokens[1:].astype("<i8"), "weights": np.ones(5, "<f4")} | inputs
    for name, array in arrays.items():
        kind = {"f4": 1, "i8": 2, "i4": 3}.get(array.dtype.str[1:], 9)
        datum.loss_fn_inputs.add(
            key=name, value=CLASSES["Tensor"](dense=array.tobytes(), dtype=kind, shape=array.shape)
        )
    return bytes(message.SerializeToString())


class Tinker:
    """A client of the training API."""

    def __init__(self, port: int):
        self.port, self.number, self.session, self.model = port, 0, "", ""

    async def post(self, endpoint: str, **fields: Any) -> Any:
        """Send a request; return its answer."""
        return (await ask(self.port, f"/api/v1/{endpoint}", fields))[1]

    async def result(self, promise: Any) -> Any:
        """Wait for the result of a request."""
        while True:
            _, found = await ask(self.port, "/api/v1/retrieve_future", {"request_id": promise["request_id"]})
            if not isinstance(found, dict) or found.get("type") != "try_again":
                return found

    async def begin(self) -> None:
        """Make a model."""
        self.session = (await self.post("create_session"))["session_id"]
        lora = {"rank": 2, "seed": 1}
        fields = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        self.model = (await self.result(await self.post("create_model", **fields)))["model_id"]

    async def gradients(self, seed: int, **inputs: Any) -> Any:
        """Ask for gradients; return the promise."""
        self.number += 1
        body = gradients(self.model, self.number, seed, **inputs)
        return (await ask(self.port, "/api/v1/forward_backward", body, content_type="application/x-protobuf"))[1]

    async def numbered(self, endpoint: str, **fields: Any) -> Any:
        """Send a request to the model in its order."""
        self.number += 1
        return await self.result(await self.post(endpoint, model_id=self.model, seq_id=self.number, **fields))

    async def turn(self, turn: int) -> list[Any]:
        """Train a step, sample from the new weights, and ask for a completion; return what came."""
        promises = [await self.gradients(turn), await self.gradients(-1 - turn % 3 + 7)]
        step = await self.numbered("optim_step", adam_params={"learning_rate": 0.01})
        found = [await self.result(one) for one in promises]
        sampler = await self.numbered("save_weights_for_sampler", sampling_session_seq_id=turn)
        prompt = {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}
        fields = {"prompt": prompt, "sampling_params": {"max_tokens": 8}, "num_samples": 3, "seq_id": 0}
        samples = await self.post("asample", sampling_session_id=sampler["sampling_session_id"], **fields)
        body = {"prompt": [[1, 2, 3]], "seed": turn, "n": 2, "logprobs": 2, "max_tokens": 8}
        completion = (await ask(self.port, "/v1/completions", body))[1]["choices"]
        return [found, step, await self.result(samples), completion]


async def honest(port: int, turns: int, may_begin: asyncio.Event) -> str:
    """Train and sample; return a digest of all that came."""
    client, digest = Tinker(port), hashlib.sha256()
    await client.begin()
    may_begin.set()
    for turn in range(turns):
        digest.update(repr(await client.turn(turn)).encode())
    saved = await client.numbered("save_weights", path="end")
    digest.update(repr(saved).encode())
    return digest.hexdigest()


# --- hostile clients: functions of a port that return what they got

Hostile = Callable[[int], Awaitable[Counter[str]]]
JSON, TRAIN = "/v1/completions", "/api/v1/"
PROTOBUF = {"content_type": "application/x-protobuf"}
CONNECTIONS = "more connections than there may be"


async def each(port: int, requests: Iterable[bytes]) -> Counter[str]:
    """Send requests side by side, each by a connection of its own; count the statuses."""
    return Counter(map(status, await asyncio.gather(*(send(port, request) for request in requests))))


def posts(path: str, *bodies: bytes | dict[str, Any], **headers: str) -> list[bytes]:
    """Return requests with these bodies."""
    return [http(path, body, **headers) for body in bodies]


def gets(*paths: str, method: str = "GET") -> list[bytes]:
    """Return requests without a body."""
    return [http(path, method=method, content_length="") for path in paths]


def chunked(*bodies: bytes) -> list[bytes]:
    """Return requests whose bodies come in chunks."""
    return [http(JSON, content_length="", transfer_encoding="chunked") + body for body in bodies]


async def slow_headers(port: int) -> Counter[str]:
    """A byte every half second."""
    return Counter([status(await send(port, *(bytes([one]) for one in http(JSON)[:80]), pause=0.5))])


async def slow_body(port: int) -> Counter[str]:
    """A byte each second of a body of a thousand."""
    head = http(JSON, content_length="1000")
    return Counter([status(await send(port, head, *([b" "] * 70), pause=1.0))])


async def half_open(port: int) -> Counter[str]:
    """Connections that say nothing, or half of a request, and close their side."""
    whole = [send(port), send(port, half=True), send(port, http(JSON)[:40], half=True), send(port, http(JSON)[:40])]
    return Counter(map(status, await asyncio.gather(*whole)))


async def many_connections(port: int, count: int = 10_000) -> Counter[str]:
    """Connections that ask for nothing, all at once, and a request on each tenth of them."""
    found, opened = Counter[str](), list[Any]()
    for _ in range(count):
        try:
            opened.append(await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 10))
        except (OSError, TimeoutError) as error:
            found[type(error).__name__] += 1
    found["open"] = len(opened)
    for reader, writer in opened[::10]:
        answer = b""
        with suppress(ConnectionError):
            writer.write(http("/health", method="GET", content_length=""))
            answer = await asyncio.wait_for(reader.read(100), LATE)
        found[status(answer)] += 1
    for _, writer in opened:
        writer.close()
    return found


async def cancel_storm(port: int) -> Counter[str]:
    """A hundred streams that are left after their first event, and a hundred whole answers that nobody waits for."""

    async def leave(stream: bool) -> str:
        body = {"prompt": [[1, 2, 3]], "n": 8, "max_tokens": 16, "stream": stream}
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http(JSON, body))
        first = await asyncio.wait_for(reader.read(300), LATE) if stream else b""
        writer.transport.abort()
        return status(first) if stream else "left"

    return Counter(await asyncio.gather(*(leave(n % 2 == 0) for n in range(200)), return_exceptions=False))


async def unread_answers(port: int) -> Counter[str]:
    """Streams that nobody reads."""
    body = http(JSON, {"prompt": [[1, 2, 3]], "n": 8, "max_tokens": 16, "stream": True, "logprobs": 0})
    opened = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(50)]
    for _, writer in opened:
        writer.write(body)
    await asyncio.sleep(3)
    for _, writer in opened:
        writer.transport.abort()
    return Counter({"left": len(opened)})


async def own_model(port: int) -> Counter[str]:
    """Another body under a number that was used; numbers far away, negative and without end."""
    client = Tinker(port)
    await client.begin()
    await client.gradients(1)
    numbers = [gradients(client.model, n, 2) for n in (1, 2**31 - 1, -1, -(2**31), 5000)]
    found = await each(port, posts(f"{TRAIN}forward_backward", *numbers, **PROTOBUF))
    step = {"model_id": client.model, "adam_params": {}}
    steps = [step | {"seq_id": number} for number in (-1, 0, 2**31, 2**70, 1.5, "1")]
    sampler = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    found += await each(port, posts(f"{TRAIN}optim_step", *steps))
    found += await each(port, posts(f"{TRAIN}create_sampling_session", sampler, sampler))
    prompt = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "seq_id": 0}
    prompt["sampling_session_id"] = f"{client.session}:sample:0"
    return found + await each(port, posts(f"{TRAIN}asample", prompt, prompt | {"num_samples": 2}))


async def early_flood(port: int) -> Counter[str]:
    """Five hundred requests whose first one never comes."""
    client = Tinker(port)
    await client.begin()
    bodies = [gradients(client.model, n, 2) for n in range(2, 502)]
    return await each(port, posts(f"{TRAIN}forward_backward", *bodies, **PROTOBUF))


async def bad_data(port: int) -> Counter[str]:
    """Arrays that are not finite, of another size or shape, or with tokens that the model does not know."""
    client, found = Tinker(port), Counter[str]()
    await client.begin()
    nan, tokens = np.full(5, np.nan, "<f4"), np.arange(5, dtype="<i8")
    for inputs in (
        {"weights": nan}, {"weights": np.full(5, 3e38, "<f4")}, {"target_tokens": tokens - 9},
        {"target_tokens": tokens + 2**40},
        {"weights": np.ones(3, "<f4")}, {"weights": np.ones((5, 2, 2), "<f4")}, {"weights": np.ones(5, "<f8")},
        {"weights": np.ones(0, "<f4")}, {"target_tokens": tokens[None].repeat(5, 0), "weights": np.ones((5, 4), "<f4")},
    ):  # fmt: skip
        result = await client.result(await client.gradients(1, **inputs))
        found["error" if isinstance(result, dict) else "done"] += 1
    result = await client.numbered("optim_step", adam_params={"learning_rate": 1e300})
    found["error" if "error" in result else "done"] += 1
    return found


async def futures_of_others(port: int) -> Counter[str]:
    """Results of the first client, which all may read, and names that nobody has."""
    names = ["session-1:train:0", "session-1:train:0:1", "session-9:train:0:1", "sample:", "x" * 10_000, "../x", ""]
    return await each(port, posts(f"{TRAIN}retrieve_future", *({"request_id": name} for name in names)))


async def states_elsewhere(port: int) -> Counter[str]:
    """Paths out of the folder of states, as names of states, snapshots and adapters."""
    client = Tinker(port)
    await client.begin()
    load = {"session_id": client.session, "model_seq_id": 1, "optimizer": True}
    save = {"model_id": client.model, "seq_id": 1}
    adapters = [{"lora_name": name, "lora_path": path} for name in ("a", "../a") for path in PATHS]
    requests = [
        *posts(f"{TRAIN}load_weights", *(load | {"path": path} for path in PATHS)),
        *posts(f"{TRAIN}save_weights", *(save | {"path": path} for path in PATHS)),
        *posts(f"{TRAIN}save_weights_for_sampler", *(save | {"path": path} for path in PATHS)),
        *posts(f"{TRAIN}weights_info", *({"tinker_path": path} for path in PATHS)),
        *posts("/v1/load_lora_adapter", *adapters),
        *gets(*(f"/v1/models/{path}" for path in ("..%2fx", "%00", "../../etc/passwd", "x" * 5000))),
    ]
    return await each(port, requests)


def prompt(**fields: Any) -> dict[str, Any]:
    """Return a request for a completion."""
    return {"prompt": "1+1=", "max_tokens": 1} | fields


def chats(*messages: Any) -> list[bytes]:
    """Return requests for an answer to these conversations."""
    return posts("/v1/chat/completions", *({"messages": one, "max_tokens": 1} for one in messages))


def numbers_without_end() -> list[bytes]:
    """Return requests with numbers that are not finite, too large, or none."""
    values = ["NaN", "Infinity", "1e999", "-1e400", "9" * 5000, "[]", "-5.5", '{"a": 1}']
    names = ("temperature", "seed", "max_tokens", "top_p", "n", "min_p", "logprobs")
    return posts(JSON, *(f'{{"prompt": "a", "{name}": {value}}}'.encode() for name in names for value in values))


RANDOM = random.Random(0)
LORA = {"session_id": "session-1", "model_seq_id": 5, "base_model": "tiny", "lora_config": {"rank": 2}}
SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"stop": "a" * 10**6}, "base_model": "tiny"}
HALF = "\ud800"
"""Half of a character, as JSON can write it."""
REQUESTS: dict[str, tuple[list[bytes], str]] = {
    "bad protobuf": (
        posts(
            f"{TRAIN}forward_backward",
            *(RANDOM.randbytes(size) for size in (1, 10, 100, 1000, 100_000)),
            gradients("session-1:train:0", 1, 1)[:-5],
            **PROTOBUF,
        ),
        "400",
    ),
    "bad UTF-8": (posts(JSON, b'{"prompt": "\xff\xfe"}', b"\xff", b"\xfe\xff{}"), "400"),
    "halves of characters": (
        posts(JSON, prompt(prompt=HALF), prompt(model=HALF), prompt(stop=HALF), prompt(**{HALF: 1})),
        "400 404",
    ),
    "halves of characters in a chat": (chats([{"role": "user", "content": HALF}]), "400"),
    "bad JSON": (posts(JSON, b"{", b"[1]", b"1", b"{}{}", b'{"prompt": 1}', b"null", b"{'a': 1}"), "400"),
    "deep JSON": (posts(JSON, *(b'{"prompt": ' + b"[" * depth for depth in (1000, 10_000, 1_000_000))), "400"),
    "numbers without end": (numbers_without_end(), "400"),
    "bodies over the limit": (posts(JSON, b" " * (BODY + 1), b" " * (4 * BODY)), "413"),
    "a chunked body over the limit": (chunked(b"".join([b"10000\r\n" + b" " * 65536 + b"\r\n"] * 20)), "413"),
    "a compressed body": (posts(JSON, b"\x1f\x8b" * 100, content_encoding="gzip"), "415"),
    "other types of bodies": (
        [http(JSON, prompt(), content_type=kind) for kind in ("text/plain", "multipart/form-data", "", "a" * 9000)],
        "415",
    ),
    "other hosts": (
        [
            http(JSON, prompt(), host=host)
            for host in ("evil.example", "127.0.0.1.evil.example", "", "[::1]x", "a" * 9000)
        ],
        "403 400",
    ),
    "prompts over the limit": (
        posts(JSON, prompt(prompt="1" * 10_000), prompt(prompt=[1] * 33), prompt(prompt=[[1]] * 5000)),
        "400",
    ),
    "tokens that the model does not know": (
        posts(JSON, *(prompt(prompt=[[token]]) for token in (-1, 10**6, 2**31, 2**70, 1.5, None, "1"))),
        "400",
    ),
    "many choices": (posts(JSON, *(prompt(n=n) for n in (0, -1, 129, 10**9, 2**70))), "400"),
    "long stop strings": (
        posts(JSON, prompt(stop="a" * 10**6), prompt(stop=["a"] * 65), prompt(stop=[""]), prompt(stop=[1])),
        "400",
    ),
    "long stop strings of a sample": (posts(f"{TRAIN}asample", SAMPLE), "400"),
    "unknown fields": (posts(JSON, {str(n): n for n in range(50_000)}, prompt(**{"a" * 10**5: 1})), "400"),
    "names of nobody": (
        posts(f"{TRAIN}create_model", LORA | {"session_id": "session-x"}, LORA | {"base_model": "other"}),
        "404",
    ),
    "adapters without bounds": (
        posts(f"{TRAIN}create_model", *(LORA | {"lora_config": {"rank": rank}} for rank in (-1, 257, 10**9, 1.5))),
        "400",
    ),
    "10,000 messages": (chats([{"role": "user", "content": "a"}] * 10_000), "400"),
    "messages of no form": (
        chats(
            [{}],
            [{"role": 1}],
            [{"role": "user", "content": {"a": 1}}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "x" * 1000, "content": "{{ 1 }}"}],
            [{"role": "assistant", "tool_calls": [1]}],
            [{"role": "user", "content": "a", "evil": 1}],
        ),
        "400",
    ),
    "what is no HTTP": (
        [
            b"\x16\x03\x01\x02\x00" * 50,
            b"\0" * 1000,
            b"SSH-2.0-x\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost : a\r\n\r\n",
            b"GET  / HTTP/9.9\r\n\r\n",
        ],
        "400 403",
    ),
    "errors in chunks": (
        chunked(b"zz\r\n\r\n", b"-1\r\na\r\n", b"3\r\nabcdef\r\n0\r\n\r\n"),
        "400 413",
    ),
    "lengths that do not fit": (
        [
            *(http(JSON, content_length=size) for size in ("-1", "abc", "9" * 30)),
            http(JSON, b"{}", content_length="2\r\ncontent-length: 3"),
        ],
        "400 413",
    ),
    "headers over the limit": (
        [http(JSON, x="a" * 200_000), http(JSON, **{f"h{n}": "a" for n in range(20_000)})],
        f"400 431 {CLOSED}",
    ),
    "garbage behind a request": ([gets("/health")[0].replace(b"close", b"keep-alive") + b"\0\xff" * 500], "200"),
    "other methods": (
        [
            request
            for method in ("PUT", "DELETE", "TRACE", "OPTIONS", "HEAD", "EVIL")
            for request in gets(JSON, method=method)
        ],
        "405",
    ),
    "a proxy": (
        [*gets("example.org:443", method="CONNECT"), *gets("http://example.org/", "//example.org/%2e%2e/", "*")],
        "404 400 405",
    ),
}
"""Hostile clients that send requests, and the statuses that they may get."""
WAITING: dict[str, tuple[Hostile, str]] = {
    "headers a byte at a time": (slow_headers, CLOSED),
    "a body a byte at a time": (slow_body, "408"),
    "connections that say nothing": (half_open, f"{CLOSED} 400"),
    "half of a body": (
        partial(each, requests=[http(JSON, content_length="99"), *chunked(b"1;" + b"x" * 10**5, b"f" * 17 + b"\r\na")]),
        "400 408",
    ),
    "an HTTP/0.9 line": (partial(each, requests=[b"GET /\r\n", b"GET /health\r\n\r\n"]), f"400 {CLOSED}"),
}
"""Hostile clients that wait until the server loses its patience: up to a minute, once, side by side."""
ACTING: dict[str, tuple[Hostile, str]] = {
    CONNECTIONS: (many_connections, f"open 200 {CLOSED}"),
    "200 answers that nobody waits for": (cancel_storm, "200 left"),
    "50 answers that nobody reads": (unread_answers, "left"),
    "repeated and impossible numbers": (own_model, "200 400 409"),
    "requests before their turn": (early_flood, "200"),
    "bad arrays": (bad_data, "error done"),
    "results of others": (futures_of_others, "200 404"),
    "states elsewhere": (states_elsewhere, "400 404"),
}
"""Hostile clients that need more than requests."""


async def attack(port: int, name: str) -> bool:
    """Let one hostile client do its work; print what it got, and return whether that is wanted."""
    begun = time.perf_counter()
    try:
        if name in REQUESTS:
            requests, wanted = REQUESTS[name]
            found = await each(port, requests)
        else:
            hostile, wanted = (WAITING | ACTING)[name]
            found = await hostile(port)
    except Exception as error:
        found = Counter({repr(error): 1})
    is_wanted = set(found) <= set(wanted.split())
    got = ", ".join(f"{what} x {count}" for what, count in sorted(found.items()))
    print(f"{'ok   ' if is_wanted else 'WRONG'} {name}: {got} ({time.perf_counter() - begun:.1f} s)", flush=True)
    return is_wanted


async def alone(port: int, turns: int) -> str:
    """Return the digest of the honest client alone."""
    return await honest(port, turns, asyncio.Event())


async def among(port: int, server: psutil.Process, turns: int, rounds: int, names: Collection[str]) -> dict[str, Any]:
    """Return the digest of the honest client among the hostile ones, and what the server is like after them."""
    may_begin, memory, done = asyncio.Event(), list[int](), list[bool]()
    client = asyncio.create_task(honest(port, turns, may_begin))
    await may_begin.wait()
    waiting = asyncio.gather(*(attack(port, name) for name in WAITING if name in names))
    for _ in range(rounds):
        done += [await attack(port, name) for name in (*ACTING, *REQUESTS) if name in names]
        memory.append(server.memory_info().rss // 2**20)
    done += await waiting
    digest = await client
    gauges = (await ask(port, "/metrics", method="GET", content_length=""))[1].decode()
    left = re.findall(r"^covey:num_requests_\w+ (\d+)$", gauges, re.M)
    return {"digest": digest, "memory_mb": memory, "left": left, "wrong": done.count(False)}


def main() -> int:
    """Run the honest client alone and among the others; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile_clients", description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000, help="number of connections at a time")
    parser.add_argument("--turns", type=int, default=20, help="number of turns of the honest client")
    parser.add_argument("--rounds", type=int, default=3, help="number of times that the quick hostile clients come")
    parser.add_argument("--only", default="", help="hostile clients whose name has this text")
    options = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    count = min(options.connections, limit - 1000) if limit > 0 else options.connections
    ACTING[CONNECTIONS] = partial(many_connections, count=count), ACTING[CONNECTIONS][1]
    names = [name for name in (*WAITING, *ACTING, *REQUESTS) if options.only in name]
    with tempfile.TemporaryDirectory() as first, serving(Path(first)) as (port, _):
        wanted = asyncio.run(alone(port, options.turns))
    with tempfile.TemporaryDirectory() as second, serving(Path(second)) as (port, server):
        found = asyncio.run(among(port, server, options.turns, options.rounds, names))
        log = (Path(second) / "log").read_text()
    found |= {"equal": found.pop("digest") == wanted, "tracebacks": log.count("Traceback"), "connections": count}
    if found["tracebacks"]:
        print("\n".join(log[place.start() : place.start() + 3000] for place in [*re.finditer("Traceback", log)][:3]))
    print(json.dumps({"clients": len(names)} | found))
    grown = found["memory_mb"][-1] - found["memory_mb"][0]
    return int(
        not found["equal"] or found["left"] != ["0", "0"] or found["tracebacks"] or found["wrong"] or grown > MAX_GROWTH
    )


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
