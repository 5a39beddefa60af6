"""The checks: each is an equation or an invariance, with a number, a tolerance that follows from the arithmetic, and
its source.

A check calls a trainer and returns a number, which should be `expected` within `tolerance`. Most numbers are the
largest difference of two gradients as a fraction of the largest entry.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from covey.conformance.bench import SETTINGS, Bench, distance
from covey.conformance.trainers import Handle, Trainer

EPS = float(np.finfo(np.float32).eps)
GRADIENT = 128 * EPS
"""A gradient passes about 30 products of up to 64 terms; with independent roundings √(30·64) = 44 eps, times 3."""
SAME_GRADIENT = 64 * EPS
"""The same sum in another order: the roundings of the products stay, those of the sums change."""


class Check(NamedTuple):
    """One check.

    Attributes:
        name: group and name.
        equation: what should hold, in a line.
        source: where that is defined.
        measure: function (bench, trainer) → number.
        tolerance: largest distance of the number from `expected`; 0 means equal bits.
        arithmetic: what the tolerance follows from.
        expected: the number that should come out.
    """

    name: str
    equation: str
    source: str
    measure: Callable[[Bench, Trainer], float]
    tolerance: float
    arithmetic: str
    expected: float = 0.0


def load(bench: Bench, trainer: Trainer, **settings: Any) -> Handle:
    """Load the tiny model into the trainer, with these settings in place of `SETTINGS`."""
    handle: Handle = trainer.call("load", str(bench.model), {**SETTINGS, **settings})
    return handle


def gradient(**settings: Any) -> Callable[[Bench, Trainer], float]:
    """Return a check's `measure`: distance of the gradient of a whole step from the oracle's."""

    def measure(bench: Bench, trainer: Trainer) -> float:
        handle = load(bench, trainer, **settings)
        got = trainer.gradient(handle, bench.rows, bench.weights)
        return distance(got, bench.gradient(bench.rows, **settings))

    return measure


def invariance(common: dict[str, Any], *variants: dict[str, Any]) -> Callable[[Bench, Trainer], float]:
    """Return a check's `measure`: largest distance of the gradients under the variants from that without them."""

    def measure(bench: Bench, trainer: Trainer) -> float:
        gradients = [
            trainer.gradient(load(bench, trainer, **common, **variant), bench.rows, bench.weights)
            for variant in ({}, *variants)
        ]
        return max(distance(got, gradients[0]) for got in gradients[1:])

    return measure


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(
            "gradient/grpo", "∇ mean_i mean_t −min(w·A, clip(w)·A), w = exp(logp − logp_old)",
            "Shao et al., 2024, eq. 3", gradient(), GRADIENT, "128 eps of float32",
        ),
        Check(
            "invariance/accumulation", "the token mean is over the whole step, whatever the micro-batches (DAPO)",
            "Yu et al., 2025, eq. 8", invariance({"algorithm": "dapo"}, {"micro_batch": 4}, {"micro_batch": 2}),
            SAME_GRADIENT, "64 eps of float32",
        ),
    )
}  # fmt: skip
"""Map from the name of a check to the check, in the order of the table."""
