"""Sizes of the decode batch of a rollout: on a CPU batch and cache follow the samples, and each size is a program."""

from covey.sampling.lengths import smaller_batch
from covey.sampling.scheduler import MIN_SLOTS, Scheduler


def num_batch_sizes(scheduler: Scheduler) -> int:
    """Return how many sizes of batch and cache a rollout may decode with: those of a batch that shrinks as samples
    finish, and each doubling of its cache.

    >>> from covey.config.schema import RolloutConfig
    >>> num_batch_sizes(Scheduler([4], [64], RolloutConfig(slots=64, max_new_tokens=16)))  # 64 48 32 24 16 8 4
    7
    """
    if not scheduler.resizes:
        return 1
    sizes, slots = 1, len(scheduler.slots)
    while (slots := smaller_batch(slots)) >= MIN_SLOTS:
        sizes += 1
    doublings = (scheduler.longest_cache // scheduler.cache_length).bit_length() - 1
    return sizes + doublings
