"""Agreement of sampler and trainer on given completions: how many of their tokens would a forward of the model over
whole sequences, with the noise that drew them, have drawn too? Training measures the same in its updates, as
`sampling/token_agreement`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from covey.config.schema import SamplingConfig
from covey.errors import CoveyError
from covey.losses.logprobs import token_logps
from covey.models.decoder import Decoder
from covey.packing.rows import pack, rows_at_a_time, scatter_to_rows, split_micro_batches
from covey.parallel.arrays import mesh_of, put_rows
from covey.rl.batches import token_keys_of
from covey.rl.step_data import sampled_mask, table_of
from covey.sampling.logits import SamplingParams
from covey.types import Group

MAX_TOKENS = 1024
"""Approximate number of tokens that are computed at a time."""


class Agreement(NamedTuple):
    """Number of tokens that sampler and trainer agree on, and number of all that the sampler drew."""

    agreed: int
    drawn: int

    @property
    def share(self) -> float:
        """Share of the tokens; 1 without tokens."""
        return self.agreed / self.drawn if self.drawn else 1.0


def token_agreement(model: Decoder, groups: Sequence[Group], config: SamplingConfig) -> Agreement:
    """Count the tokens of `groups` that `model` would have drawn too.

    Args:
        model: the trainer's model.
        groups: completions of an engine.
        config: temperature and truncation of that engine.

    Raises:
        CoveyError: a completion has no random key, because another engine drew it.
    """
    rows = pack(groups, max_tokens=MAX_TOKENS)
    completions = [c for group in groups for c in group.completions]
    of_completions = table_of(groups).keys
    if not of_completions.any(1).all():
        raise CoveyError("a completion has no random key", want="completions of Covey's own engine")
    keys = token_keys_of(rows, of_completions, scatter_to_rows(rows, list(map(sampled_mask, completions))))
    graph, params = nnx.split(model)
    sampling_params = SamplingParams.from_config(config)
    score = jax.jit(partial(token_logps, graph, temperature=config.temperature, sampling_params=sampling_params))
    agreed = 0
    for part in split_micro_batches((rows, keys), rows_at_a_time(rows, mesh_of(params), MAX_TOKENS)):
        of_part, part_keys = put_rows(part, params)
        agreed += int(score(params, of_part, keys=part_keys).agreed.sum())
    return Agreement(agreed, int(np.count_nonzero(keys.any(-1))))
