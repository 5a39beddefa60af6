"""The scheduler: order of admission, refilled slots, sizes of batch and cache; without a model and without JAX."""

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from covey.config.schema import RolloutConfig
from covey.sampling.scheduler import (
    MIN_SLOTS,
    NO_REQUIREMENTS,
    PREFILL_BATCH,
    Admission,
    BatchRequirements,
    Sample,
    Scheduler,
    block_lengths,
    length_bucket,
)


def fitted(
    prompt_lengths: Sequence[int],
    num_samples: Sequence[int],
    config: RolloutConfig,
    requirements: BatchRequirements = NO_REQUIREMENTS,
    **options: bool,
) -> Scheduler:
    """A scheduler in which requests with prompts of these lengths and numbers of samples wait."""
    scheduler = Scheduler(config, **options)
    for request, (length, samples) in enumerate(zip(prompt_lengths, num_samples, strict=True)):
        scheduler.add(request, length, samples, requirements)
    scheduler.fit()
    return scheduler


def made(prompts: list[int], samples: int = 1, **settings: int) -> Scheduler:
    return fitted(prompts, [samples] * len(prompts), RolloutConfig(**settings))


def fill(scheduler: Scheduler) -> list[Admission]:
    """Admit as the engine does; every sample draws its first token and goes on."""
    everyone: list[Admission] = []
    while scheduler.can_admit:
        scheduler.next_prefill()
        admitted = scheduler.admit()
        scheduler.update(np.isin(np.arange(len(scheduler.slots)), [a.slot for a in admitted]), ())
        everyone += admitted
    return everyone


def test_samples_are_admitted_in_order_with_the_rows_of_their_prompts() -> None:
    scheduler = made([5, 3], samples=3, slots=8)
    assert scheduler.next_prefill() == [0, 1]
    admitted = scheduler.admit()
    assert [a.sample for a in admitted] == [Sample(r, n) for r in range(2) for n in range(3)]
    assert [a.slot for a in admitted] == list(range(6))
    assert [a.row for a in admitted] == [0, 0, 0, 1, 1, 1]


def test_a_prompt_is_prefilled_once_however_many_slots_there_are() -> None:
    scheduler, prefilled, order = made([4] * 11, samples=3, slots=2), [], []
    while scheduler.unfinished:
        while scheduler.can_admit:
            prefilled += scheduler.next_prefill()
            order += [a.sample for a in scheduler.admit()]
        scheduler.update(np.zeros(2, int), [min(scheduler.running)])
    assert prefilled == list(range(11))
    assert order == [Sample(request, n) for request in range(11) for n in range(3)]


def test_prefilled_prompts_come_in_batches_and_rows_count_within_a_batch() -> None:
    scheduler = made([4] * (PREFILL_BATCH + 2), slots=32)
    assert scheduler.next_prefill() == list(range(PREFILL_BATCH))
    assert scheduler.next_prefill() == []
    assert len(scheduler.admit()) == PREFILL_BATCH
    assert scheduler.next_prefill() == [PREFILL_BATCH, PREFILL_BATCH + 1]
    assert [a.row for a in scheduler.admit()] == [0, 1]


def test_only_free_slots_are_refilled() -> None:
    scheduler = made([4] * 6, slots=4)
    fill(scheduler)
    assert not scheduler.can_admit
    scheduler.update(np.ones(4, int), [1, 3])
    assert scheduler.free == [1, 3]
    assert fill(scheduler) == [Admission(1, 4, Sample(4, 0)), Admission(3, 5, Sample(5, 0))]
    assert scheduler.num_live == 4
    assert scheduler.lengths.tolist() == [5, 4, 5, 4]


def test_requests_without_samples_are_passed_over() -> None:
    scheduler = fitted([2, 3, 4], [0, 2, 0], RolloutConfig())
    assert [a.sample for a in fill(scheduler)] == [Sample(1, 0), Sample(1, 1)]
    assert not fitted([], [], RolloutConfig()).unfinished


def test_the_batch_shrinks_once_none_wait_and_keeps_what_runs() -> None:
    scheduler = made([4] * 40, slots=32)
    fill(scheduler)
    scheduler.update(np.ones(32, int), range(20))
    assert scheduler.resize() is None  # eight samples wait
    fill(scheduler)
    running = {sample: scheduler.lengths[slot] for slot, sample in scheduler.running.items()}
    assert len(running) == 20
    kept = scheduler.resize()
    assert kept is not None
    assert len(kept) == len(scheduler.slots) == len(scheduler.lengths) == 24
    assert {sample: scheduler.lengths[slot] for slot, sample in scheduler.running.items()} == running
    assert scheduler.resize() is None


def test_the_batch_never_shrinks_below_a_minimum_nor_grows() -> None:
    scheduler = made([4] * 8, slots=8)
    fill(scheduler)
    scheduler.update(np.ones(8, int), range(7))
    kept = scheduler.resize()
    assert kept is not None
    assert kept.tolist() == [7, 0, 1, 2]
    assert len(scheduler.slots) == MIN_SLOTS
    small = made([4], slots=1)
    fill(small)
    assert small.resize() is None


def test_the_batch_shrinks_step_by_step() -> None:
    """Each way from a size leads to the next: few programs that move slots."""
    scheduler, sizes = made([4] * 128, slots=128), [128]
    fill(scheduler)
    scheduler.update(np.ones(128, int), range(3, 128))
    while (kept := scheduler.resize()) is not None:
        assert kept.tolist() == list(range(len(kept)))
        sizes.append(len(kept))
    assert sizes == [128, 96, 64, 48, 32, 24, 16, 8, 4]


@pytest.mark.parametrize(("limit", "sizes"), [(None, [128, 256]), (150, [128, 150])])
def test_the_cache_grows_in_few_steps_to_its_limit_and_always_holds_the_next_chunk(
    limit: int | None, sizes: list[int]
) -> None:
    scheduler = fitted(
        [30, 50],
        [128, 128],
        RolloutConfig(max_prompt_length=50, max_new_tokens=100, slots=256, decode_chunk=8, kv_cache_size=limit),
    )
    fill(scheduler)
    seen = [scheduler.cache_length]
    while scheduler.lengths.max() < 140:
        assert scheduler.resize() is None or scheduler.cache_length > seen[-1]
        seen.append(scheduler.cache_length)
        assert scheduler.lengths.max() + 8 <= scheduler.cache_length
        scheduler.update(np.full(256, 8), ())
    assert sorted(set(seen)) == sizes


def test_a_small_cache_has_room_for_the_longest_sample_at_once() -> None:
    """Room that is not in use costs no time in a decode step, and each size of the cache costs a program."""
    sizes = [made([50] * slots, slots=slots, max_new_tokens=4000).cache_length for slots in (4, 16, 64, 512)]
    assert sizes == [4096, 1024, 256, 128]


def test_a_batch_that_is_not_resized_has_room_for_the_longest_sample() -> None:
    config = RolloutConfig(max_prompt_length=256, max_new_tokens=512, slots=32, decode_chunk=8)
    scheduler = fitted([30, 250], [16, 16], config, may_resize=False)
    assert scheduler.cache_length == scheduler.longest_cache == 768
    fill(scheduler)
    scheduler.update(np.full(32, 500), range(31))
    assert scheduler.resize() is None
    limited = RolloutConfig(max_prompt_length=256, max_new_tokens=512, kv_cache_size=762)
    assert fitted([250], [1], limited, may_resize=False).cache_length == 762


@pytest.mark.parametrize(
    ("how", "prefill", "decode", "keep"),
    [({"may_resize": True}, 2, 5, 4), ({"may_resize": False}, 2, 2, 0), ({"fixed_shapes": True}, 1, 1, 0)],
)
def test_few_programs_serve_a_ragged_run(how: dict[str, bool], prefill: int, decode: int, keep: int) -> None:
    """30 steps on prompts and completions of all lengths: programs count once for each set of shapes."""
    counts = programs_of_a_run(**how)
    assert [counts.get(name, 0) for name in ("prefill", "first", "decode", "keep")] == [prefill, 1, decode, keep]
    if how.get("may_resize"):
        assert (counts["empty"], counts["insert"]) == (1, 1)


def test_fixed_shapes_follow_the_settings_alone() -> None:
    config = RolloutConfig(max_prompt_length=100, max_new_tokens=50, slots=16)
    one, many = (
        fitted([3], [1], config, fixed_shapes=True),
        fitted([90] * 40, [2] * 40, config, fixed_shapes=True),
    )
    for scheduler in (one, many):
        assert (len(scheduler.slots), scheduler.cache_length, scheduler.prefill_shape) == (16, 256, (8, 128))


def test_a_prompt_that_is_prefilled_alone_has_the_bucket_of_its_own_length() -> None:
    scheduler = Scheduler(RolloutConfig(max_prompt_length=200, max_new_tokens=50), fixed_shapes=True)
    scheduler.prefills_alone = True
    shapes = []
    for number, length in enumerate((5, 17, 33, 49, 65, 97, 130)):
        scheduler.add(number, length, 1)
        scheduler.fit()
        shapes.append(scheduler.prefill_shape)
        scheduler.cancel(number)
    assert shapes == [(1, 16), (1, 32), (1, 48), (1, 64), (1, 96), (1, 128), (1, 192)]


def programs_of_a_run(**how: bool) -> dict[str, int]:
    rng, config = np.random.default_rng(0), RolloutConfig(max_prompt_length=256, max_new_tokens=256, slots=32)
    programs: set[tuple[object, ...]] = set()
    for _ in range(30):
        prompts = rng.lognormal(4.6, 0.35, 8).astype(int).clip(20, 250).tolist()
        scheduler = fitted(prompts, [8] * 8, config, **how)
        programs |= programs_of(scheduler, np.minimum(rng.geometric(1 / 90, (8, 8)), 256))
    return {str(name): sum(name == key[0] for key in programs) for name, *_ in programs}


def programs_of(scheduler: Scheduler, lengths: np.ndarray) -> set[tuple[object, ...]]:
    """Return the programs and shapes that a call takes whose samples end after `lengths` tokens, int [P, G]."""
    drawn, rows = np.zeros_like(lengths), scheduler.prefill_shape[0]
    blocks = block_lengths(scheduler.prefill_shape[1])
    programs: set[tuple[object, ...]] = {
        ("empty", len(scheduler.slots), block) for block in block_lengths(scheduler.cache_length)
    }

    def collect(counts: dict[int, int]) -> None:
        running = scheduler.running
        for slot, count in counts.items():
            drawn[running[slot]] += count
        every = np.array([counts.get(slot, 0) for slot in range(len(scheduler.slots))])
        scheduler.update(every, [slot for slot, sample in running.items() if drawn[sample] >= lengths[sample]])

    while scheduler.unfinished:
        while scheduler.can_admit:
            if scheduler.next_prefill():
                programs.add(("prefill", scheduler.prefill_shape))
            slots, room = len(scheduler.slots), block_lengths(scheduler.cache_length)
            programs |= {("insert", slots, rows, *pair) for pair in zip(blocks, room, strict=False)}
            programs.add(("first", slots, rows))
            collect({admission.slot: 1 for admission in scheduler.admit()})
        if not scheduler.running:
            continue
        slots, length = len(scheduler.slots), scheduler.cache_length
        while (kept := scheduler.resize()) is not None:
            if len(kept) < slots:
                programs |= {("keep", slots, len(kept), block) for block in block_lengths(length)}
            new = block_lengths(scheduler.cache_length)[len(block_lengths(length)) :]
            programs |= {("empty", len(kept), block) for block in new}
            slots, length = len(kept), scheduler.cache_length
        programs.add(("decode", slots, length))
        chunk = scheduler.config.decode_chunk
        collect({slot: min(chunk, lengths[sample] - drawn[sample]) for slot, sample in scheduler.running.items()})
    return programs


def test_it_is_plain_python() -> None:
    code = "import sys, covey.sampling.scheduler; assert not {'jax', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_buckets_are_few_and_close() -> None:
    sizes = {length_bucket(n) for n in range(1, 2049)}
    assert len(sizes) <= 10
    assert all(n <= length_bucket(n) for n in range(1, 2049))
    assert all(length_bucket(n) < 1.5 * n for n in range(257, 2049))


def test_a_cache_that_grows_keeps_its_blocks() -> None:
    """The trap: a longer cache is divided differently, so that tokens would have to move."""
    sizes = [2**n for n in range(7, 15)]
    for size in sizes:
        assert block_lengths(size) == block_lengths(sizes[-1])[: len(block_lengths(size))]
        assert sum(block_lengths(size)) == size
        assert sum(block_lengths(size + 5)) == size + 5
    assert len(block_lengths(sizes[-1])) == 14


def test_sizes_grow_with_requests_that_come_later() -> None:
    scheduler = made([4], samples=2, slots=8)
    fill(scheduler)
    assert (scheduler.resize(), scheduler.prefill_shape) == (None, (1, 16))
    for request in (1, 2):
        scheduler.add(request, 200, 2)
    grown = scheduler.resize()
    assert grown is not None
    assert grown[:2].tolist() == [0, 1]
    assert (len(grown), len(scheduler.slots), scheduler.cache_length) == (8, 8, 1024)
    assert scheduler.running == {0: Sample(0, 0), 1: Sample(0, 1)}
    assert scheduler.next_prefill() == [1, 2]
    assert scheduler.prefill_shape == (2, 256)
    assert not scheduler.fit()


@pytest.mark.parametrize(("length", "requirements"), [(17, NO_REQUIREMENTS), (4, BatchRequirements(pause_id=5))])
def test_a_request_that_does_not_fit_waits_until_none_is_begun(length: int, requirements: BatchRequirements) -> None:
    scheduler = fitted([16], [1], RolloutConfig(slots=4, max_new_tokens=8), may_resize=False)
    fill(scheduler)
    scheduler.add(1, length, 2, requirements)
    assert not scheduler.can_admit
    assert not scheduler.fit()
    scheduler.update(np.zeros(1, int), [0])
    assert scheduler.fit()
    assert (scheduler.can_admit, len(scheduler.slots), scheduler.requirements) == (True, 2, requirements)
