"""The sampler's claims: nothing about a sample depends on how it was scheduled, and its log-probs are the trainer's."""

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.errors import DataError
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.parallel import make_mesh, shardings
from covey.sampling import cache, programs
from covey.sampling.cache import LayerCache
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.model_runner import Programs
from covey.types import Completion, FinishReason

STOPS = (3, 7, 11)
CONFIG = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    tie_embeddings=True, windows=(None, 5),
)  # fmt: skip


def build() -> Decoder:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    model.embed.embedding[...] = model.embed.embedding[...] * 20  # peaked enough to be a real distribution
    return model


@functools.cache
def model_of_all() -> Decoder:
    return build()


@functools.cache
def shared() -> Engine:
    """One for all, so that its programs are compiled once."""
    return Engine(model_of_all(), STOPS, RolloutConfig())


def requests(samples: int = 3, step: int = 0) -> list[Request]:
    rng = np.random.default_rng(0)
    sizes = [5, 9, 13, 30, 1, 7, 2, 3, 17, 20, 21]
    return [Request(rng.integers(0, 300, n).astype(np.int32), samples, i, step) for i, n in enumerate(sizes)]


def sample(wanted: list[Request], **settings: object) -> list[list[Completion]]:
    base = {"max_new_tokens": 24, "temperature": 0.8, "top_k": 100, "top_p": 0.98, "slots": 32}
    shared().configure(RolloutConfig(**{**base, **settings}))  # type: ignore[arg-type]
    return generate(shared(), wanted)


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def same(a: list[list[Completion]], b: list[list[Completion]]) -> None:
    for one, other in zip(flat(a), flat(b), strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert one.finish == other.finish
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
        np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, atol=1e-5)


@pytest.mark.slow
def test_samples_do_not_depend_on_slots_chunks_or_order() -> None:
    base = sample(requests())
    same(base, sample(requests(), slots=4, decode_chunk=3))
    assert shared().stats.prompt_tokens == sum(len(r.prompt) for r in requests())  # once for all samples of a prompt
    backwards = sample(requests()[::-1], slots=8, decode_chunk=1)
    same(base, backwards[::-1])
    same([base[3]], sample([requests()[3]]))  # drawn alone


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "meshed"), [("tpu", False), ("tpu", True), ("cuda", False)])
def test_kernels_give_the_same_samples_with_one_decode_program(
    platform: str, meshed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, with its kernels run as ordinary programs: slots are refilled, and nothing is resized. On a
    mesh, devices have parts of the heads and of the vocabulary, and each draws for its slots.
    """
    pytest.importorskip("covey_kernels")
    monkeypatch.setattr(programs, "decode_attention", partial(programs.decode_attention, interpret=True))
    monkeypatch.setattr(cache, "span_attention", partial(cache.span_attention, interpret=True))
    model = build()
    model.platform = platform
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "top_k": 100, "top_p": 0.98, "slots": 4}
    config = RolloutConfig(**settings, max_prompt_length=32)
    engine = Engine(model, STOPS, config, fixed_shapes=True)
    if meshed:
        params = nnx.split(model)[1]
        engine.update_weights(jax.device_put(params, shardings(params, make_mesh((2, 2)))))
    monkeypatch.setattr(engine.programs, "keep", None)  # nothing is resized
    same(generate(engine, requests(1)), sample(requests(1)))
    assert engine.programs.prefill._cache_size() == 1
    assert engine.programs.decode._cache_size() == 1


@jax.jit
def plain_logits(tokens: np.ndarray) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = model_of_all()(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))
    return model_of_all().logits(hidden)[0]


def logits_at(prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The plain forward's logits from which each of `tokens` was to be predicted."""
    full = np.concatenate([prompt, tokens, np.zeros(64 - len(prompt) - len(tokens), np.int32)])
    return np.asarray(plain_logits(full[None]))[len(prompt) - 1 :][: len(tokens)]


@pytest.mark.parametrize("temperature", [0.0, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.5, 1.0)), 1.7])
def test_logps_equal_the_trainers_at_any_temperature(temperature: float) -> None:
    wanted = requests(2)[:5]
    for request, group in zip(wanted, sample(wanted, temperature=temperature), strict=True):
        for completion in group:
            logps = jax.nn.log_softmax(logits_at(request.prompt, completion.tokens) / (temperature or 1.0))
            want = np.asarray(logps)[np.arange(len(completion.tokens)), completion.tokens]
            np.testing.assert_allclose(completion.logps, want, atol=1e-4)


def test_greedy_with_the_cache_gives_the_tokens_of_the_plain_forward() -> None:
    wanted = requests(1)
    for request, (completion,) in zip(wanted, sample(wanted, temperature=0.0), strict=True):
        best = logits_at(request.prompt, completion.tokens).argmax(-1)
        assert completion.tokens.tolist() == best.tolist()


@pytest.mark.slow
def test_every_stop_token_ends_a_completion_and_stays_in_it() -> None:
    """Traps: the stop token stripped, so that stopping is never trained; only one of several honoured."""
    completions = flat(sample(requests(16), temperature=1.5, top_k=0, top_p=1.0))
    ends = {int(c.tokens[-1]) for c in completions if c.finish is FinishReason.STOP}
    assert ends == set(STOPS)
    for c in completions:
        assert not set(c.tokens[:-1].tolist()) & set(STOPS)
        assert (c.finish is FinishReason.STOP) == (int(c.tokens[-1]) in STOPS)
        assert c.finish is FinishReason.STOP or len(c.tokens) == 24
        assert len(c.tokens) == len(c.logps) == len(c.sampler_logps)


@pytest.mark.slow
def test_noise_differs_by_step_prompt_and_sample_and_repeats_by_seed() -> None:
    """The trap: a constant seed, so that every call and every sample draws the same noise."""
    prompt, wild = requests()[3].prompt, {"temperature": 2.0, "top_k": 0, "top_p": 1.0}
    twins = [Request(prompt, 4, 0), Request(prompt, 4, 1)]
    first = sample(twins, **wild)
    texts = {tuple(c.tokens) for group in first for c in group}
    assert len(texts) == 8
    later = sample([Request(prompt, 4, 0, step=1)], **wild)
    assert not texts & {tuple(c.tokens) for c in later[0]}
    same(first, sample(twins, **wild))
    halves = sample([Request(prompt, 2, 0), Request(prompt, 2, 0, first=2)], **wild)
    same(first[:1], [[*halves[0], *halves[1]]])
    assert not texts & {tuple(c.tokens) for c in sample(twins, seed=1, **wild)[0]}


@pytest.mark.slow
def test_finished_slots_are_refilled_before_the_batch_is_done() -> None:
    """The trap: a batch that waits for its slowest row."""
    stops = range(0, 300, 15)  # many, so that lengths are ragged
    engine = Engine(model_of_all(), stops, RolloutConfig(max_new_tokens=64, slots=8, decode_chunk=4, temperature=1.5))
    groups = generate(engine, requests(8))
    lengths = np.array([len(c.tokens) for group in groups for c in group])
    padded = sum(int(lengths[i : i + 8].max()) for i in range(0, len(lengths), 8)) * 8
    assert engine.stats.tokens == lengths.sum()
    assert engine.stats.slot_steps < 0.8 * padded


@pytest.mark.slow
def test_few_programs_are_compiled_and_attention_covers_the_live_length_only() -> None:
    """The trap: attention over the whole cache. Buffers follow the longest live sample, not the maxima."""
    seen: list[int] = []
    engine = Engine(model_of_all(), STOPS, RolloutConfig(max_prompt_length=4096, max_new_tokens=8, slots=8))
    inner = engine.programs.decode

    def noted(params: Any, cache: list[LayerCache], *args: Any, **settings: Any) -> Any:
        seen.append(sum(block.length for block in cache[0]))
        return inner(params, cache, *args, **settings)

    engine.programs.decode = noted  # type: ignore[assignment]
    for step in range(4):
        generate(engine, requests(1, step))
    assert set(seen) == {64}
    assert inner._cache_size() <= 3
    assert engine.programs.prefill._cache_size() == 1


@pytest.mark.slow
def test_one_new_token_and_immediate_stops_need_no_decode_step() -> None:
    groups = sample(requests(2), max_new_tokens=1)
    assert all(len(c.tokens) == 1 for group in groups for c in group)
    same([group[:1] for group in groups], [[_first(c[0])] for c in sample(requests(2))])


def _first(c: Completion) -> Completion:
    stopped = int(c.tokens[0]) in STOPS
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    return Completion(c.tokens[:1], c.logps[:1], c.sampler_logps[:1], reason)


def test_no_requests_give_no_completions() -> None:
    assert sample([]) == []


@pytest.mark.parametrize(("size", "words"), [(0, "no tokens"), (300, "300 tokens")])
def test_prompts_that_cannot_be_sampled_are_errors_with_a_fix(size: int, words: str) -> None:
    """The trap: prompts longer than the maximum crash, or are cut without a word."""
    with pytest.raises(DataError, match=words):
        sample([Request(np.zeros(size, np.int32), 1, 0)])


def test_a_cache_too_small_for_prompt_and_answer_is_an_error() -> None:
    with pytest.raises(DataError, match="kv_cache_size"):
        sample(requests(), kv_cache_size=40)


@pytest.mark.slow
def test_a_slot_of_the_cache_is_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers come in few lengths, so that few programs are compiled; 94 tokens would have 128."""
    made: list[int] = []
    build = shared().programs.empty_cache

    def noted(*args: Any) -> list[LayerCache]:
        cache = build(*args)
        made.extend(sum(block.length for block in blocks) for blocks in cache)
        return cache

    monkeypatch.setattr(shared().programs, "empty_cache", noted)
    tall = [Request(np.arange(n, dtype=np.int32), 1, i, 0) for i, n in enumerate((5, 40, 70))]
    limited = sample(tall, kv_cache_size=94, decode_chunk=32)
    assert max(made) == 94
    made.clear()
    same(limited, sample(tall, decode_chunk=32))
    assert max(made) == 128


@pytest.mark.parametrize(("width", "meshed"), [(8, False), (128, False), (8, True)])
def test_an_accelerator_appends_what_a_cpu_does(width: int, meshed: bool) -> None:
    """Pieces of two responses behind what their slots hold, up to the end of the cache and not beyond it."""

    def appended(platform: str) -> list[np.ndarray]:
        model = Decoder(replace(CONFIG, head_dim=width), rngs=nnx.Rngs(0))
        model.platform = platform
        graph, params = nnx.split(model)
        params = jax.device_put(params, shardings(params, make_mesh((2, 2)))) if meshed else params
        append, tokens = Programs(graph, STOPS).append, np.arange(64, dtype=np.int32).reshape(4, 16)
        kept = Programs(graph, STOPS).empty_cache(params, 4, 0, 128)
        for start in (0, 16, 112, 120):
            rows = (np.array(x, np.int32) for x in ([3, 1, 0, 0], tokens, [start] * 4, [16, 9, 5, 5]))
            kept = append(params, kept, *rows, np.int32(2))
        time_last = [block.map(lambda x, axis: x if axis == 3 else x.swapaxes(2, 3)) for (block,) in kept]
        return [np.asarray(x) for x in jax.tree.leaves(time_last)]

    for got, want in zip(appended("tpu"), appended("cpu"), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert np.unique(np.argwhere(got)[:, 0]).tolist() == [1, 3]
