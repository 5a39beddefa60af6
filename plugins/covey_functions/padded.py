"""Low-level API for custom scripts and losses: pure functions on padded samples [B, T], exported by `covey`.

They have the names and arguments of Tunix (`tunix.rl.common`) and TRL; `docs/low-level.md` lists them. Covey's own loop
works on rows instead (`packing.rows`, `losses.logprobs`) and gives the same numbers. K is `logits_to_keep`: the scored
tokens at the end of each sample.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from covey.errors import RewardError
from covey.losses.advantages import group_zscore
from covey.losses.logprobs import HeadConfig, chunked_logps
from covey.models.attention import masked_attention
from covey.models.decoder import Decoder

COLUMNS = 64
"""Multiple to which scored columns are padded, so that the log-softmax works on whole chunks."""


def selective_log_softmax(logits: Float[Array, "... V"], index: Int[Array, "..."]) -> Float[Array, "..."]:
    """Compute the log-softmax of `logits` at `index` alone, in float32; NaN where the index is outside the vocabulary.

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
    """Compute log-probs of each sample's last `logits_to_keep` tokens, by the log-softmax of logits / temperature.

    The array [T, V] is never made: see `losses.logprobs`. Results at padding are meaningless; mask them.

    Args:
        model: computes the hidden states at [B, T].
        input_tokens: prompt and completion, padded on either side (prompts left, completions right, as a rule).
        positions: positions of the tokens, see `build_positions_from_mask`.
        attn_mask: True where a token may attend to another, see `make_causal_attn_mask`.
        logits_to_keep: K, 1 to T − 1: the first token has no log-prob.
        temperature: the rollout's; 0 (greedy) counts as 1.
    """
    length = input_tokens.shape[1]
    assert 1 <= logits_to_keep < length, f"{logits_to_keep} log-probs of {length} tokens: the first has none"
    hidden, _ = model(input_tokens, positions, masked_attention(attn_mask, positions))
    width = -(-logits_to_keep // COLUMNS) * COLUMNS
    before = pad_to_length(hidden[:, length - logits_to_keep - 1 : -1], width, axis=1)
    target = pad_to_length(input_tokens[:, length - logits_to_keep :], width)
    head = HeadConfig.of(model, temperature)
    logps, _ = chunked_logps(head, model.head_weight, before, target, jnp.asarray(logits_to_keep))
    return logps[:, :logits_to_keep]


def make_completion_mask(completion_ids: Int[Array, "B T"], eos_tok: int | Sequence[int]) -> Int[Array, "B T"]:
    """Return 1 up to and including the first stop token, 0 after it; all 1 where there is none.

    The stop token is included, so that stopping is trained; padding with the stop token's id is not.

    Args:
        completion_ids: right-padded completions.
        eos_tok: the tokens that end a completion, `Tokenizer.stop_ids`, or a single one.

    >>> make_completion_mask(np.array([[42, 17, 9, 2, 0, 0]]), eos_tok=2).tolist()
    [[1, 1, 1, 1, 0, 0]]
    >>> make_completion_mask(np.array([[42, 7, 9, 2], [1, 3, 5, 8]]), eos_tok=(2, 7)).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 1]]
    """
    ends = jnp.isin(jnp.asarray(completion_ids), jnp.asarray(eos_tok)).astype(jnp.int32)
    return (jnp.cumsum(ends, axis=-1) - ends == 0).astype(jnp.int32)


def make_causal_attn_mask(input_mask: Bool[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Return True where a token may attend to another: itself and those before it, padding excluded.

    >>> make_causal_attn_mask(np.array([[0, 1, 1]])).astype(int).tolist()
    [[[0, 0, 0], [0, 1, 0], [0, 1, 1]]]
    """
    real = jnp.asarray(input_mask).astype(bool)
    return jnp.tril(jnp.ones((real.shape[-1],) * 2, bool)) & real[..., None, :]


def build_positions_from_mask(input_mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Number the tokens that are not padding from 0; padding on the left gets 0.

    >>> build_positions_from_mask(np.array([[0, 0, 1, 1, 1, 0]])).tolist()
    [[0, 0, 0, 1, 2, 2]]
    """
    return jnp.maximum(jnp.cumsum(jnp.asarray(input_mask).astype(jnp.int32), axis=-1) - 1, 0)


def pad_to_length(x: Array, target_length: int, pad_value: float = 0, left: bool = False, axis: int = -1) -> Array:
    """Pad `x` with `pad_value` to `target_length` along `axis`; an `x` that is that long or longer is unchanged.

    >>> pad_to_length(np.array([[5, 6]]), 4, pad_value=9, left=True).tolist()
    [[9, 9, 5, 6]]
    """
    x = jnp.asarray(x)
    missing = max(target_length - x.shape[axis], 0)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (missing, 0) if left else (0, missing)
    return jnp.pad(x, widths, constant_values=pad_value)


def compute_advantages(rewards: Float[np.ndarray, "B"], num_generations: int) -> Float[np.ndarray, "B"]:
    """Compute (r − mean) / (std + 1e-4) of each reward in its group, std with ddof 1 (Shao et al., 2024). The
    `num_generations` completions of a prompt are adjacent. See `losses.advantages.group_zscore`.

    Raises:
        RewardError: the rewards are not a whole number of groups.

    >>> compute_advantages(np.array([1.0, 0.0, 3.0, 3.0]), num_generations=2).round(3).tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    flat = np.asarray(rewards, np.float64)
    if flat.ndim != 1 or flat.size % num_generations:
        raise RewardError(
            f"rewards of shape {flat.shape} for groups of {num_generations}",
            want="one number a sample, and a whole number of groups",
        )
    return group_zscore(flat.reshape(-1, num_generations)).reshape(-1)
