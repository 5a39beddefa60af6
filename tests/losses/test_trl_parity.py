"""Advantages, losses, gradients and metrics against TRL's own, from `parity/golden/trl.*` (`make parity` makes them).

Settings are TRL's; `algorithm_like` says what each is called here. Tolerances are those of float32 sums.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covey.config.algorithms import Algorithm, algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.advantages import ADVANTAGES
from covey.losses.policy import AGGREGATES, LossInputs, policy_loss
from covey.losses.shaping import kl_penalty
from covey.rewards.scoring import score
from covey.types import Completion, FinishReason, Group, MetricSums

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
FACTS = json.loads((GOLDEN / "trl.json").read_text())
CASES: dict[str, dict[str, Any]] = FACTS["cases"]
ARRAYS = dict(np.load(GOLDEN / "trl.npz"))
P, G = FACTS["prompts"], FACTS["generations"]
AGGREGATE_OF = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant",
}
SURROGATE_OF = {"cispo": "cispo", "sapo": "sapo"}
ADVANTAGE_OF = {"group": "group_zscore", "batch": "batch_std", "none": "centred"}


PLAIN = algorithm_of(GRPOConfig(beta=0.0))


def algorithm_like(case: Mapping[str, Any]) -> Algorithm:
    """Ours with TRL's settings."""
    trl = case["settings"]
    if case["trainer"] == "RLOOTrainer":
        # Its loss is a sum over each answer: ours by a constant, which `own_loss` takes out again.
        return replace(PLAIN, advantage="leave_one_out", aggregate="constant", beta=trl["beta"], kl_in="reward")
    # TRL's epsilon_high is the cap itself in cispo, and the width of the clip elsewhere.
    is_cispo = trl["loss_type"] == "cispo"
    return replace(
        PLAIN,
        advantage=ADVANTAGE_OF[trl["scale_rewards"]],
        ratio=trl["importance_sampling_level"],
        surrogate=SURROGATE_OF.get(trl["loss_type"], "clip"),
        aggregate=AGGREGATE_OF[trl["loss_type"]],
        epsilon=trl["epsilon"],
        epsilon_high=None if is_cispo else trl["epsilon_high"],
        cap=trl["epsilon_high"] if is_cispo else 5.0,
        delta=trl["delta"],
        beta=trl["beta"],
        sapo_positive=trl["sapo_temperature_pos"],
        sapo_negative=trl["sapo_temperature_neg"],
        correction=trl["vllm_importance_sampling_mode"] if trl["use_vllm"] else "none",
        correction_cap=trl["vllm_importance_sampling_clip_max"],
        correction_floor=trl["vllm_importance_sampling_clip_min"] or 0.0,
        mask_truncated=trl["mask_truncated_completions"],
    )  # fmt: skip


def drawn(name: str) -> dict[str, np.ndarray]:
    start = CASES[name]["draw"] + "/"
    return {key.removeprefix(start): value for key, value in ARRAYS.items() if key.startswith(start)}


@functools.cache
def own_loss(name: str) -> tuple[float, np.ndarray, MetricSums]:
    """Value, gradient with respect to the log-probs, and metrics: one sample a row, the whole step at once."""
    algorithm, trl, x = algorithm_like(CASES[name]), CASES[name]["settings"], drawn(name)
    real = np.arange(x["logps"].shape[1]) < x["lengths"][:, None]
    counted = x["lengths"] * (x["finished"] if algorithm.mask_truncated else 1)
    weight, denominator = AGGREGATES[algorithm.aggregate](counted, trl["max_completion_length"])
    if case_is_rloo(name):
        denominator /= trl["max_completion_length"]
    at_tokens = lambda values: jnp.where(real, values, 0).astype(jnp.float32)  # noqa: E731
    on_policy = case_is_rloo(name) or trl["num_iterations"] == 1
    inputs = LossInputs(
        advantage=at_tokens(ARRAYS[f"{name}/advantages"][:, None]),
        weight=at_tokens(weight[:, None]),
        rollout_logps=at_tokens(x["sampled"]),
        beta=jnp.full((P * G, 1), algorithm.beta),
        old_logps=None if on_policy else at_tokens(x["old"]),
        ref_logps=at_tokens(x["ref"]) if algorithm.beta and algorithm.kl_in == "loss" else None,
    )

    def loss(logps: jax.Array) -> tuple[jax.Array, MetricSums]:
        total, shares = policy_loss(algorithm, logps, jnp.zeros_like(logps), jnp.asarray(real, jnp.int32), inputs)
        return total / denominator, shares

    (value, shares), gradient = jax.value_and_grad(loss, has_aux=True)(at_tokens(x["logps"]))
    return float(value), np.asarray(gradient), shares


def case_is_rloo(name: str) -> bool:
    return CASES[name]["trainer"] == "RLOOTrainer"


def scored(name: str) -> list[Group]:
    """The draw's groups with the rewards that two functions gave, None among them."""
    table, trl = drawn(name)["rewards"], CASES[name]["settings"]
    nothing = np.zeros(1, np.float32)
    answers = [Completion(np.zeros(1, np.int32), nothing, nothing, FinishReason.STOP, str(i)) for i in range(P * G)]
    groups = [Group("", np.ones(1, np.int32), tuple(answers[G * p : G * p + G])) for p in range(P)]

    def first(completions: list[str]) -> list[float | None]:
        return [None if np.isnan(table[int(c), 0]) else float(table[int(c), 0]) for c in completions]

    def second(completions: list[str]) -> list[float | None]:
        return [None if np.isnan(table[int(c), 1]) else float(table[int(c), 1]) for c in completions]

    return score(groups, [first, second], trl["reward_weights"])


def close(ours: Any, theirs: Any, size: float = 1e-3) -> None:
    """To 1e-5 of each number, or 2e-6 of the largest where terms cancel, or of `size`, where that is larger.

    That is 16 roundings to float32, on either side: some ten in a term, and about √n where n random ones are added.
    """
    theirs = np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2 * 16 * 2.0**-24 * max(float(np.abs(theirs).max()), size))


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_trls(name: str) -> None:
    algorithm, x = algorithm_like(CASES[name]), drawn(name)
    rewards = np.array([group.rewards for group in scored(name)], float)
    if case_is_rloo(name):
        # On-policy in that case, so that the policy's log-probs are those that sampled.
        logps, refs = ([row[:n] for row, n in zip(x[key], x["lengths"], strict=True)] for key in ("logps", "ref"))
        penalties = kl_penalty(logps, refs, "k1", algorithm.beta)
        rewards = rewards - np.reshape([penalty.sum() for penalty in penalties], (P, G))
    close(ADVANTAGES[algorithm.advantage](rewards).ravel(), ARRAYS[f"{name}/advantages"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trls(name: str) -> None:
    value, gradient, _ = own_loss(name)
    close(gradient, ARRAYS[f"{name}/gradient"])
    if not case_is_rloo(name):  # its ratio of whole answers gives another value, always the mean advantage: 0
        # A loss is about its gradient, term by term, and those are of both signs.
        close(value, CASES[name]["loss"], size=float(np.abs(gradient).sum()))


def over_tokens(name: str) -> bool:
    """Whether our means of metrics are over tokens, as TRL's are: ours are in the weights of the aggregate."""
    return algorithm_like(CASES[name]).aggregate != "sequence_mean" and not case_is_rloo(name)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n]["metrics"] and over_tokens(n)])
def test_metrics_are_trls(name: str) -> None:
    algorithm, shares = algorithm_like(CASES[name]), own_loss(name)[2]
    for key, theirs in CASES[name]["metrics"].items():
        if not differs(key, algorithm):
            share = shares[key]
            close(share.total / share.count if isinstance(share, tuple) else share, theirs)


def differs(metric: str, algorithm: Algorithm) -> bool:
    """Metrics that are not the same thing: TRL's sequences count once each, ours have all their tokens."""
    by_sequence = {"clip_ratio": algorithm.ratio, "sampling": algorithm.correction}
    return (
        by_sequence.get(metric.split("/")[0], "").startswith("sequence")
        or (metric == "clip_ratio/region_mean" and algorithm.delta is not None)  # ours has what δ cut
    )


@pytest.mark.parametrize(
    ("preset", "name"),
    [(loss, f"{loss}/plain") for loss in (*AGGREGATE_OF, "rloo")] + [("gspo", "grpo/gspo")],
)
def test_presets_are_what_trl_calls_so(preset: str, name: str) -> None:
    ours, theirs = algorithm_of(GRPOConfig(preset)), algorithm_like(CASES[name])
    same = ["advantage", "ratio", "surrogate", "aggregate", "epsilon", "high", "sapo_positive", "sapo_negative"]
    if preset == "cispo":  # it has no clip, and its cap is chosen
        same = same[:4]
    assert {key: getattr(ours, key) for key in same} == {key: getattr(theirs, key) for key in same}


@pytest.mark.slow
def test_the_draws_reach_every_bound() -> None:
    """Otherwise agreement would say little."""
    plain, masked = CASES["dapo/plain"]["metrics"], CASES["dapo/token_mask"]["metrics"]
    assert plain["clip_ratio/low_mean"] > 0.05
    assert plain["clip_ratio/high_mean"] > 0.05
    assert masked["sampling/correction/mean"] < 0.6
    bounds = {"grpo/delta": "grpo/plain", "grpo/sequence_delta": "grpo/sequence"}
    corrected = [name for name in CASES if CASES[name]["settings"].get("vllm_importance_sampling_clip_min")]
    assert len(corrected) == 4
    for name, without in (bounds | {name: name.removesuffix("_two_bounds") for name in corrected}).items():
        assert not np.allclose(ARRAYS[f"{name}/gradient"], ARRAYS[f"{without}/gradient"], atol=1e-3)
    assert np.all(ARRAYS["grpo/truncated/gradient"][~ARRAYS["far/finished"]] == 0)
