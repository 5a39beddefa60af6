"""Schedule samples onto slots: which prompts are prefilled next, which slot draws which sample, how large the batch is.

Samples are admitted in the order of their requests. A prompt is prefilled once, together with the next prompts, and
admitted to the slot of each of its samples. Free slots are refilled as long as samples wait; when none wait, the batch
shrinks with the samples that are left, from one size to the next. Batch and KV cache come in few sizes, so that few
programs are compiled: a decode step skips what the cache has room for but does not hold, so room costs only memory.

Sizes are fitted to the requests that wait when none is begun, and grow with later requests. Accelerators keep
batch and cache as they begin: a free slot costs them next to nothing, and a program minutes. There a request that does
not fit waits until none is begun. In a run of training, all sizes follow the settings there,
because evaluations have other numbers of prompts than steps.

The first functions hold the limits on the lengths of a prompt and its completion, and the sizes of buffers.

Plain Python without JAX: the device follows what is decided here (see `model_runner`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile
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


def check_length(size: int, config: RolloutConfig, name: str, limit: int | None = None) -> None:
    """Check that a prompt of `size` tokens can be sampled; `name` is its name in the error, and `limit` the
    limit of new tokens, by default `max_new_tokens`.

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
    needed = size + (limit or config.max_new_tokens)
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


def length_bucket(length: int, smallest: int = 64, halves_from: int = 256) -> int:
    """Round the length of a buffer up to a power of two from `smallest` on, or from `halves_from` on also to 1.5 times
    one.
    """
    size = smallest
    while size < length:
        half = size + size // 2
        if size >= halves_from and half >= length:
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


def block_lengths(length: int, smallest: int = SMALLEST_BLOCK) -> list[int]:
    """Divide `length` positions into blocks of at least `smallest`, a power of two, each as long as half of what is
    before it or less.

    >>> block_lengths(1024), block_lengths(150)
    ([128, 128, 128, 128, 256, 256], [128, 22])
    """
    lengths: list[int] = []
    while (start := sum(lengths)) < length:
        size = max(smallest, 1 << start.bit_length() >> 2)
        lengths.append(min(size, length - start))
    return lengths


class Sample(NamedTuple):
    """One completion to sample: the id of its request, and its number among the samples of the request."""

    request: int
    number: int


class Admission(NamedTuple):
    """A sample that enters the batch: its slot, and the row of its prompt among the prompts prefilled last."""

    slot: int
    row: int
    sample: Sample


class BatchRequirements(NamedTuple):
    """Requirements of a request on the whole batch: only requests with equal requirements run side by side.

    Attributes:
        pause_id: token at which slots halt, besides the stop tokens; None for none.
        is_async: whether responses may come later: no size may depend on the time at which they come.
        max_num_seqs: maximum number of samples that are begun and not finished; None for the number of slots. Those
            that wait for a response may be more than there are slots.
    """

    pause_id: int | None = None
    is_async: bool = False
    max_num_seqs: int | None = None


NO_REQUIREMENTS = BatchRequirements()
"""Requirements of a request without a responder."""


@dataclass
class Queued:
    """A request with samples that have not begun, from number `next` on."""

    prompt_length: int
    samples: int
    requirements: BatchRequirements
    next: int = 0


class Scheduler:
    """Assignment of samples to slots.

    Args:
        config: slots, decode chunk, maximum lengths, maximum size of the KV cache.
        may_resize: whether batch and cache may follow the samples; otherwise the cache has room for the longest at
            once.
        fixed_shapes: whether all sizes follow `config` alone: the longest prompts, and as many as there may be.

    Attributes:
        waiting: requests with samples that have not begun, by id; `num_waiting` is the number of these samples.
        requirements: requirements of the samples that are begun.
        slots: the sample in each slot, None in a free one.
        lengths: number of tokens in the KV cache of each slot.
        cache_length: number of tokens for which each slot has room.
        prefilled: requests that were prefilled last.
        paused: samples that wait for a response.
        swapped: number of tokens in the KV cache of each sample that is begun but in no slot.
        prefills_alone: whether each prompt is prefilled alone, padded to the bucket of its own length. With
            `fixed_shapes` no number of a sample then depends on other requests, and a short prompt costs little. The
            buckets are finer, because each prompt pays for its own padding.
    """

    def __init__(self, config: RolloutConfig, *, may_resize: bool = True, fixed_shapes: bool = False):
        self.config, self.fixed_shapes, self.may_resize = config, fixed_shapes, may_resize and not fixed_shapes
        self.waiting: dict[int, Queued] = {}
        self.requirements = NO_REQUIREMENTS
        self.slots: list[Sample | None] = []
        self.lengths, self.cache_length = np.zeros(0, np.int64), 0
        self.prefilled: list[int] = []
        self.paused: set[Sample] = set()
        self.swapped: dict[Sample, int] = {}
        self.prefills_alone = False
        self.num_waiting, self._longest_prompt, self._prefill_rows, self._is_fitted = 0, 1, 1, False

    @property
    def unfinished(self) -> bool:
        """Whether a sample waits or runs."""
        return bool(self.waiting or self.num_live)

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
    def num_live(self) -> int:
        """Number of samples that are begun and not finished."""
        return len(self.running) + len(self.swapped)

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of samples that are begun and not finished."""
        return max(len(self.slots), self.requirements.max_num_seqs or 0)

    @property
    def can_admit(self) -> bool:
        """Whether a sample waits, may begin, and a slot is free."""
        has_slot = bool(self.waiting and self.free and self.num_live < self.max_num_seqs)
        return has_slot and self._fits(self._first)

    @property
    def resizes(self) -> bool:
        """Whether batch and cache follow the samples."""
        return self.may_resize and not self.requirements.is_async

    @property
    def prefill_shape(self) -> tuple[int, int]:
        """Number of prompts that are prefilled together, and the length to which they are padded."""
        length = self.waiting[self._first].prompt_length if self.prefills_alone else self._longest_prompt
        return self._prefill_rows, length_bucket(length, smallest=16, halves_from=32 if self.prefills_alone else 256)

    @property
    def longest_cache(self) -> int:
        """Number of tokens for which each slot has room once a sample is as long as it may be."""
        return self._cache_size(self._longest_prompt + self.config.max_new_tokens, len(self.slots))

    @property
    def _first(self) -> int:
        """Id of the request from which the next sample begins."""
        return next(iter(self.waiting))

    def add(
        self, request: int, prompt_length: int, samples: int, requirements: BatchRequirements = NO_REQUIREMENTS
    ) -> None:
        """Let the samples of a request wait."""
        self._is_fitted = self._is_fitted and self.unfinished
        if request in self.prefilled:  # an earlier request with this id
            self.prefilled = []
        if samples:
            self.waiting[request] = Queued(prompt_length, samples, requirements)
            self.num_waiting += samples
        if self._is_fitted and self.resizes:
            self._longest_prompt = max(self._longest_prompt, prompt_length)

    def fit(self) -> bool:
        """Choose all sizes by the requests that wait, at the beginning and whenever none is begun and the first does
        not fit; return whether they were chosen.
        """
        if self.num_live or not self.waiting or (self._is_fitted and self._fits(self._first)):
            return False
        config, longest = self.config, max(queued.prompt_length for queued in self.waiting.values())
        self._is_fitted, self.prefilled, self.requirements = True, [], self.waiting[self._first].requirements
        self._longest_prompt = config.max_prompt_length if self.fixed_shapes else longest
        self._prefill_rows = self._wanted_rows
        slots = config.slots if self.fixed_shapes else self._wanted_slots
        self.slots, self.lengths = [None] * slots, np.zeros(slots, np.int64)
        self.cache_length = self._cache_size(self._longest_prompt, slots)
        return True

    @property
    def _wanted_rows(self) -> int:
        if self.prefills_alone:
            return 1
        return PREFILL_BATCH if self.fixed_shapes else min(PREFILL_BATCH, power_of_two(len(self.waiting)))

    @property
    def _wanted_slots(self) -> int:
        return min(self.config.slots, power_of_two(self.num_live + self.num_waiting))

    def _fits(self, request: int) -> bool:
        """Return whether a request may run together with the requests that are begun."""
        queued = self.waiting[request]
        return queued.requirements == self.requirements and (
            self.resizes or queued.prompt_length <= self._longest_prompt
        )

    def next_prefill(self) -> list[int]:
        """Return the requests to prefill before `admit`: none while one that was prefilled last has samples waiting."""
        if self._first in self.prefilled:
            return []
        self._prefill_rows = max(self._prefill_rows, self._wanted_rows)
        self.prefilled = list(islice(takewhile(self._fits, self.waiting), self._prefill_rows))
        return self.prefilled

    def admit(self) -> list[Admission]:
        """Move waiting samples of the prefilled requests to free slots."""
        admitted = []
        for slot in self.free[: self.max_num_seqs - self.num_live]:
            if not self.waiting or (request := self._first) not in self.prefilled:
                break
            queued = self.waiting[request]
            sample = self.slots[slot] = Sample(request, queued.next)
            # One less than the prompt: `update` counts the first token, which is not in the cache yet.
            self.lengths[slot] = queued.prompt_length - 1
            queued.next, self.num_waiting = queued.next + 1, self.num_waiting - 1
            if queued.next == queued.samples:
                del self.waiting[request]
            admitted.append(Admission(slot, self.prefilled.index(request), sample))
        return admitted

    def cancel(self, request: int) -> list[int]:
        """Remove all samples of a request; return the slots that they had."""
        if (queued := self.waiting.pop(request, None)) is not None:
            self.num_waiting -= queued.samples - queued.next
        slots = [slot for slot, sample in self.running.items() if sample.request == request]
        for slot in slots:
            self.slots[slot] = None
        return slots

    def update(self, new_tokens: np.ndarray, finished: Iterable[int] = ()) -> None:
        """Count the tokens that each slot has drawn, int [S], and free the slots of `finished` samples."""
        self.lengths += new_tokens
        for slot in finished:
            self.slots[slot] = None

    def resize(self) -> np.ndarray | None:
        """Fit the KV cache to the longest running sample and the next chunk, and the batch to the samples.

        While samples wait, the batch grows to hold them too, and the cache to the length of their prompts. Once none
        waits, each call shrinks the batch to its next smaller size if that holds all running samples.
        Return the old slot of each new slot's content, of running samples first if the batch shrinks; None when neither
        size changes.
        """
        if not self.resizes:
            return None
        running, size = list(self.running), len(self.slots)
        longest = int(self.lengths[running].max(initial=self._longest_prompt if self.waiting else 0))
        if self.waiting:
            size = max(size, self._wanted_slots)
        elif max(len(running), MIN_SLOTS) <= smaller_batch(size):
            size = smaller_batch(size)
        length = max(self.cache_length, self._cache_size(longest, size))
        if (size, length) == (len(self.slots), self.cache_length):
            return None
        old, self.cache_length = len(self.slots), length
        indices = (running + self.free)[:size] if size < old else [*range(old), *[0] * (size - old)]
        self.slots = [self.slots[slot] for slot in indices[:old]] + [None] * (size - old)
        self.lengths = self.lengths[indices]
        return np.array(indices)

    def _cache_size(self, length: int, slots: int) -> int:
        """Return the size of the KV cache in tokens per slot for `length` tokens and the next chunk's steps.

        It is a power of two, of at least `MIN_CACHE_TOKENS` over all slots, unless the longest possible sample needs
        less. No prompt with its completion is longer than that, so a chunk draws no token beyond it. A cache that is
        not resized has the bucket of that sample.
        """
        longest = self._longest_prompt + self.config.max_new_tokens
        needed = max(power_of_two(length + self.config.decode_chunk), MIN_CACHE_TOKENS // power_of_two(slots))
        size = min(max(needed, SMALLEST_BLOCK), max(power_of_two(longest), MIN_CACHE_LENGTH))
        size = size if self.resizes else length_bucket(longest, SMALLEST_BLOCK)
        return min(size, self.config.kv_cache_size or size)
