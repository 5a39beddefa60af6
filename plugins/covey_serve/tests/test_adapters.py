"""Adapters side by side: a row depends on its own alone, to the last bit."""

import asyncio
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.errors import CoveyError
from covey.models.lora import split_trainable, with_lora
from covey.rl.rollout_worker import RolloutWorker
from covey.sampling.engine import Request, generate
from covey.types import Completion
from covey_serve.device import AdapterLane, Weights
from covey_serve.service import Ask, Service


def adapters(service: Service, rank: int, seed: int, size: float = 0.3) -> Weights:
    """Adapters that change the model."""
    state, rng = split_trainable(with_lora(service.model, LoRAConfig(rank=rank)))[1], np.random.default_rng(seed)
    return Weights(rank, jax.tree.map(lambda x: size * rng.normal(size=x.shape).astype(np.float32), state))


def ask(weights: Weights | None, seed: int, samples: int = 3) -> Ask:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 200, size).astype(np.int32) for size in (3, 20)]
    return Ask(prompts, samples, seed=seed, limit=12, weights=weights)


def sample(service: Service, *asks: Ask) -> list[Any]:
    """Tokens and log-probs of the answers to requests at once."""

    async def run() -> Any:
        return await asyncio.gather(*map(service.all_of, asks))

    drawn = [[event.completion for event in events] for events in asyncio.run(run())]
    return [[(one.tokens.tolist(), one.logps.tolist(), one.sampler_logps.tolist()) for one in of] for of in drawn]


def test_clients_of_several_ranks_and_one_without_get_what_they_get_alone(service: Service) -> None:
    weights = [
        adapters(service, 4, 0),
        None,
        adapters(service, 16, 1),
        adapters(service, 20, 2),
        adapters(service, 1, 3),
    ]
    asks = [ask(one, seed) for seed, one in enumerate(weights)]
    alone = [sample(service, one)[0] for one in asks]
    assert alone[0] != alone[2]
    assert sample(service, *asks) == alone
    assert sample(service, *asks[::-1]) == alone[::-1]
    assert set(service.device.lanes) == {0, 64}


def test_adapters_are_side_by_side_while_they_are_asked_for(service: Service) -> None:
    few, many = adapters(service, 4, 10), adapters(service, 17, 11)
    sample(service, ask(few, 1, samples=8), ask(many, 2))
    lane = service.device.lanes[64]
    assert isinstance(lane, AdapterLane)
    assert lane.starts == {few: 0, many: 16}


def test_adapters_without_room_wait_and_come_in_their_order(service: Service) -> None:
    asks = [ask(adapters(service, 16, seed), seed, samples=1) for seed in range(7)]
    alone = [sample(service, one)[0] for one in asks]
    assert sample(service, *asks) == alone


def with_adapters(service: Service, weights: Weights, requests: list[Request]) -> list[Completion]:
    """Samples of a model that has these adapters alone."""
    model = with_lora(service.model, LoRAConfig(rank=weights.rank))
    worker = RolloutWorker(model, service.tokenizer, service.config)
    worker.update_params(weights.adapters)
    worker.engine.update_weights(worker.sampling_params())
    return [one for group in generate(worker.engine, requests) for one in group]


def test_samples_are_those_of_a_model_with_the_adapters(service: Service) -> None:
    weights = adapters(service, 4, 5)
    (found,) = sample(service, ask(weights, 5))
    requests = [Request(p, 3, index=n, step=5, max_new_tokens=12) for n, p in enumerate(ask(weights, 5).prompts)]
    for (tokens, logps, _), one in zip(found, with_adapters(service, weights, requests), strict=True):
        assert tokens == one.tokens.tolist()
        np.testing.assert_allclose(logps, one.logps, atol=1e-4)


def test_an_adapter_of_a_large_rank_has_an_engine_with_more_columns(service: Service) -> None:
    weights = adapters(service, 70, 6, size=0.05)
    alone = sample(service, ask(weights, 6))
    assert sample(service, ask(weights, 6), ask(adapters(service, 2, 7), 7))[0] == alone[0]
    assert set(service.device.lanes) == {0, 64, 128}


def test_adapters_that_are_not_finite_are_refused(service: Service) -> None:
    state = adapters(service, 2, 8).adapters
    path, x = nnx.to_flat_state(state)[0]
    bad = nnx.merge_state(state, nnx.from_flat_state({path: x.replace(x.get_value() * np.float32(np.inf))}))
    with pytest.raises(CoveyError, match="not finite"):
        Weights(2, bad)


class Answer:
    """Responder that appends as many tokens as it has, after each turn of four tokens."""

    pause_id, is_async, max_num_seqs, answer_lag, turn_limit = None, False, None, None, 4

    def __init__(self, size: int):
        self.tokens = np.arange(5, 5 + size, dtype=np.int32)

    def answer(self, turn: Any) -> np.ndarray:
        return self.tokens[: turn.remaining_tokens]


def test_responses_are_appended_under_the_adapter_of_their_row(service: Service) -> None:
    lane = AdapterLane(service._make_worker(64), 64)
    few, many = adapters(service, 4, 12), adapters(service, 30, 13)
    prompts = {few: np.arange(7, 12, dtype=np.int32), many: np.arange(9, 30, dtype=np.int32)}
    requests = {weights: Request(prompt, responder=Answer(3)) for weights, prompt in prompts.items()}

    def run(*order: Weights) -> dict[Weights, Any]:
        ended, engine = {}, lane.engine
        for weights in order:
            assert lane._has(weights)
            lane.places[number := engine.add(requests[weights])] = SimpleNamespace(weights=weights), 0
            ended[number] = weights
        done = {}
        while engine.unfinished:
            done |= {ended[one.request]: one.completion for one in engine.step()}
        lane.places.clear()
        lane.starts.clear()
        return {weights: (one.tokens.tolist(), one.logps.tolist()) for weights, one in done.items()}

    alone = run(few) | run(many)
    assert run(few, many) == run(many, few) == alone
    assert alone[few][0][4:7] == alone[few][0][11:14] == [5, 6, 7]
    for weights, (tokens, logps) in alone.items():
        (wanted,) = with_adapters(service, weights, [requests[weights]])
        assert tokens == wanted.tokens.tolist()
        np.testing.assert_allclose(logps, wanted.logps, atol=1e-4)
