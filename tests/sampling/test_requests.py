"""Requests of an engine: they come and go at any time, and what is wrong with one is no matter of the others."""

import functools
import gc
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.errors import CoveyError, DataError, WeightsError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.sampling.engine import Engine, Finished, Request, generate
from covey.sampling.logits import SamplingParams
from covey.sampling.sequence import StopIds
from covey.types import Completion, FinishReason

STOP, VOCABULARY = 3, 300
CONFIG = RolloutConfig(max_prompt_length=16, max_new_tokens=12, slots=4, decode_chunk=3, temperature=0.8, top_p=0.95)


@functools.cache
def model() -> Decoder:
    config = ModelConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=8, tie_embeddings=True, max_positions=64,
    )  # fmt: skip
    made = Decoder(config, rngs=nnx.Rngs(0))
    made.embed.embedding[...] = made.embed.embedding[...] * 20  # peaked enough to be a real distribution
    return made


@functools.cache
def params() -> nnx.State:
    return nnx.split(model())[1]


@functools.cache
def shared(fixed_shapes: bool) -> Engine:
    """An engine with fixed shapes or one whose sizes follow the samples; programs are compiled once for all tests."""
    return Engine(model(), range(0, 300, 20), CONFIG, fixed_shapes)


PROMPT = np.arange(5, dtype=np.int32)


@pytest.fixture
def engine() -> Engine:
    return fresh(fixed_shapes=True)


def fresh(*, fixed_shapes: bool, runs_ahead: bool = False) -> Engine:
    engine = shared(fixed_shapes)
    engine.reset()
    engine.runs_ahead = runs_ahead
    engine.update_weights(params(), 0)
    engine.configure(CONFIG)
    engine.max_waiting = 1000
    return engine


def requests(count: int, samples: int = 2, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(rng.integers(0, VOCABULARY, rng.integers(1, 17)).astype(np.int32), samples, index)
        for index in range(count)
    ]


def finish(engine: Engine) -> dict[tuple[int, int], Finished]:
    """Step to the end; return what finished by request and number."""
    ended: list[Finished] = []
    while engine.unfinished:
        ended += engine.step()
    return {(one.request, one.number): one for one in ended}


def check_active(engine: Engine) -> None:
    """Check that no slot draws but those of samples, some of which may have ended unknown to the host."""
    drawing, known = np.flatnonzero(engine.runner.slots.active), set(engine.scheduler.active)
    assert known >= set(drawing)
    assert engine.runs_ahead or len(known) == len(drawing)


def same(a: Completion, b: Completion, *, atol: float = 0.0) -> None:
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.logps, b.logps, rtol=0, atol=atol)
    np.testing.assert_allclose(a.sampler_logps, b.sampler_logps, rtol=0, atol=atol)
    assert (a.finish, a.mask is None) == (b.finish, b.mask is None)


# --- requests that come and go


@pytest.mark.slow
@pytest.mark.parametrize(("fixed_shapes", "runs_ahead"), [(True, False), (True, True), (False, False)])
def test_requests_that_come_while_others_run_get_what_they_get_alone(fixed_shapes: bool, runs_ahead: bool) -> None:
    """With fixed shapes bit for bit. Sizes that grow round otherwise, and the tokens are the same."""
    engine, wanted, ended = fresh(fixed_shapes=fixed_shapes, runs_ahead=runs_ahead), requests(9, 1), list[Finished]()
    for request in wanted:
        engine.add(request)
        ended += engine.step()
        check_active(engine)
    done = {(one.request, one.number): one for one in ended} | finish(engine)
    first = min(request for request, _ in done)
    for number, request in enumerate(wanted):
        (alone,) = generate(engine, [request])
        for n, completion in enumerate(alone):
            same(done[first + number, n].completion, completion, atol=0.0 if fixed_shapes else 1e-5)
        assert (engine.stats.tokens, engine.stats.first_tokens) == (sum(len(one.tokens) for one in alone), 1)
        assert engine.stats.slot_steps >= len(engine.scheduler.slots) * (len(alone[0].tokens) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("fixed_shapes", "runs_ahead"), [(True, False), (True, True), (False, False)])
def test_requests_added_and_cancelled_at_random_change_no_other(fixed_shapes: bool, runs_ahead: bool) -> None:
    engine, rng = fresh(fixed_shapes=fixed_shapes, runs_ahead=runs_ahead), np.random.default_rng(1)
    settings = [None, None, None, SamplingParams(1.3, top_k=7), SamplingParams(0.0), SamplingParams(min_p=0.1)]
    left = [
        replace(request, samples=samples, max_new_tokens=limit, first=first, sampling_params=settings[setting])
        for request, (samples, limit, first, setting) in zip(
            requests(24), rng.integers((1, 1, 0, 0), (4, 13, 9, 6), (24, 4)).tolist(), strict=True
        )
    ]
    by_id: dict[int, Request] = {}
    done: dict[tuple[int, int], Finished] = {}
    while left or engine.unfinished:
        for _ in range(rng.integers(4) if left else 0):
            if left:
                request = left.pop()
                by_id[engine.add(request)] = request
        if engine.sequences and rng.random() < 0.15:
            engine.cancel(int(rng.choice(list(engine.sequences))))
        check_active(engine)
        done |= {(one.request, one.number): one for one in engine.step()}
    whole = [number for number, request in by_id.items() if all((number, n) in done for n in range(request.samples))]
    assert 12 < len(whole) < 24
    for number in whole:
        for n, completion in enumerate(generate(engine, [by_id[number]])[0]):
            same(done[number, n].completion, completion, atol=0.0 if fixed_shapes else 1e-5)


@pytest.mark.slow
def test_programs_and_memory_are_flat_over_many_requests(engine: Engine) -> None:
    def sample(count: int) -> tuple[tuple[int, ...], int]:
        left = requests(count, 1)
        while left or engine.unfinished:
            while left and len(engine.sequences) < 8:
                engine.add(replace(left.pop(), max_new_tokens=4))
            engine.step()
        gc.collect()
        programs = (value for value in vars(engine.programs).values() if hasattr(value, "_cache_size"))
        return (sum(one._cache_size() for one in programs), len(jax.live_arrays())), len(gc.get_objects())

    (few, objects), (many, later) = sample(200), sample(700)
    assert many == few
    assert later - objects < 300  # fewer than one for each request


def test_an_id_may_be_used_again_with_another_prompt(engine: Engine) -> None:
    """The trap: the prompt that was prefilled for an earlier request of this id."""
    first, second = requests(2, 1)
    for _ in range(2):
        engine.add(replace(second, id=8))  # keeps the engine busy
        engine.add(replace(first, id=7, max_new_tokens=1))
        while 7 in engine.sequences:
            engine.step()
        engine.add(replace(second, id=7))
        ended = finish(engine)
        same(ended[7, 0].completion, ended[8, 0].completion) if (8, 0) in ended else None
        same(ended[7, 0].completion, generate(engine, [second])[0][0])


def test_ids_that_the_engine_gives_are_new(engine: Engine) -> None:
    given = engine.add(Request(PROMPT))
    engine.add(Request(PROMPT, id=given + 1))
    assert engine.add(Request(PROMPT)) == given + 2


# --- requests with settings of their own


@pytest.mark.slow
@pytest.mark.parametrize("fixed_shapes", [True, False])
def test_samples_with_different_settings_run_side_by_side(fixed_shapes: bool) -> None:
    engine, (one, *_) = fresh(fixed_shapes=fixed_shapes), requests(1, 1)
    settings = [None, SamplingParams(0.0), SamplingParams(1.5, top_k=5), SamplingParams(2.0, top_p=0.5, min_p=0.05)]
    wanted = [
        replace(one, sampling_params=each, max_new_tokens=n) for each, n in zip(settings, (12, 5, 8, 1), strict=True)
    ]
    together = generate(engine, wanted)
    assert max(len(group[0].tokens) for group in together) <= 12
    assert len({group[0].tokens[0] for group in together}) > 1
    for request, (completion,) in zip(wanted, together, strict=True):
        same(completion, generate(engine, [request])[0][0], atol=1e-5)


# --- cancelled requests


def test_a_cancelled_request_frees_its_slots_and_changes_no_other(engine: Engine) -> None:
    long, other, late = requests(3, 3)
    alone = [generate(engine, [one])[0] for one in (other, late)]
    ids = [engine.add(one) for one in (long, other, late)]
    engine.step()
    engine.cancel(ids[0])  # in slots
    assert len(engine.scheduler.free) == 3
    engine.cancel(ids[2])  # waiting
    ids[2] = engine.add(late)
    ended = finish(engine)
    assert {request for request, _ in ended} == set(ids[1:])
    for number, group in zip(ids[1:], alone, strict=True):
        for n, completion in enumerate(group):
            same(ended[number, n].completion, completion)


@pytest.mark.parametrize("when", ["unknown", "finished", "cancelled"])
def test_a_request_that_is_not_there_cannot_be_cancelled(engine: Engine, when: str) -> None:
    number = engine.add(Request(PROMPT))
    if when == "finished":
        finish(engine)
    elif when == "cancelled":
        engine.cancel(number)
    with pytest.raises(CoveyError, match=f"there is no request {number + (when == 'unknown')}"):
        engine.cancel(number + (when == "unknown"))


# --- requests that are refused


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"prompt": np.zeros(0, np.int32)}, DataError, "no tokens"),
        ({"prompt": np.zeros(17, np.int32)}, DataError, "17 tokens"),
        ({"prompt": np.array([5, 300])}, DataError, r"the token 300(.|\n)*from 0 to 299"),
        ({"prompt": np.array([5, -1])}, DataError, "the token -1"),
        ({"max_new_tokens": 0}, CoveyError, r"limit of 0 new tokens(.|\n)*from 1 to"),
        ({"max_new_tokens": 13}, CoveyError, r"limit of 13 new tokens(.|\n)*= 12"),
        ({"id": 9}, CoveyError, r"unfinished request 9 already(.|\n)*another id"),
        ({"step": -1}, CoveyError, r"step, index and first sample \(-1, 0, 0\)"),
        ({"index": 2**32}, CoveyError, "step, index"),
    ],
)
def test_a_wrong_request_is_refused_and_the_others_go_on(
    engine: Engine, wrong: dict[str, Any], error: type[CoveyError], words: str
) -> None:
    engine.add(Request(PROMPT, 2, id=9))
    engine.step()
    with pytest.raises(error, match=words):
        engine.add(replace(Request(PROMPT), **wrong))
    assert set(engine.sequences) == {9}
    ended = finish(engine)
    for n, completion in enumerate(generate(engine, [Request(PROMPT, 2)])[0]):
        same(ended[9, n].completion, completion)


def test_a_request_beyond_the_cache_or_the_models_positions_is_refused(engine: Engine) -> None:
    engine.configure(replace(CONFIG, kv_cache_size=14))
    with pytest.raises(DataError, match=r"may need 17 tokens(.|\n)*kv_cache_size = 14"):
        engine.add(Request(PROMPT))
    engine.add(Request(PROMPT, max_new_tokens=9))
    engine.reset()
    engine.configure(replace(CONFIG, max_new_tokens=60))
    with pytest.raises(DataError, match=r"may need 65 tokens(.|\n)*at most 64"):
        engine.add(Request(PROMPT))


def test_a_full_queue_refuses_a_request(engine: Engine) -> None:
    engine.max_waiting = 2
    for _ in range(2):
        engine.add(Request(PROMPT))
    with pytest.raises(CoveyError, match=r"2 requests wait already(.|\n)*after some steps"):
        engine.add(Request(PROMPT))
    engine.step()
    engine.add(Request(PROMPT))
    assert len(finish(engine)) == 3
    assert len(generate(engine, requests(7, 1))) == 7  # which adds what there is room for


# --- weights and settings


def scaled(factor: float) -> Any:
    return jax.tree.map(lambda x: x * factor, params())


def test_new_weights_draw_what_comes_next(engine: Engine) -> None:
    """Also of a prompt that was prefilled under the last ones; and the completions say which weights drew them."""
    prompt, new = Request(PROMPT, 6, sampling_params=SamplingParams(0.0)), scaled(0.7)
    engine.update_weights(new)
    (want, *_), *_ = generate(engine, [prompt])
    engine.update_weights(params(), 4)
    number = engine.add(prompt)
    engine.step()  # four of six are in slots
    engine.update_weights(new)
    ended = finish(engine)
    assert [ended[number, n].versions for n in range(6)] == [*[(4, 5)] * 4, *[(5, 5)] * 2]
    same(ended[number, 4].completion, want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[..., :-1], r"float32\[300, 31\] as embed.embedding(.|\n)*float32\[300, 32\]"),
        (lambda x: x.astype(jnp.bfloat16), r"bfloat16\[300, 32\] as embed.embedding"),
        (lambda x: None, r"no array as embed.embedding"),
    ],
)
def test_weights_of_another_shape_or_type_are_refused(engine: Engine, change: Any, words: str) -> None:
    other = nnx.to_pure_dict(params())
    other["embed"]["embedding"] = change(other["embed"]["embedding"])
    engine.add(Request(PROMPT))
    with pytest.raises(WeightsError, match=words):
        engine.update_weights(other)
    assert len(finish(engine)) == 1


def test_logits_that_are_not_numbers_draw_a_token_without_a_log_prob_and_spoil_nothing_later(engine: Engine) -> None:
    wanted = requests(6)
    want = generate(engine, wanted)
    engine.update_weights(scaled(np.nan))
    for group in generate(engine, wanted):
        for completion in group:
            assert np.isnan(completion.logps).all()
            assert ((completion.tokens >= 0) & (completion.tokens < VOCABULARY + 84)).all()
    engine.update_weights(params())
    for group, other in zip(generate(engine, wanted), want, strict=True):
        for completion, before in zip(group, other, strict=True):
            same(completion, before)


def test_an_engine_with_requests_neither_sleeps_nor_changes_its_settings(engine: Engine) -> None:
    engine.add(Request(PROMPT))
    for act in (engine.sleep, lambda: engine.configure(CONFIG), lambda: generate(engine, [])):
        with pytest.raises(CoveyError, match=r"1 unfinished requests"):
            act()
    engine.reset()
    engine.sleep()
    assert engine.runner.params is None
    with pytest.raises(CoveyError, match=r"no weights"):
        engine.add(Request(PROMPT))


def test_a_request_has_stop_ids_of_its_own(engine: Engine) -> None:
    request = replace(requests(1)[0], sampling_params=SamplingParams(temperature=0.0), samples=1)
    (whole,) = generate(engine, [request])[0]
    stop = int(whole.tokens[len(whole.tokens) // 2])
    (ended,) = generate(engine, [replace(request, stop_conditions=(StopIds([stop, 9999]),))])[0]
    length = whole.tokens.tolist().index(stop) + 1
    assert ended.tokens.tolist() == whole.tokens[:length].tolist()
    assert ended.finish == FinishReason.STOP


def test_prompts_prefilled_alone_have_numbers_that_depend_on_no_other_request(engine: Engine) -> None:
    few, crowd = requests(3), requests(9, seed=4)
    engine.scheduler.prefills_alone = True
    try:
        alone = [generate(engine, [request])[0] for request in few]
        together = generate(engine, [*crowd, *few])[len(crowd) :]
    finally:
        engine.scheduler.prefills_alone = False
    for own, among in zip(alone, together, strict=True):
        for one, other in zip(own, among, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logps.tolist() == other.logps.tolist()


def test_a_prompt_that_was_prefilled_last_is_not_prefilled_again(engine: Engine) -> None:
    engine.scheduler.prefills_alone = True
    try:
        alone = [generate(engine, [Request(PROMPT, index=n)])[0][0] for n in range(3)]
        engine.configure(engine.config)
        together = generate(engine, [Request(PROMPT, index=n) for n in range(3)])
        assert engine.stats.prompt_tokens <= len(PROMPT)
    finally:
        engine.scheduler.prefills_alone = False
    for one, (other,) in zip(alone, together, strict=True):
        same(one, other)
    engine.update_weights(scaled(0.7))
    assert generate(engine, [Request(PROMPT)])[0][0].logps.tolist() != alone[0].logps.tolist()
    engine.update_weights(params())
