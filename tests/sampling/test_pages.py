"""A paged cache: completions are those of slots with room of their own, whatever is shared and parked."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from covey.config.schema import RolloutConfig
from covey.errors import RecipeError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.parallel.sharding import place_model
from covey.sampling.engine import Engine, Request, check_pages, generate
from covey.sampling.responder import NewBranch, Turn
from covey.sampling.scheduler import Demands, Sample, Scheduler

CONFIG = RolloutConfig(max_prompt_length=60, max_new_tokens=40, slots=4, decode_chunk=3, page_size=16, num_pages=8)


class Turns:
    """A responder of three turns; the third begins a branch inside the prompt."""

    pause_id, turn_limit, max_num_seqs, is_async, answer_lag = None, 9, None, False, None

    def __init__(self, prompt_length: int):
        self.kept = 2 * prompt_length // 3

    def answer(self, turn: Turn) -> Any:
        if len(turn.tokens) < 12:
            return turn.tokens[:5]
        return NewBranch(self.kept, turn.tokens[-7:]) if len(turn.tokens) < 24 else None


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_completions_are_those_of_slots_of_their_own(tp: int) -> None:
    """Bit for bit with equal shapes: with prompts that are shared, turns, and samples that are parked."""
    config = ModelConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        tie_embeddings=True, max_positions=128, windows=(None, 20),
    )  # fmt: skip
    model, rng, requests = Decoder(config, rngs=nnx.Rngs(0)), np.random.default_rng(0), []
    model.embed.embedding[...] = model.embed.embedding[...] * 20  # peaked enough to be a real distribution
    if tp > 1:
        model = place_model(model, jax.make_mesh((1, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2))
    for index, (length, samples) in enumerate(zip(rng.integers(5, 60, 7), rng.integers(1, 6, 7), strict=True)):
        prompt, responder = rng.integers(0, 300, length).astype(np.int32), Turns(int(length)) if index % 2 else None
        requests.append(Request(prompt, int(samples), index, responder=responder))
    paged = Engine(model, range(0, 300, 40), CONFIG, fixed_shapes=True, runs_ahead=True)
    dense = Engine(model, paged.stop_ids, replace(CONFIG, page_size=None, num_pages=None), fixed_shapes=True)
    parked, swap_out = list[int](), paged.runner.swap_out
    paged.runner.swap_out = lambda slot: (parked.append(slot), swap_out(slot))[1]  # type: ignore[method-assign]
    for got, want in zip(generate(paged, requests), generate(dense, requests), strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_array_equal(one.logps, other.logps)
    assert len(parked) > 3
    table = paged.scheduler.table
    assert table is not None
    assert table.num_free == table.sizes.total - 1


class Played:
    """A run of a scheduler whose cache is an array of numbers, one for each token."""

    def __init__(self, rng: np.random.Generator, config: RolloutConfig, demands: Demands):
        self.rng, self.config, self.scheduler = rng, config, Scheduler(config, fixed_shapes=True)
        self.prompts = {n: 1000 * n + np.arange(rng.integers(1, config.max_prompt_length + 1)) for n in range(12)}
        for request, prompt in self.prompts.items():
            self.scheduler.add(request, len(prompt), int(rng.integers(1, 7)), demands)
        self.cached: dict[Sample, np.ndarray] = {}
        self.responses: dict[Sample, tuple[int, np.ndarray]] = {}
        self.host: dict[Sample, np.ndarray] = {}
        self.parked, self.shared, self.copied = 0, 0, 0

    def step(self) -> None:
        scheduler = self.scheduler
        if scheduler.fit():
            assert scheduler.table is not None
            self.table, self.rows = scheduler.table, scheduler.table.rows.copy()
            self.pages = np.zeros((self.table.sizes.total, self.table.size), np.int64)
        for sample in sorted(scheduler.paused):
            if self.rng.random() < 0.3 or scheduler.stalled:
                self.respond(sample)
        self.park(scheduler.swap_out())
        for slot, sample in scheduler.swap_in().items():
            self.write(slot, 0, self.host.pop(sample))
        self.rows = self.table.rows.copy()  # a slot is read as it was when it was last written
        if scheduler.can_admit:
            self.admit()
        elif scheduler.active:
            self.decode()
        self.rows = self.table.rows.copy()
        for slot, sample in scheduler.running.items():
            kept = self.responses[sample][0] if sample in self.responses else None  # a branch drops the rest
            np.testing.assert_array_equal(self.read(slot, sample)[:kept], self.cached[sample][:kept])

    def respond(self, sample: Sample) -> None:
        """End a sample, append tokens to it, or let it begin a branch somewhere."""
        cached, new = self.cached[sample], self.rng.integers(10**6, 10**9, self.rng.integers(1, 5))
        kept = int(self.rng.integers(1, len(cached))) if len(cached) > 1 and self.rng.random() < 0.5 else None
        start = len(cached) if kept is None else kept
        if self.rng.random() < 0.3 or start + len(new) >= len(self.prompts[sample.request]) + 40 - 3:
            return self.scheduler.finish(sample)
        self.responses[sample] = start, new
        return self.scheduler.resume(sample, start + len(new) - len(cached), kept)

    def admit(self) -> None:
        counts = np.zeros(len(self.scheduler.slots), np.int64)
        self.scheduler.next_prefill()
        for one in self.scheduler.admit():
            prompt = self.cached[one.sample] = self.prompts[one.sample.request]
            for page, part in one.pages:
                piece = prompt[part * self.table.size :][: self.table.size]
                self.pages[page, : len(piece)] = piece
            self.shared += self.table.sizes.num_pages(len(prompt)) - len(one.pages)
            counts[one.slot] = 1
        assert counts.any()
        self.scheduler.update(counts)

    def decode(self) -> None:
        parked, copies = self.scheduler.reserve()
        self.park(parked)
        for source, target in copies:
            self.pages[target] = self.pages[source]
        self.copied, counts = self.copied + len(copies), np.zeros(len(self.scheduler.slots), np.int64)
        assert self.scheduler.active
        for slot, sample in self.scheduler.active.items():
            if sample in self.responses:
                self.extend(slot, sample, *self.responses.pop(sample))
            room = len(self.prompts[sample.request]) + self.config.max_new_tokens - len(self.cached[sample])
            counts[slot] = min(self.rng.integers(1, 12), self.config.decode_chunk, room)
            drawn = self.rng.integers(10**6, 10**9, counts[slot])
            self.extend(slot, sample, len(self.cached[sample]), drawn)
        active = self.scheduler.active
        self.scheduler.update(counts)
        for slot, sample in active.items():
            if counts[slot] < self.config.decode_chunk:
                self.scheduler.pause(sample)

    def extend(self, slot: int, sample: Sample, start: int, tokens: np.ndarray) -> None:
        self.cached[sample] = np.append(self.cached[sample][:start], tokens)
        self.write(slot, start, tokens)

    def park(self, samples: dict[int, Sample]) -> None:
        for slot, sample in samples.items():
            self.host[sample] = self.read(slot, sample)
            self.parked += 1

    def read(self, slot: int, sample: Sample) -> np.ndarray:
        return self.pages[self.rows[slot]].ravel()[: len(self.cached[sample])]

    def write(self, slot: int, start: int, tokens: np.ndarray) -> None:
        places = start + np.arange(len(tokens))
        self.pages[self.table.rows[slot, places // self.table.size], places % self.table.size] = tokens


@pytest.mark.parametrize("is_async", [False, True])
def test_slots_read_what_was_written_for_them(is_async: bool) -> None:
    """At random lengths, numbers of pages, responses and branches; every sample ends, and then all pages are free."""
    parked, shared, copied = 0, 0, 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        config = replace(CONFIG, slots=int(rng.integers(1, 9)), num_pages=int(rng.integers(7, 30)))
        played = Played(rng, config, Demands(is_async=is_async, max_num_seqs=12 if is_async else None))
        for _ in range(5000):
            if not played.scheduler.unfinished:
                break
            played.step()
        assert not played.scheduler.unfinished
        assert played.table.num_free == played.table.sizes.total - 1
        parked, shared, copied = parked + played.parked, shared + played.shared, copied + played.copied
    assert min(parked, shared, copied) > 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 8}, "power of two from 16"),
        ({"page_size": 48}, "power of two from 16"),
        ({"page_size": None}, "nothing reads it without page_size"),
        ({"num_pages": 6}, r"6 pages of 16 tokens hold 96, and a sample may have 100(.|\n)*at least 7"),
    ],
)
def test_settings_that_hold_no_sample_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        replace(CONFIG, **settings)


def test_devices_that_pages_do_not_serve_are_named() -> None:
    check_pages(replace(CONFIG, page_size=128), "tpu", 1)
    with pytest.raises(RecipeError, match=r"divides slots into 4 parts(.|\n)*tp alone"):
        check_pages(CONFIG, "cpu", 4)
    with pytest.raises(RecipeError, match="from 128 on"):
        check_pages(CONFIG, "cuda", 1)
