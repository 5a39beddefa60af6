"""Log-probs of a text and of the most likely tokens, against the log-softmax of whole logits in float64."""

from typing import Any

import numpy as np
import pytest
from flax import nnx

from covey_serve.top_logps import TopScorer


@pytest.mark.parametrize(("length", "count"), [(2, 3), (70, 400)])
def test_numbers_are_those_of_whole_logits(decoder: Any, logits: Any, length: int, count: int) -> None:
    model = decoder(lora=4)
    tokens = np.random.default_rng(0).integers(0, 300, length).astype(np.int32)
    found = TopScorer(model, count)(nnx.split(model)[1], tokens)
    whole = logits(model, tokens[None])[0, :-1].astype(np.float64)
    logps = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
    order = np.argsort(-logps, axis=-1, kind="stable")[:, :count]
    assert found.ids.shape == found.top.shape == (length - 1, min(count, 300))  # all of a smaller vocabulary
    np.testing.assert_allclose(found.logps, logps[np.arange(length - 1), tokens[1:]], atol=2e-5)
    np.testing.assert_allclose(found.top, np.take_along_axis(logps, order, -1), atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(logps, found.ids, -1), found.top, atol=2e-5)
    own = found.ids == tokens[1:, None]
    assert (found.top[own] == found.logps[own.any(-1)]).all()  # one array: equal to the bit
