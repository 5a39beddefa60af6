"""Values of states and scores of whole completions, on the same rows as the log-probs.

The value of a scored token is the critic's for the state that it was sampled from: the value head applied to the hidden
state that predicts the token. A reward model reads the hidden state of a completion's *last* token, which our rows
never feed; so each completion gets one more token before packing, and the score is the value of that token's state.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from covey.errors import DataError
from covey.losses.logprobs import gather_hidden
from covey.losses.policy import weighted_mean_sums
from covey.packing.rows import Rows
from covey.types import Completion, FinishReason, Group, MetricSums


class ValueInputs(NamedTuple):
    """Inputs of the critic's loss besides the rows: each [R, M] float32, 0 at padding, NumPy or JAX.

    Attributes:
        returns: targets of the values.
        old_values: values of the critic at the rollout.
        weight: weight of the token in the sum; positive exactly where the token is in the loss and its completion was
            scored.
    """

    returns: Float[Any, "R M"]
    old_values: Float[Any, "R M"]
    weight: Float[Any, "R M"]


def row_values(graph: Any, params: Any, rows: Rows) -> Float[Array, "R M"]:
    """Compute the value of the state that each scored token was sampled from, float32; 0 at padding.

    Args:
        graph, params: a `ValueModel` as `nnx.split` returns it.
    """
    model = nnx.merge(graph, params)
    return jnp.where(rows.scored, model.values(gather_hidden(model.decoder, rows)), 0.0)


def value_loss(
    values: Float[Array, "R M"],
    old_values: Float[Array, "R M"],
    returns: Float[Array, "R M"],
    weight: Float[Array, "R M"],
    clip: float,
) -> tuple[Float[Array, ""], MetricSums]:
    """Compute Σ weight · ½ max((v − R)², (v_c − R)²), v_c = v clipped to v_old ± clip (Schulman et al., 2017, as in
    their code; Huang et al., 2022, detail 9).

    Where the two are equal, also on the bound, the gradient is the unclipped one.

    Args:
        values: values of the critic; differentiable.
        old_values, returns, weight: see `ValueInputs`.
        clip: clip range; 0 turns clipping off.

    Returns:
        The sum, to be divided by the step's Σ weight, and its part of the metrics `value_loss`, `value_mean` and
        `value_clip_ratio`: the fraction of tokens whose loss is the clipped one and so passes no gradient.
    """
    error = jnp.square(values - returns)
    clipped_values = jnp.clip(values, old_values - clip, old_values + clip) if clip else values
    clipped_error = jnp.square(clipped_values - returns)
    is_clipped = clipped_error > error
    loss = 0.5 * jnp.where(is_clipped, clipped_error, error)
    means = {"value_loss": loss, "value_mean": values, "value_clip_ratio": is_clipped.astype(jnp.float32)}
    metric_sums: MetricSums = {name: weighted_mean_sums(value, weight) for name, value in means.items()}
    return jnp.sum(weight * loss), jax.lax.stop_gradient(metric_sums)


def explained_variance(
    values: Sequence[np.ndarray],
    returns: Sequence[np.ndarray],
    total: Callable[[np.ndarray], np.ndarray] = lambda sums: sums,
) -> float:
    """Compute 1 − Var(R − v) / Var(R) over all tokens that the critic was trained on in a step; NaN when all returns
    are equal.

    Args:
        values: values of the critic, one array per completion.
        returns: returns of the same tokens.
        total: adds the sums of other processes, which have other tokens, to the sums of this process.

    >>> explained_variance([np.array([1.0, 2.0])], [np.array([1.0, 3.0])])
    0.75
    """
    v, r = (np.concatenate([*x, np.zeros(0)]).astype(np.float64) for x in (values, returns))
    errors = r - v
    count, *sums = total(np.array([len(r), r.sum(), errors.sum()]))
    if not count:
        return float("nan")
    of_returns, of_errors = (((x - s / count) ** 2).sum() for x, s in zip((r, errors), sums, strict=True))
    of_returns, of_errors = total(np.array([of_returns, of_errors])) / count
    return float(1 - of_errors / of_returns) if of_returns else float("nan")


def groups_to_score(prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> list[Group]:
    """Build groups in which the value of each completion's last token is its score.

    Args:
        prompt_ids: prompt of each completion; consecutive completions with equal prompts share it in a row.
        completion_ids: one list of tokens per completion, its stop token included; an empty one is scored at the end
            of its prompt.

    Raises:
        DataError: there are more prompts or more completions, or a prompt and its completion are both empty.
    """
    if len(prompt_ids) != len(completion_ids):
        raise DataError(f"{len(prompt_ids)} prompts for {len(completion_ids)} completions", want="one a completion")
    for number, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True), 1):
        if len(prompt) + len(completion) == 0:
            raise DataError(f"sample {number} has neither prompt nor completion", want="a token to score")
    pairs = [(tuple(map(int, p)), c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
    return [
        Group("", np.array(prompt, np.int32), tuple(_append_dummy_token(c) for _, c in same))
        for prompt, same in groupby(pairs, key=lambda pair: pair[0])
    ]


def _append_dummy_token(tokens: Sequence[int]) -> Completion:
    """Return a completion of `tokens` and one more, which is never fed and may be any token."""
    none = np.zeros(0, np.float32)
    return Completion(np.append(np.asarray(tokens, np.int32), np.int32(0)), none, none, FinishReason.STOP)
