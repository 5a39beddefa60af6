"""Sizes of buffers."""

from covey.sampling.lengths import block_lengths, length_bucket, smaller_batch


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


def test_batches_shrink_in_few_steps() -> None:
    sizes = [128]
    while sizes[-1] > 4:
        sizes.append(smaller_batch(sizes[-1]))
    assert sizes == [128, 96, 64, 48, 32, 24, 16, 8, 4]
