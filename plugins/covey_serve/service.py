"""The model that is served: its tokenizer, its engines, and the limits of what clients may ask for."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from flax import nnx

from covey.config.schema import LoRAConfig, RolloutConfig, SamplingConfig
from covey.models.decoder import Decoder
from covey.models.lora import with_lora
from covey.rl.rollout_worker import RolloutWorker, stop_conditions
from covey.sampling.engine import Request
from covey.sampling.sequence import StopCondition, StopIds
from covey.sampling.stop_strings import StopStrings
from covey.text.tokenizer import Tokenizer
from covey_serve.adapters import with_columns
from covey_serve.device import Device, Event, Stream, Weights
from covey_serve.errors import ApiError
from covey_serve.forms import MAX_TOP
from covey_serve.metrics import Metrics
from covey_serve.top_logps import TopLogps, TopScorer


@dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    Attributes:
        body: bytes of a body.
        seconds: time of an answer.
        samples: completions of one request.
    """

    body: int = 16 * 2**20
    seconds: float = 600.0
    samples: int = 1024


@dataclass(frozen=True)
class Ask:
    """Samples that a client asks for.

    Attributes:
        prompts: tokens of each prompt.
        samples: number of completions of each.
        sampling_params: settings of the distribution.
        limit: maximum number of new tokens; None for as many as there is room for.
        seed: seed of the noise; None for a new one each time.
        stop: stop strings.
        stop_ids: tokens that end a completion, besides those of the model.
        live: whether tokens are wanted while they are drawn.
        weights: the weights; None for those of the model that is served.
    """

    prompts: Sequence[np.ndarray]
    samples: int = 1
    sampling_params: SamplingConfig | None = None
    limit: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    live: bool = False
    weights: Weights | None = None


class Service:
    """The model and the limits that all requests share.

    Args:
        name: name of the model, by which clients ask for it.
        model: the model.
        tokenizer: its tokenizer.
        config: settings of the engines.
        limits: bounds of a request.
        origin: origin of the weights.

    Attributes:
        adapters: weights that clients have loaded, by the names under which they ask for them.
    """

    def __init__(
        self,
        name: str,
        model: Decoder,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        limits: Limits,
        origin: str = "",
    ):
        self.origin = origin
        self.name, self.model, self.tokenizer, self.config, self.limits = name, model, tokenizer, config, limits
        self.base, self.metrics = Weights(), Metrics()
        self.adapters: dict[str, Weights] = {}
        self._scorer = cache(self._make_scorer)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self.device = Device(self._make_worker)
        lane = self.device.run(lambda: self.device.lane(0)).result()
        self.tool = lane.worker.tool

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of a completion, without control tokens."""
        return self.tool.text(tokens) if self.tool else self.tokenizer.decode(tokens)

    async def scores(self, tokens: np.ndarray, weights: Weights | None = None) -> TopLogps:
        """Compute the log-probs of a text of at least two tokens, by the weights of the model if none are named."""
        return await asyncio.wrap_future(self.device.run(lambda: self._score(tokens, weights or self.base)))

    def _score(self, tokens: np.ndarray, weights: Weights) -> TopLogps:
        scorer, params = self._scorer(weights.rank)
        return scorer(params if weights.adapters is None else nnx.merge_state(params, weights.adapters), tokens)

    def _make_scorer(self, rank: int) -> tuple[TopScorer, Any]:
        """Return the scorer for adapters of a rank, and weights whose adapters change nothing yet."""
        model = self._model(rank)
        return TopScorer(model, MAX_TOP), nnx.split(model)[1]

    def _model(self, rank: int) -> Decoder:
        return with_lora(self.model, LoRAConfig(rank=rank)) if rank else self.model

    async def encode(self, prompt: Any, **options: Any) -> np.ndarray:
        """Encode a prompt outside of the event loop: a template may take its time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoder, lambda: self.tokenizer.encode_prompt(prompt, **options))

    def room(self, prompt: int) -> int:
        """Return the largest number of new tokens after a prompt of this length."""
        positions = min(self.model.config.max_positions, self.config.kv_cache_size or 2**31)
        return max(1, min(self.config.max_new_tokens, positions - prompt))

    @asynccontextmanager
    async def sample(self, ask: Ask) -> AsyncIterator[Stream]:
        """Sample while the context is open; what is left is cancelled at its end.

        Raises:
            ApiError: it asks for too much.
        """
        if (count := len(ask.prompts) * ask.samples) > self.limits.samples:
            raise ApiError(f"{count} completions are asked for; at most {self.limits.samples} at a time")
        stream = Stream(self._requests(ask), ask.weights or self.base, ask.live)
        self.device.open(stream)
        try:
            yield stream
        finally:
            self.device.cancel(stream)

    async def all_of(self, ask: Ask) -> list[Event]:
        """Sample, and return the last event of each completion, by prompt and number."""
        ended = list[Event]()
        async with self.sample(ask) as stream:
            while len(ended) < len(ask.prompts) * ask.samples:
                ended.append(await next_event(stream))
        return sorted(ended, key=lambda event: event[:2])

    def close(self) -> None:
        """End the threads."""
        self.device.close()
        self._encoder.shutdown()

    def _requests(self, ask: Ask) -> list[Request]:
        seed = secrets.randbits(32) if ask.seed is None else ask.seed % 2**32
        conditions = self._conditions(ask)
        return [
            Request(
                prompt=prompt,
                samples=ask.samples,
                index=index,
                step=seed,
                sampling_params=ask.sampling_params,
                max_new_tokens=self.room(len(prompt)) if ask.limit is None else ask.limit,
                stop_conditions=conditions,
                responder=self.tool,
            )
            for index, prompt in enumerate(ask.prompts)
        ]

    def _conditions(self, ask: Ask) -> tuple[StopCondition, ...]:
        asked: list[StopCondition] = [StopStrings(ask.stop, self.decode)] if ask.stop else []
        asked += [StopIds(ask.stop_ids)] if ask.stop_ids else []
        return (*asked, *stop_conditions(self.config, self.decode))

    def _make_worker(self, columns: int) -> RolloutWorker:
        """Make an engine with columns for adapters, whose sizes follow the settings alone."""
        model = with_columns(self.model, columns) if columns else self.model
        return RolloutWorker(model, self.tokenizer, self.config, fixed_shapes=True)


async def next_event(stream: Stream) -> Event:
    """Return the next event of a stream.

    Raises:
        Exception: what ended the stream.
    """
    event = await stream.events.get()
    if isinstance(event, Exception):
        raise event
    return event
