"""Calls of a rollout: when each sample enters a slot, and how many steps and chunks are decoded until the last ends.

As the engine does it: samples enter free slots in the order of their prompts, between two chunks of decode steps; a
prompt is prefilled with those behind it, when its first sample enters. A slot whose sample has ended stays free until
the chunk ends, also through the next one if that was launched before this was read, and at the end of a rollout until
the longest sample has ended.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Int

from covey.config.schema import RolloutConfig
from covey.sampling.scheduler import NO_REQUIREMENTS, BatchRequirements, Scheduler


@dataclass(frozen=True)
class Timeline:
    """Number of calls, or of steps, of the rollouts of a step.

    Attributes:
        prefills: calls of prefill.
        admissions: calls that insert prompts into slots; the slot of a sample of one token counts as refilled with it.
        samples: samples that are inserted.
        chunks: calls of decode.
        steps: decode steps.
        slot_steps: decode steps × slots.
        drawn: tokens that decode steps draw; the first of a sample is drawn when it is inserted.
    """

    prefills: int = 0
    admissions: int = 0
    samples: int = 0
    chunks: int = 0
    steps: int = 0
    slot_steps: int = 0
    drawn: int = 0

    def __add__(self, other: "Timeline") -> "Timeline":
        return Timeline(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def host_turns(self) -> int:
        """Number of times the host reads what a program drew before it launches the next."""
        return self.admissions + self.chunks

    @property
    def use(self) -> float:
        """Fraction of the slots' decode steps that draw a token."""
        return self.drawn / self.slot_steps if self.slot_steps else 0.0


def fitted(
    prompt_lengths: Sequence[int],
    num_samples: Sequence[int],
    config: RolloutConfig,
    *,
    may_resize: bool = True,
    fixed_shapes: bool = False,
    requirements: BatchRequirements = NO_REQUIREMENTS,
) -> Scheduler:
    """Return a scheduler in which requests with prompts of these lengths and numbers of samples wait."""
    scheduler = Scheduler(config, may_resize=may_resize, fixed_shapes=fixed_shapes)
    for request, sizes in enumerate(zip(prompt_lengths, num_samples, strict=True)):
        scheduler.add(request, *sizes, requirements)
    scheduler.fit()
    return scheduler


def timeline(scheduler: Scheduler, lengths: Int[np.ndarray, "prompts samples"], unread: int = 0) -> Timeline:
    """Return the calls of one rollout.

    Args:
        scheduler: one to which its requests were added.
        lengths: number of tokens of each completion.
        unread: number of chunks that are launched before the one before them is read.
    """
    (prompts, samples), rows = lengths.shape, scheduler.prefill_shape[0]
    slots, chunk = min(len(scheduler.slots), lengths.size), scheduler.config.decode_chunk
    steps = np.maximum(lengths.ravel() - 1, 0)
    starts = _starts(-(-steps // chunk), slots, unread)
    batches = np.arange(lengths.size) // samples // rows
    per_chunk = _steps_per_chunk(starts, steps, chunk)
    return Timeline(
        prefills=-(-prompts // rows),
        admissions=len(np.unique(np.stack([starts, batches]), axis=1).T),
        samples=lengths.size,
        chunks=len(per_chunk),
        steps=int(per_chunk.sum()),
        slot_steps=int(per_chunk.sum()) * slots,
        drawn=int(steps.sum()),
    )


def _starts(chunks: Int[np.ndarray, "n"], slots: int, unread: int) -> Int[np.ndarray, "n"]:
    """Return the chunk before which each sample of so many chunks enters a slot: one that is known to be free, or with
    the first such one any that is, since what is launched is read when prompts enter.
    """
    free, starts, sample = [0] * slots, np.zeros(len(chunks), int), 0
    while sample < len(chunks):
        now = free[0] + (unread if free[0] else 0)
        while sample < len(chunks) and free[0] <= now:
            starts[sample] = now
            heapq.heapreplace(free, now + int(chunks[sample]))
            sample += 1
    return starts


def _steps_per_chunk(
    starts: Int[np.ndarray, "n"], steps: Int[np.ndarray, "n"], chunk: int
) -> Int[np.ndarray, "chunks"]:
    """Return the decode steps of each chunk: all of them if a sample goes on through it, else those of the sample that
    ends last.
    """
    whole, rest = np.divmod(steps, chunk)
    ends = starts + whole
    count = int((ends + (rest > 0)).max(initial=0))
    through = np.zeros(count + 1, int)
    np.add.at(through, starts, 1)
    np.add.at(through, ends, -1)
    rests = np.zeros(count + 1, int)
    np.maximum.at(rests, ends, rest)
    return np.where(through.cumsum() > 0, chunk, rests)[:count]
