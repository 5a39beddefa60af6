"""`python -m benchmarks.serving MODEL [--repeat N]`: measure ragged requests at once over HTTP against a rollout of the
same requests in this process.

Each request has a prompt and a limit of its own. All are sent at once, each on its own connection, by a process whose
time does not count. Both sides run in turn. The rates are tokens per second of this process's processors, which other
work on the machine disturbs less than the clock, and tokens per second.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import uvicorn

from benchmarks.common import machine, spread_of
from covey.config.schema import RolloutConfig
from covey.recipes.load_model import open_model
from covey.rl.rollout_worker import RolloutWorker
from covey.sampling.engine import Request, generate
from covey_report.http import server_config
from covey_serve.app import make_app
from covey_serve.server import listen
from covey_serve.service import Limits, Service

REQUESTS = 64
CONFIG = RolloutConfig(max_prompt_length=128, max_new_tokens=64, slots=REQUESTS)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the results as a line of JSON; with a port, send requests of the standard input there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a model, or the port of a server that is to be asked")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    asked = parser.parse_args(words)
    if asked.model.isdigit():
        print(asyncio.run(send_all(int(asked.model), json.load(sys.stdin))))
    else:
        print(json.dumps({"part": "serving", **measure(asked.model, asked.repeat), "machine": machine()}))
    return 0


def measure(source: str, repeat: int) -> dict[str, Any]:
    """Return the rates of both sides, and the ratio of the second to the first in each round."""
    model, tokenizer = open_model(source)
    requests = make_requests(model.config.vocab_size)
    service = Service("model", model, tokenizer, CONFIG, Limits())
    with listening(service) as port:
        worker = RolloutWorker(model, tokenizer, CONFIG)
        sides = {"rollout": partial(roll_out, worker, requests), "http": partial(ask, port, requests)}
        for side in sides.values():  # it compiles the programs
            side()
        rounds = [{name: rates_of(side) for name, side in sides.items()} for _ in range(repeat)]
    service.close()
    found: dict[str, Any] = {}
    for number, unit in enumerate(("tokens_per_processor_second", "tokens_per_second")):
        for name in sides:
            found[f"{name}_{unit}"] = spread_of([one[name][number] for one in rounds])
        found[f"http/rollout_{unit}"] = spread_of([one["http"][number] / one["rollout"][number] for one in rounds])
    return found


def make_requests(vocabulary: int) -> list[Request]:
    """Return requests with prompts and limits of all lengths that the settings allow, the same each time."""
    rng, numbers = np.random.default_rng(0), range(REQUESTS)
    sizes, limits = rng.integers(8, 129, REQUESTS), rng.integers(8, 65, REQUESTS)
    prompts = [rng.integers(100, vocabulary, size, np.int32) for size in sizes]
    return [Request(prompts[n], step=n, max_new_tokens=int(limits[n])) for n in numbers]


def rates_of(side: Callable[[], int]) -> tuple[float, float]:
    """Return the tokens of a side per second of the processors and by the clock."""
    processor, clock = time.process_time(), time.perf_counter()
    tokens = side()
    return tokens / (time.process_time() - processor), tokens / (time.perf_counter() - clock)


def roll_out(worker: RolloutWorker, requests: Sequence[Request]) -> int:
    """Sample in this process, and return the number of tokens."""
    worker.engine.update_weights(worker.sampling_params())
    return sum(len(one.tokens) for group in generate(worker.engine, requests) for one in group)


def ask(port: int, requests: Sequence[Request]) -> int:
    """Let another process ask the server, and return the number of tokens."""
    bodies = [
        {"prompt": one.prompt.tolist(), "max_tokens": one.max_new_tokens, "seed": one.step, "temperature": 1.0}
        for one in requests
    ]
    command = [sys.executable, "-m", "benchmarks.serving", str(port)]
    return int(subprocess.run(command, input=json.dumps(bodies), text=True, capture_output=True, check=True).stdout)


async def send_all(port: int, bodies: Sequence[Any]) -> int:
    """Send requests at once, and return the number of tokens of all answers."""
    return sum(await asyncio.gather(*(send(port, json.dumps(body).encode()) for body in bodies)))


async def send(port: int, body: bytes) -> int:
    """Send a request, and return the number of tokens of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return int(json.loads(answer)["usage"]["completion_tokens"])


@contextmanager
def listening(service: Service) -> Iterator[int]:
    """Serve in a thread of this process, and return the port."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(server_config(make_app(service), 2 * REQUESTS))
        thread = threading.Thread(target=server.run, args=[[listener]])
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
