"""Count the work that every implementation must do: flops and bytes of real tokens, from the model's shape.

A multiplication with its addition is two flops, and only products are counted: norms, softmax, rotations and the
optimizer are not. Every real token goes through every layer, a prompt once for its group; attention counts the pairs
that may see each other; the head counts where a token is scored. Padding, prompts fed again and layers computed again
in the backward pass are no work here: they are what a percentage of the peak is to show.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from covey.models.config import ModelConfig
from covey.types import Group

Span = tuple[int, int]
"""Consecutive tokens that are fed: the position of the first, and their number."""


class Flops(NamedTuple):
    """Flops of a forward pass."""

    projections: float
    adapters: float
    attention: float
    head: float


def spans(groups: Iterable[Group]) -> Iterator[Span]:
    """Return the tokens that must be fed to score all completions of `groups`: each prompt once, and each completion
    but its last token.
    """
    for group in groups:
        prompt = len(group.prompt_tokens)
        yield 0, prompt
        yield from ((prompt, max(len(c.tokens) - 1, 0)) for c in group.completions)


def forward(c: ModelConfig, groups: Sequence[Group], rank: int = 0) -> Flops:
    """Return the flops of the log-probs of every completion, with adapters of `rank` on all projections, if any."""
    tokens = sum(count for _, count in spans(groups))
    scored = sum(len(completion.tokens) for group in groups for completion in group.completions)
    return _flops(c, list(spans(groups)), tokens, scored, rank)


def prefill(c: ModelConfig, prompts: Iterable[int], rank: int = 0) -> float:
    """Return the flops of feeding prompts of these lengths, and of the logits after each."""
    fed = [(0, length) for length in prompts]
    return sum(_flops(c, fed, sum(length for _, length in fed), len(fed), rank))


def training(c: ModelConfig, groups: Sequence[Group], rank: int = 0) -> float:
    """Return the flops of the forward and the backward pass.

    A product whose both operands want a gradient costs twice as much backward. The base under adapters wants none:
    its kernels cost once, and of the first layer's inputs nobody asks the gradient.
    """
    work = forward(c, groups, rank)
    if not rank:
        return 3 * sum(work)
    tokens = sum(count for _, count in spans(groups))
    from_stream = [c.projection_shapes()[name] for name in ("q_proj", "k_proj", "v_proj")]
    unasked = 2 * tokens * sum(n_in * n_out + n_in * rank for n_in, n_out in from_stream)
    return 2 * (work.projections + work.head) + 3 * (work.adapters + work.attention) - unasked


def decoding(
    c: ModelConfig, fed: Sequence[Span], batch: float, rank: int = 0, itemsize: int = 4
) -> tuple[float, float]:
    """Return the flops and the bytes read to decode token after token, `batch` at a time with a copy of the weights.

    A step reads all weights once, and of the cache what its tokens may see.
    """
    tokens = sum(count for _, count in fed)
    flops = sum(_flops(c, fed, tokens, tokens, rank))
    read = tokens / batch * weights_in_products(c, rank) + 2 * c.num_kv_heads * c.head_dim * _pairs(c, fed)
    return flops, itemsize * read


def weights_in_products(c: ModelConfig, rank: int = 0) -> int:
    """Return the number of weights that one token is multiplied with: kernels, adapters and head."""
    return c.num_layers * (_in_kernels(c) + _in_adapters(c, rank)) + c.vocab_size * c.hidden_size


def _flops(c: ModelConfig, fed: Sequence[Span], tokens: int, scored: int, rank: int) -> Flops:
    return Flops(
        projections=2.0 * tokens * c.num_layers * _in_kernels(c),
        adapters=2.0 * tokens * c.num_layers * _in_adapters(c, rank),
        attention=4.0 * c.num_heads * c.head_dim * _pairs(c, fed),
        head=2.0 * scored * c.vocab_size * c.hidden_size,
    )


def _in_kernels(c: ModelConfig) -> int:
    return sum(n_in * n_out for n_in, n_out in c.projection_shapes().values())


def _in_adapters(c: ModelConfig, rank: int) -> int:
    return rank * sum(n_in + n_out for n_in, n_out in c.projection_shapes().values())


def _pairs(c: ModelConfig, fed: Iterable[Span]) -> int:
    """Return the number of pairs of query and key that attend to each other, over all layers."""
    seen = np.concatenate([np.arange(start + 1, start + count + 1) for start, count in fed] or [np.zeros(0, int)])
    windows = [c.window(layer) for layer in range(c.num_layers)]
    return sum(int((seen if window is None else np.minimum(seen, window)).sum()) for window in windows)
