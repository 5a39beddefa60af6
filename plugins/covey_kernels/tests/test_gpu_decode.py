"""The decode kernel for GPUs against attention in float64, in as many parts as few or many slots have."""

import jax.numpy as jnp
import numpy as np
import pytest

from covey_kernels import gpu_decode

SLOTS, KV_HEADS, GROUP, TIME, WIDTH = 2, 2, 2, 256, 16


@pytest.mark.parametrize(("programs", "parts"), [(4, 1), (8, 2), (256, 8)])
def test_parts_are_combined_to_attention_over_the_whole(
    monkeypatch: pytest.MonkeyPatch, programs: int, parts: int
) -> None:
    monkeypatch.setattr(gpu_decode, "PROGRAMS", programs)
    grids, call = [], gpu_decode.pl.pallas_call
    monkeypatch.setattr(gpu_decode.pl, "pallas_call", lambda *a, **k: grids.append(k["grid"]) or call(*a, **k))
    rng = np.random.default_rng(0)
    q, keys, values = (rng.normal(size=(SLOTS, KV_HEADS, n, WIDTH)).astype(np.float32) for n in (GROUP, TIME, TIME))
    start, end = np.array([0, 70]), np.array([5, 251])
    tables = gpu_decode.decode_tables(jnp.asarray(start), jnp.asarray(end), TIME)
    got = gpu_decode.decode(*map(jnp.asarray, (q, keys, values)), tables, 5.0, True)
    assert grids == [(SLOTS, KV_HEADS, parts)]
    scores = 5.0 * np.tanh(np.einsum("skgw,sktw->skgt", q.astype(np.float64), keys) / 5.0)
    seen = (np.arange(TIME) >= start[:, None]) & (np.arange(TIME) < end[:, None])
    weights = np.where(seen[:, None, None], np.exp(scores), 0.0)
    want = np.einsum("skgt,sktw->skgw", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(got, want, atol=2e-6)
