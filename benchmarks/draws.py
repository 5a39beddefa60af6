"""`python -m benchmarks.draws [--draws N]`: compare the frequencies of drawn tokens with the distribution that the
settings ask for, by the chi-square test.

The logits are random, of 300 tokens: three places in most blocks of the draw. The distribution is computed in float64
by sorting. Tokens that are expected less than five times are counted as one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats  # comes with jax

from benchmarks.common import machine, versions
from covey.sampling.logits import SamplingParams, draw, sample_keys, token_keys

SETTINGS = {
    "temperature 1": SamplingParams(),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top-k 20": SamplingParams(top_k=20),
    "min-p 0.1": SamplingParams(min_p=0.1),
    "all together": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1),
}
VOCABULARY, BATCH = 300, 20_000


def main(words: Sequence[str] | None = None) -> int:
    """Print a table and a line of JSON; end with 1 if a token was drawn that is cut."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draws", description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000_000, metavar="N", help="for each of the settings")
    draws = parser.parse_args(words).draws
    logits = np.random.default_rng(3).normal(scale=1.5, size=VOCABULARY).astype(np.float32)
    rows = []
    for name, settings in SETTINGS.items():
        counts, expected = frequencies(logits, settings, draws), distribution(logits, settings) * draws
        rows.append({"settings": name, "cut": int(counts[expected == 0].sum()), **chi_square(counts, expected)})
        print("{settings:28} p {p:.3f}, chi-square {chi_square} of {degrees}, cut tokens {cut}".format(**rows[-1]))
    facts = {"machine": machine(), "versions": versions()}
    print(json.dumps({"part": "draws", "draws": draws, **facts, "rows": rows}))
    return int(any(row["cut"] for row in rows))


def frequencies(logits: np.ndarray, settings: SamplingParams, draws: int) -> np.ndarray:
    """Return the number of draws of each token; a draw is the first token of a sample."""

    @partial(jax.jit, static_argnums=1)
    def drawn(keys: np.ndarray, settings: SamplingParams) -> jax.Array:
        return draw(jnp.broadcast_to(logits, (len(keys), VOCABULARY)), keys, settings)[0]

    counts = np.zeros(VOCABULARY, np.int64)
    for start in range(0, draws, BATCH):
        places = np.zeros((min(BATCH, draws - start), 3), np.uint32)
        places[:, 2] = start + np.arange(len(places))
        keys = token_keys(sample_keys(0, places), np.zeros(len(places), np.int32))
        counts += np.bincount(drawn(keys, settings), minlength=VOCABULARY)
    return counts


def distribution(logits: np.ndarray, settings: SamplingParams) -> np.ndarray:
    """Return the probabilities in float64: temperature, top-k, top-p, min-p in that order."""
    scaled = logits.astype(np.float64) / settings.temperature
    order = np.argsort(-scaled)[: settings.top_k or None]
    mass = np.exp(scaled[order] - scaled[order[0]])
    before = np.cumsum(mass) - mass
    mass = np.where((before < settings.top_p * mass.sum()) & (mass >= settings.min_p), mass, 0.0)
    probabilities = np.zeros_like(scaled)
    probabilities[order] = mass / mass.sum()
    return probabilities


def chi_square(counts: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return the statistic, its degrees of freedom and its p-value."""
    common = expected >= 5
    rare = (expected > 0) & ~common
    pairs = [(counts[common], expected[common]), ([counts[rare].sum()], [expected[rare].sum()])]
    observed, wanted = (np.concatenate(x) for x in zip(*pairs[: 1 + bool(rare.any())], strict=True))
    test = stats.chisquare(observed, wanted * (observed.sum() / wanted.sum()))
    return {"chi_square": round(float(test.statistic), 1), "degrees": len(observed) - 1, "p": float(test.pvalue)}


if __name__ == "__main__":
    sys.exit(main())
