"""Log-probs of the tokens of a text, and of the most likely tokens at each place, by the forward pass of training."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from covey.losses.logprobs import gather_hidden
from covey.models.decoder import Decoder
from covey.models.dtypes import operand_type, round_kernels
from covey.packing.rows import Rows, pack
from covey.parallel import processes
from covey.parallel.arrays import rows_placement
from covey.types import Completion, FinishReason, Group

POSITIONS = 64
"""Number of places whose logits exist at one time."""


class TopLogps(NamedTuple):
    """Log-probs at temperature 1, in nats. `logps` and `top` come from the same array: the most likely token has the
    same number in both.

    Attributes:
        logps: log-prob of each token but the first.
        ids: most likely tokens at these places, in falling order.
        top: their log-probs.
    """

    logps: Float[Any, "n"]
    ids: Int[Any, "n k"]
    top: Float[Any, "n k"]


class TopScorer:
    """Compute `TopLogps` of texts.

    Args:
        model: the model; weights are passed to each call.
        count: number of most likely tokens; at most the vocabulary.
    """

    def __init__(self, model: Decoder, count: int):
        count = min(count, model.config.vocab_size)
        self._operand_type = operand_type(model)
        self._score = jax.jit(partial(top_logps, nnx.split(model)[0], count))

    def __call__(self, params: Any, tokens: Int[np.ndarray, "n"]) -> TopLogps:
        """Return the scores of a text of at least two tokens, which is computed alone: they depend on nothing else."""
        none = np.zeros(0, np.float32)
        rows = pack([Group("", tokens[:1], (Completion(tokens[1:], none, none, FinishReason.STOP),))])
        placed = processes.here().put_host(rows, rows_placement(params))
        scores = jax.device_get(self._score(round_kernels(params, self._operand_type), placed))
        return TopLogps(*(x[: len(tokens) - 1] for x in scores))


def top_logps(graph: Any, count: int, params: Any, rows: Rows) -> TopLogps:
    """Compute the scores of the scored tokens of one row."""
    model = nnx.merge(graph, params)

    def score(place: tuple[Array, Array]) -> TopLogps:
        logps = jax.nn.log_softmax(model.logits(place[0]).astype(jnp.float32))
        top, ids = jax.lax.top_k(logps, count)
        return TopLogps(logps[place[1]], ids, top)

    scores: TopLogps = jax.lax.map(score, (gather_hidden(model, rows)[0], rows.target[0]), batch_size=POSITIONS)
    return scores
