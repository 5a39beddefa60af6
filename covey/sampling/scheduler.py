"""Schedule samples onto slots: which prompts are prefilled next, which slot draws which sample, how large the batch is.

Samples are admitted in the order of their requests. A prompt is prefilled once, together with those behind it, and
admitted to the slot of each of its samples. Free slots are refilled as long as samples wait; when none wait, the batch
shrinks with the samples that are left, from one size to the next. Batch and KV cache come in few sizes, so that few
programs are compiled: a decode step skips what the cache has room for but does not hold, so room costs only memory.

Accelerators keep batch and cache as they begin: a free slot costs them next to nothing, and a program minutes. In a run
of training, whose evaluations have other numbers of prompts than its steps, all sizes follow the settings there.

The first functions hold the limits on the lengths of a prompt and its completion, and the sizes of buffers.

Plain Python without JAX: the device follows what is decided here (see `model_runner`).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from covey.config.schema import RolloutConfig
from covey.errors import DataError, RecipeError

SMALLEST_BLOCK = 128
"""Number of positions in a block of the KV cache, unless the cache ends before."""
PREFILL_BATCH = 8
"""Maximum number of prompts that are prefilled together."""
MIN_SLOTS = 4
"""Number of slots below which the batch does not shrink."""
MIN_CACHE_LENGTH = 64
"""Smallest size of the KV cache in tokens per slot."""
MIN_CACHE_TOKENS = 16384
"""Size of the KV cache in tokens over all slots that is not divided into steps of growth."""


def check_length(size: int, config: RolloutConfig, name: str) -> None:
    """Check that a prompt of `size` tokens can be sampled; `name` is the prompt's in the error.

    Errors: DataError for no tokens, more than `max_prompt_length`, or more than fit the cache with the completion.
    """
    if size == 0:
        raise DataError(f"{name} has no tokens", want="at least one token")
    if size > config.max_prompt_length:
        raise DataError(
            f"{name} has {size} tokens",
            want=f"at most rollout.max_prompt_length = {config.max_prompt_length}",
            fix=f"--rollout.max-prompt-length {size}; a shorter prompt; or --training.too-long drop or truncate",
        )
    needed = size + config.max_new_tokens
    if config.kv_cache_size is not None and needed > config.kv_cache_size:
        raise DataError(
            f"{name} and its answer may need {needed} tokens",
            want=f"at most rollout.kv_cache_size = {config.kv_cache_size}",
            fix=f"raise it (--rollout.kv-cache-size {needed}), or lower max_new_tokens",
        )


def check_positions(config: RolloutConfig, positions: int) -> None:
    """Check that no prompt with its completion can exceed the model's `positions` tokens.

    Errors: RecipeError.
    """
    prompt, completion = config.max_prompt_length, config.max_new_tokens
    if prompt + completion > positions:
        raise RecipeError(
            f"a prompt of max_prompt_length = {prompt} and an answer of max_new_tokens = {completion} are"
            f" {prompt + completion} tokens",
            want=f"at most {positions}, the positions this model was made for",
            fix="lower one of them (--rollout.max-prompt-length, --rollout.max-new-tokens)",
            where="rollout",
        )


def length_bucket(length: int, smallest: int = 64) -> int:
    """Round the length of a buffer up to a power of two from `smallest` on, or from 256 on also to 1.5 times one."""
    size = smallest
    while size < length:
        half = size + size // 2
        if size >= 256 and half >= length:
            return half
        size *= 2
    return size


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def smaller_batch(slots: int) -> int:
    """Return the next smaller size of a batch: a power of two, or from 24 on also three quarters of one.

    >>> [smaller_batch(n) for n in (64, 48, 32, 24, 20, 16, 8)]
    [48, 32, 24, 16, 16, 8, 4]
    """
    power = power_of_two(slots)
    three_quarters = 3 * power // 4
    return three_quarters if 24 <= three_quarters < slots else power // 2


def block_lengths(length: int) -> list[int]:
    """Divide `length` positions into blocks of at least 128, each as long as half of what is before it or less.

    >>> block_lengths(1024), block_lengths(150)
    ([128, 128, 128, 128, 256, 256], [128, 22])
    """
    lengths: list[int] = []
    while (start := sum(lengths)) < length:
        size = max(SMALLEST_BLOCK, 1 << start.bit_length() >> 2)
        lengths.append(min(size, length - start))
    return lengths


class Sample(NamedTuple):
    """One completion to sample: the index of its request, and its number among the samples of the request."""

    request: int
    number: int


class Admission(NamedTuple):
    """A sample that enters the batch: its slot, and the row of its prompt among those prefilled last."""

    slot: int
    row: int
    sample: Sample


class Scheduler:
    """Assignment of samples to slots.

    Args:
        prompt_lengths: number of prompt tokens of each request.
        num_samples: number of completions of each request.
        config: slots, decode chunk, maximum size of the KV cache.
        resizes: whether batch and cache follow the samples; otherwise the cache has room for the longest at once.
        max_num_seqs: maximum number of samples that are begun and not finished; by default the number of slots. Those
            that wait for a response may be more than there are slots.
        fixed_shapes: whether all sizes follow `config` alone: those of the longest prompts, and as many as there may
            be.

    Attributes:
        slots: the sample in each slot, None in a free one.
        lengths: number of tokens in the KV cache of each slot.
        cache_length: number of tokens for which each slot has room.
        prefill_shape: number of prompts that are prefilled together, and the length to which they are padded.
        prefilled: requests that were prefilled last.
        paused: samples that wait for a response.
        swapped: number of tokens in the KV cache of each sample that is begun but in no slot.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        num_samples: Sequence[int],
        config: RolloutConfig,
        *,
        resizes: bool = True,
        max_num_seqs: int | None = None,
        fixed_shapes: bool = False,
    ):
        self.config, self.prompt_lengths, self.resizes = config, prompt_lengths, resizes and not fixed_shapes
        self.samples = [Sample(request, n) for request, count in enumerate(num_samples) for n in range(count)]
        self.waiting = deque(self.samples)
        self._longest_prompt = longest = config.max_prompt_length if fixed_shapes else max(prompt_lengths, default=1)
        rows = PREFILL_BATCH if fixed_shapes else min(PREFILL_BATCH, power_of_two(len(prompt_lengths)))
        self.prefill_shape = rows, length_bucket(longest, smallest=16)
        self.prefilled = range(0)
        slots = config.slots if fixed_shapes else min(config.slots, power_of_two(len(self.samples)))
        self.slots: list[Sample | None] = [None] * slots
        self.lengths = np.zeros(len(self.slots), np.int64)
        self.cache_length = self._cache_size(longest, len(self.slots))
        self.paused: set[Sample] = set()
        self.swapped: dict[Sample, int] = {}
        self.max_num_seqs = max(len(self.slots), max_num_seqs or 0)
        self._ready: deque[Sample] = deque()

    @property
    def unfinished(self) -> bool:
        """Whether a sample waits or runs."""
        return bool(self.waiting or self.running or self.swapped)

    @property
    def stalled(self) -> bool:
        """Whether nothing can be done before a response comes."""
        return not (self.active or self.can_admit or self._ready)

    @property
    def running(self) -> dict[int, Sample]:
        """Sample of each slot in use."""
        return {slot: sample for slot, sample in enumerate(self.slots) if sample is not None}

    @property
    def active(self) -> dict[int, Sample]:
        """Sample of each slot that is being decoded: not one that waits for a response."""
        return {slot: sample for slot, sample in self.running.items() if sample not in self.paused}

    @property
    def free(self) -> list[int]:
        """Slots not in use."""
        return [slot for slot, sample in enumerate(self.slots) if sample is None]

    @property
    def finished(self) -> int:
        """Number of finished samples."""
        return len(self.samples) - len(self.waiting) - self.num_live

    @property
    def num_live(self) -> int:
        """Number of samples that are begun and not finished."""
        return len(self.running) + len(self.swapped)

    @property
    def can_admit(self) -> bool:
        """Whether a sample waits, may begin, and a slot is free."""
        return bool(self.waiting and self.free and self.num_live < self.max_num_seqs)

    @property
    def longest_cache(self) -> int:
        """Number of tokens for which each slot has room once a sample is as long as it may be."""
        return self._cache_size(self._longest_sample, len(self.slots))

    @property
    def _longest_sample(self) -> int:
        return self._longest_prompt + self.config.max_new_tokens

    def next_prefill(self) -> range:
        """Return the requests to prefill before `admit`: none while one that was prefilled last has samples waiting."""
        first = self.waiting[0].request
        if first in self.prefilled:
            return range(0)
        self.prefilled = range(first, min(first + self.prefill_shape[0], len(self.prompt_lengths)))
        return self.prefilled

    def admit(self) -> list[Admission]:
        """Move waiting samples of the prefilled requests to free slots."""
        admitted = []
        for slot in self.free[: self.max_num_seqs - self.num_live]:
            if self.waiting and self.waiting[0].request in self.prefilled:
                sample = self.slots[slot] = self.waiting.popleft()
                # One less than the prompt: `update` counts the first token, which is not in the cache yet.
                self.lengths[slot] = self.prompt_lengths[sample.request] - 1
                admitted.append(Admission(slot, self.prefilled.index(sample.request), sample))
        return admitted

    def update(self, new_tokens: np.ndarray, finished: Iterable[int] = ()) -> None:
        """Count the tokens that each slot has drawn, int [S], and free the slots of `finished` samples."""
        self.lengths += new_tokens
        for slot in finished:
            self.slots[slot] = None

    def pause(self, sample: Sample) -> None:
        """Let a running sample wait for a response."""
        self.paused.add(sample)

    def slot_of(self, sample: Sample) -> int:
        """Return the slot of a running sample."""
        return self.slots.index(sample)

    def resume(self, sample: Sample, appended: int) -> None:
        """Let a sample that waited go on after so many appended tokens, as soon as it has a slot."""
        self.paused.remove(sample)
        if sample in self.swapped:
            self.swapped[sample] += appended
            self._ready.append(sample)
        else:
            self.lengths[self.slot_of(sample)] += appended

    def finish(self, sample: Sample) -> None:
        """Remove a sample that has ended."""
        self.paused.remove(sample)
        if self.swapped.pop(sample, None) is None:
            self.slots[self.slot_of(sample)] = None

    def swap_out(self) -> dict[int, Sample]:
        """Take paused samples out of the slots that others could use; return them by slot."""
        others = len(self._ready) + min(len(self.waiting), self.max_num_seqs - self.num_live)
        paused = [(slot, sample) for slot, sample in self.running.items() if sample in self.paused]
        leaving = dict(paused[: max(others - len(self.free), 0)])
        for slot, sample in leaving.items():
            self.swapped[sample], self.slots[slot] = int(self.lengths[slot]), None
        return leaving

    def swap_in(self) -> dict[int, Sample]:
        """Give free slots to swapped samples that can go on; return them by slot."""
        returning = {slot: self._ready.popleft() for slot in self.free[: len(self._ready)]}
        for slot, sample in returning.items():
            self.slots[slot], self.lengths[slot] = sample, self.swapped.pop(sample)
        return returning

    def resize(self) -> np.ndarray | None:
        """Fit the KV cache to the longest running sample and the next chunk, and the batch to the samples left.

        Once no sample waits, each call shrinks the batch to its next smaller size if that holds all running samples.
        Returns the indices of the slots that stay, in their new order, or None when neither size changes.
        """
        if not self.resizes:
            return None
        running, size = list(self.running), len(self.slots)
        smaller = smaller_batch(size)
        if not self.waiting and max(len(running), MIN_SLOTS) <= smaller:
            size = smaller
        length = max(self.cache_length, self._cache_size(int(self.lengths[running].max()), size))
        if (size, length) == (len(self.slots), self.cache_length):
            return None
        indices = np.array((running + self.free)[:size] if size < len(self.slots) else range(size))
        self.slots, self.lengths = [self.slots[slot] for slot in indices], self.lengths[indices]
        self.cache_length = length
        return indices

    def _cache_size(self, length: int, slots: int) -> int:
        """Return the size of the KV cache in tokens per slot for `length` tokens and the next chunk's steps.

        It is a power of two, of at least `MIN_CACHE_TOKENS` over all slots, unless the longest possible sample needs
        less. No prompt with its completion is longer than that, so a chunk draws no token beyond it. A cache that is
        not resized has the bucket of that sample.
        """
        longest = power_of_two(self._longest_sample)
        needed = max(power_of_two(length + self.config.decode_chunk), MIN_CACHE_TOKENS // power_of_two(slots))
        size = min(max(needed, SMALLEST_BLOCK), max(longest, MIN_CACHE_LENGTH))
        size = size if self.resizes else length_bucket(self._longest_sample, SMALLEST_BLOCK)
        return min(size, self.config.kv_cache_size or size)
