"""Numeric helpers under the names that users of Tunix and TRL know, for scripts and losses of their own.

Pure functions. Covey's own loop works on rows instead (`packing.rows`, `losses.logprobs`); these serve batches of
padded samples [B, T] and agree with it. K is `logits_to_keep`: the scored tokens at the end of each sample.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from covey.errors import RewardError
from covey.losses.advantages import group_zscore
from covey.losses.logprobs import Head, chunked_scores
from covey.models.attention import masked
from covey.models.decoder import Decoder

COLUMNS = 64
"""Scored columns are filled up to a multiple of this, so that the log-softmax works on whole chunks."""


def selective_log_softmax(logits: Float[Array, "... V"], index: Int[Array, "..."]) -> Float[Array, "..."]:
    """Log-softmax of `logits` at `index` alone, in float32; NaN where the index lies outside the vocabulary.

    Args:
        logits: already divided by the temperature.
        index: token ids.

    >>> logits = np.log(np.array([[0.25, 0.25, 0.5], [0.125, 0.75, 0.125]], np.float32))
    >>> np.exp(selective_log_softmax(logits, np.array([2, 1]))).round(3).tolist()
    [0.5, 0.75]
    """
    logits = jnp.asarray(logits, jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.asarray(index)[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def get_per_token_logps(
    model: Decoder,
    input_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attn_mask: Bool[Array, "B T T"],
    logits_to_keep: int,
    temperature: float = 1.0,
) -> Float[Array, "B K"]:
    """Log-probs of each sample's last `logits_to_keep` tokens, the log-softmax taken of logits / temperature.

    The array [T, V] is never made: see `losses.logprobs`. What comes out at padding means nothing; mask it.

    Args:
        model: hidden states at [B, T] come from it.
        input_tokens: prompt and completion, padded on either side (prompts left, completions right, as a rule).
        positions: of the tokens, see `build_positions_from_mask`.
        attn_mask: who may look at whom, see `make_causal_attn_mask`.
        logits_to_keep: K, 1 to T − 1: the first token has nothing before it.
        temperature: the rollout's; 0 (greedy) counts as 1.
    """
    length = input_tokens.shape[1]
    assert 1 <= logits_to_keep < length, f"{logits_to_keep} log-probs of {length} tokens: the first has none"
    hidden, _ = model(input_tokens, positions, masked(attn_mask, positions))
    width = -(-logits_to_keep // COLUMNS) * COLUMNS
    before = pad_to_length(hidden[:, length - logits_to_keep - 1 : -1], width, axis=1)
    target = pad_to_length(input_tokens[:, length - logits_to_keep :], width)
    head = Head(float(temperature) or 1.0, model.config.final_softcap, model.dtype)
    logps, _ = chunked_scores(head, model.head_weight, before, target, jnp.asarray(logits_to_keep))
    return logps[:, :logits_to_keep]


def make_completion_mask(completion_ids: Int[Array, "B T"], eos_tok: int | Sequence[int]) -> Int[Array, "B T"]:
    """1 up to and including the first stop token, 0 behind it; all 1 where there is none.

    The stop token counts, so that stopping is trained; padding with the stop token's own id does not.

    Args:
        completion_ids: right-padded completions.
        eos_tok: every token that ends an answer, `Tokenizer.stop_ids`; one alone will do.

    >>> make_completion_mask(np.array([[42, 17, 9, 2, 0, 0]]), eos_tok=2).tolist()
    [[1, 1, 1, 1, 0, 0]]
    >>> make_completion_mask(np.array([[42, 7, 9, 2], [1, 3, 5, 8]]), eos_tok=(2, 7)).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 1]]
    """
    ends = jnp.isin(jnp.asarray(completion_ids), jnp.asarray(eos_tok)).astype(jnp.int32)
    return (jnp.cumsum(ends, axis=-1) - ends == 0).astype(jnp.int32)


def make_causal_attn_mask(input_mask: Bool[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where the first token may look at the second: itself and those before it, padding left out.

    >>> make_causal_attn_mask(np.array([[0, 1, 1]])).astype(int).tolist()
    [[[0, 0, 0], [0, 1, 0], [0, 1, 1]]]
    """
    real = jnp.asarray(input_mask).astype(bool)
    return jnp.tril(jnp.ones((real.shape[-1],) * 2, bool)) & real[..., None, :]


def build_positions_from_mask(input_mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's number among the tokens that are not padding, from 0; padding in front gets 0.

    >>> build_positions_from_mask(np.array([[0, 0, 1, 1, 1, 0]])).tolist()
    [[0, 0, 0, 1, 2, 2]]
    """
    return jnp.maximum(jnp.cumsum(jnp.asarray(input_mask).astype(jnp.int32), axis=-1) - 1, 0)


def pad_to_length(x: Array, target_length: int, pad_value: float = 0, left: bool = False, axis: int = -1) -> Array:
    """`x` filled up with `pad_value` to `target_length` along `axis`; as it is where it is that long or longer.

    >>> pad_to_length(np.array([[5, 6]]), 4, pad_value=9, left=True).tolist()
    [[9, 9, 5, 6]]
    """
    x = jnp.asarray(x)
    missing = max(target_length - x.shape[axis], 0)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (missing, 0) if left else (0, missing)
    return jnp.pad(x, widths, constant_values=pad_value)


def compute_advantages(rewards: Float[np.ndarray, "B"], num_generations: int) -> Float[np.ndarray, "B"]:
    """Each sample's reward against the `num_generations` samples of its prompt, which stand side by side: (r − mean) /
    (std + 1e-4), std with ddof 1 (Shao et al., 2024). See `losses.advantages.group_zscore`.

    Raises:
        RewardError: rewards that are no whole number of groups.

    >>> compute_advantages(np.array([1.0, 0.0, 3.0, 3.0]), num_generations=2).round(3).tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    flat = np.asarray(rewards, np.float64)
    if flat.ndim != 1 or flat.size % num_generations:
        what = f"rewards of shape {flat.shape} for groups of {num_generations}"
        raise RewardError(what, want="one number a sample, and a whole number of groups")
    return group_zscore(flat.reshape(-1, num_generations)).reshape(-1)
