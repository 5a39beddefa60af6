"""Limits on the lengths of a prompt and its completion, and sizes of the buffers for them."""

from covey.config.schema import RolloutConfig
from covey.errors import DataError, RecipeError

SMALLEST_BLOCK = 128
"""Number of positions in a block of the KV cache, unless the cache ends before."""


def check_length(size: int, config: RolloutConfig, name: str) -> None:
    """Refuse a prompt of `size` tokens that cannot be sampled; `name` is the prompt's in the error.

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
    """Refuse settings under which a prompt and its completion could exceed the model's `positions` tokens.

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
