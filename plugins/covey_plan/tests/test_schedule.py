"""The calls of a rollout are those that the engine's scheduler makes, and their lengths those of a distribution."""

import json
from pathlib import Path

import numpy as np
import pytest

from covey.config import recipe
from covey.config.schema import RolloutConfig
from covey.errors import CoveyError
from covey.sampling.scheduler import Scheduler
from covey_plan.lengths import cut_geometric, expected_lengths
from covey_plan.schedule import Timeline, fitted, timeline


def played(scheduler: Scheduler, lengths: np.ndarray) -> Timeline:
    """Return the calls of an engine whose samples draw so many tokens, chunk after chunk."""
    made, left, slots, chunk = Timeline(), {}, len(scheduler.slots), scheduler.config.decode_chunk
    while scheduler.unfinished:
        drawn = np.zeros(slots, int)
        if scheduler.can_admit:
            prefilled = bool(scheduler.next_prefill())
            entered = scheduler.admit()
            left |= {one.slot: lengths[one.sample] - 1 for one in entered}
            made += Timeline(prefills=prefilled, admissions=1, samples=len(entered))
        else:
            steps = min(chunk, max(left[slot] for slot in scheduler.active))
            for slot in scheduler.active:
                drawn[slot] = min(steps, left[slot])
                left[slot] -= drawn[slot]
            made += Timeline(chunks=1, steps=steps, slot_steps=steps * slots, drawn=int(drawn.sum()))
        scheduler.update(drawn, [slot for slot in scheduler.active if left[slot] == 0])
    return made


@pytest.mark.parametrize("seed", range(8))
def test_calls_are_those_of_the_scheduler(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompts, samples, slots, chunk = random.integers([1, 1, 1, 1], [30, 6, 9, 12])
    config = RolloutConfig(max_prompt_length=16, max_new_tokens=64, slots=int(slots), decode_chunk=int(chunk))
    lengths = random.integers(2, 65, (prompts, samples))
    requests = [16] * int(prompts), [int(samples)] * int(prompts)
    schedulers = [fitted(*requests, config, may_resize=False) for _ in range(2)]
    assert timeline(schedulers[0], lengths) == played(schedulers[1], lengths)


def test_a_slot_stays_free_through_a_chunk_that_was_launched_before_its_end_was_read() -> None:
    config = RolloutConfig(max_prompt_length=16, max_new_tokens=64, slots=2, decode_chunk=8)
    lengths = np.array([[9, 33], [9, 9]])  # one, four, one and one chunks in two slots
    read, unread = (timeline(fitted([16] * 2, [2] * 2, config, fixed_shapes=True), lengths, n) for n in (0, 1))
    assert (read.chunks, unread.chunks) == (4, 5)  # the second sample ends with chunk 4, the last with 3 or with 5


def test_the_longest_completion_decides_when_a_rollout_ends() -> None:
    config = RolloutConfig(max_prompt_length=16, max_new_tokens=1024, slots=8, decode_chunk=8)
    scheduler = fitted([16], [8], config, fixed_shapes=True)
    found = timeline(scheduler, np.array([[100] * 7 + [1000]]))
    assert (found.steps, found.chunks) == (999, 125)
    assert found.use == (7 * 99 + 999) / (8 * 999)


def test_assumed_lengths_have_their_mean_and_end_at_the_most() -> None:
    found = cut_geometric(300, 1024)
    assert np.mean(found) == pytest.approx(300, rel=0.01)
    assert (min(found), max(found)) == (3, 1024)
    assert cut_geometric(64, 64) == (64,)


def test_lengths_are_assumed_given_or_read(tmp_path: Path) -> None:
    ready = recipe.load("quickstart", ["rollout.max_new_tokens=100", "rollout.max_prompt_length=50"])
    assumed = expected_lengths(ready)
    assert (assumed.prompt, assumed.completion, max(assumed.completions)) == (50, 35, 100)
    assert sorted(expected_lengths(ready, 9, (30, 10)).of(4)) == [10, 10, 30, 30]
    with pytest.raises(CoveyError, match=r"101\n.*at most 100"):
        expected_lengths(ready, None, (101,))
    rows = [{"prompt_length": 20 + n, "length": length} for n, length in enumerate((7, 300, 5))]
    (tmp_path / "samples.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, rows))) + "torn")
    read = expected_lengths(ready, samples=tmp_path)
    assert (read.prompt, read.completions) == (21, (5, 7, 100))
    with pytest.raises(CoveyError, match="cannot be read"):
        expected_lengths(ready, samples=tmp_path / "missing")
