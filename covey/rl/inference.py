"""Log-probs of given completions under a model that is not being trained at the moment: the reference, or the old
policy.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from covey.parallel.placement import put_rows
from covey.rl.logprobs import row_scores
from covey.rl.rows import Rows, micro_batches, unpack
from covey.train.trainer import compiler_options


class RowScorer:
    """Scores rows slice by slice.

    Args:
        graph: the decoder's graph; weights come with each call.
        temperature: of the log-softmax.
    """

    def __init__(self, graph: Any, temperature: float):
        self._score = jax.jit(
            lambda params, rows: row_scores(graph, params, rows, temperature).logps, compiler_options=compiler_options()
        )

    def __call__(self, params: Any, rows: Rows, lengths: Sequence[int], size: int) -> list[np.ndarray]:
        """float32 log-probs, one array a completion, `lengths[i]` long; `size` rows are computed at a time."""
        parts = [np.asarray(self._score(params, put_rows(part, params))) for part in micro_batches(rows, size)]
        return unpack(rows, np.concatenate(parts)[: len(rows.tokens)], lengths)
