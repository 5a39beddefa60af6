"""Sizes of buffers."""

from covey.sampling.lengths import length_bucket


def test_buckets_are_few_and_close() -> None:
    sizes = {length_bucket(n) for n in range(1, 2049)}
    assert len(sizes) <= 10
    assert all(n <= length_bucket(n) for n in range(1, 2049))
    assert all(length_bucket(n) < 1.5 * n for n in range(257, 2049))
