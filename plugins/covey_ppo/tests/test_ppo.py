"""PPO's estimate against an oracle in plain Python, from the formulas and answer by answer.

The oracle knows no arrays and no recursion: it lists the tokens that the model drew, and each advantage is the sum over
those that follow of their discounted errors. At the other tokens the inputs hold large numbers, which must never show.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.config.algorithms import Algorithm, algorithm_of
from covey.config.schema import GRPOConfig, PPOConfig, RLTrainingConfig, RolloutConfig
from covey.errors import RecipeError
from covey.losses.advantages import gae
from covey.losses.policy import KLS
from covey.losses.shaping import kl_penalty, token_rewards
from covey.losses.value import ValueInputs
from covey.rl.batches import Replay
from covey.rl.grpo import GRPOLearner, group_advantages
from covey.rl.roles import ClusterConfig, Role
from covey.rl.step_data import Experience, table_of
from covey.types import Completion, FinishReason, Group
from covey_ppo.learner import PPOLearner, gae_advantages

G = 3
NAN = math.nan


@dataclass
class Answer:
    """One number a token; `drawn` is False for what a tool wrote."""

    reward: float
    drawn: list[bool]
    cut_off: bool
    values: list[float]
    logps: list[float]
    old: list[float]
    ref: list[float]


# --- the oracle


def penalty(x: Algorithm, beta: float, answer: Answer, t: int, old: bool) -> float:
    logp, ref = np.array((answer.old if old else answer.logps)[t]), np.array(answer.ref[t])
    return beta * float(KLS[x.kl](logp, ref)) if x.kl_in == "reward" else 0.0


def raw(x: Algorithm, beta: float, answer: Answer, old: bool) -> dict[int, float]:
    """Advantage of each drawn token by its place (Schulman et al., 2016, eq. 16)."""
    places = [t for t, mine in enumerate(answer.drawn) if mine]
    values = [answer.values[t] for t in places] + [0.0]
    earned = [-penalty(x, beta, answer, t, old) for t in places]
    if places:
        earned[-1] += answer.reward
    errors = [earned[k] + x.gamma * values[k + 1] - values[k] for k in range(len(places))]
    decay = x.gamma * x.gae_lambda
    return {t: sum(decay ** (j - k) * errors[j] for j in range(k, len(errors))) for k, t in enumerate(places)}


def expected(x: Algorithm, beta: float, answers: Sequence[Answer], old: bool) -> tuple[list[Any], list[Any]]:
    """Advantages and returns of all answers."""
    found = [{} if math.isnan(a.reward) else raw(x, beta, a, old) for a in answers]
    returns = [[a.values[t] + f.get(t, 0.0) for t in range(len(a.values))] for a, f in zip(answers, found, strict=True)]
    if x.whiten:
        found = [{} if x.mask_truncated and a.cut_off else f for a, f in zip(answers, found, strict=True)]
        every = [number for f in found for number in f.values()]
        mean, spread = (fmean(every), stdev(every)) if len(every) > 1 else (0.0, math.inf)
        found = [{t: (number - mean) / (spread + 1e-8) for t, number in f.items()} for f in found]
    advantages = [[f.get(t, 0.0) for t in range(len(a.values))] for a, f in zip(answers, found, strict=True)]
    return advantages, returns


# --- the code under test


def experience(answers: Sequence[Answer], old: bool, reference: bool = True) -> Experience:
    def completion(a: Answer) -> Completion:
        finish = FinishReason.LENGTH if a.cut_off else FinishReason.STOP
        tokens, mask = np.arange(len(a.drawn), dtype=np.int32), np.array(a.drawn, bool)
        return Completion(tokens, np.array(a.logps), np.array(a.logps), finish, mask=None if mask.all() else mask)

    groups = [
        Group("p", np.ones(1, np.int32), tuple(map(completion, some)), rewards=np.array([a.reward for a in some]))
        for some in (answers[i : i + G] for i in range(0, len(answers), G))
    ]
    listed = {name: [np.array(getattr(a, name), float) for a in answers] for name in ("ref", "old", "values")}
    ref_logps, old_logps = listed["ref"] if reference else None, listed["old"] if old else None
    return Experience(groups, table_of(groups), ref_logps, old_logps, listed["values"])


def drawn_answer(rng: np.random.Generator) -> Answer:
    """Of up to eight tokens, or none; a third of them a tool's in half of the answers; now and then not scored."""
    n = int(rng.integers(0, 9))
    drawn = rng.random(n) > rng.choice([0.0, 0.35, 1.0], p=[0.5, 0.4, 0.1])

    def numbers(scale: float) -> list[float]:
        return np.where(drawn, rng.normal(size=n) * scale, rng.normal(size=n) * 100).tolist()

    reward = NAN if rng.random() < 0.2 else float(rng.normal())
    return Answer(reward, drawn.tolist(), bool(rng.random() < 0.3), *(numbers(s) for s in (1.0, 0.5, 0.5, 0.5)))


def agree(config: GRPOConfig, answers: Sequence[Answer], beta: float, old: bool) -> None:
    algorithm = algorithm_of(config)
    got = gae_advantages(experience(answers, old, reference=beta > 0), algorithm, beta)
    advantages, returns = expected(algorithm, beta, answers, old)
    assert got.returns is not None
    for i, answer in enumerate(answers):
        np.testing.assert_allclose(got.advantages[i], advantages[i], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(got.returns[i], returns[i], rtol=1e-9, atol=1e-9)
        mine = [a for a, drawn in zip(advantages[i], answer.drawn, strict=True) if drawn]
        shown = got.groups[i // G].advantages
        assert shown is not None
        assert shown[i % G] == pytest.approx(fmean(mine) if mine else 0.0, rel=1e-5, abs=1e-6)


# --- the tests


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_estimate_agrees_with_the_oracle(whiten: bool, mask_truncated: bool, kl_in: Any) -> None:
    """Random answers with holes, cut off, empty, not scored; with stored old log-probs and without."""
    rng = np.random.default_rng(0)
    for kl, beta, old in product(KLS, (0.0, 0.002, 0.3), (False, True)):
        for gamma, lam in ((1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.8, 0.0), (0.0, 0.5)):
            moved = {"kl": kl, "kl_in": kl_in, "mask_truncated": mask_truncated, "gamma": gamma, "gae_lambda": lam}
            config = replace(algorithm_of(PPOConfig(whiten=whiten)), **moved)
            agree(config, [drawn_answer(rng) for _ in range(G * int(rng.integers(1, 4)))], beta, old)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("scored", [0, 1, 2])
def test_steps_with_next_to_nothing_in_them(whiten: bool, scored: int) -> None:
    """No answer scored, or a token or two in all."""
    numbers = [[0.5], [-0.1], [-0.2], [-0.3]]
    answers = [Answer(1.0 + i if i < scored else NAN, [True], False, *numbers) for i in range(G)]
    agree(PPOConfig(whiten=whiten), answers, beta=0.1, old=True)


def test_the_random_answers_hold_every_case() -> None:
    """What the comparison above rests on."""
    rng = np.random.default_rng(0)
    answers = [drawn_answer(rng) for _ in range(200)]
    assert any(not a.drawn for a in answers)
    assert any(a.drawn and not any(a.drawn) for a in answers)
    assert any(a.drawn and any(a.drawn) and not a.drawn[-1] for a in answers)
    assert {(math.isnan(a.reward), a.cut_off) for a in answers} == set(product((False, True), repeat=2))


# --- holes, by hand


def test_a_mask_of_another_length_never_broadcasts() -> None:
    one, three = [np.array([True])], [np.zeros(3)]
    with pytest.raises(AssertionError, match="broadcast"):
        gae(three, three, gamma=1.0, lam=1.0, mask=one)
    with pytest.raises(AssertionError, match="broadcast"):
        kl_penalty(three, three, "k1", 1.0, one)
    with pytest.raises(AssertionError, match="broadcast"):
        token_rewards(np.ones(1), three, one)


def test_a_tools_tokens_earn_nothing_and_cost_no_kl() -> None:
    """The reward is that of the last drawn token; nothing is earned by an answer that the model drew nothing of."""
    policy, reference = [np.array([-1.0, -90.0, -2.0])], [np.array([-1.5, -2.0, -2.5])]
    [got] = kl_penalty(policy, reference, "k1", 0.1, [np.array([True, False, True])])
    np.testing.assert_allclose(got, [0.05, 0.0, 0.05])
    masks = [np.array([True, True, False]), np.array([False, False]), np.zeros(0, bool)]
    penalties = [np.array([0.1, 0.2, 70.0]), np.array([5.0, 5.0]), np.zeros(0)]
    rewards = token_rewards(np.array([1.0, 2.0, 3.0]), penalties, masks)
    assert [r.round(9).tolist() for r in rewards] == [[-0.1, 0.8, 0.0], [0.0, 0.0], []]


def test_group_advantages_take_the_kl_of_the_drawn_tokens_alone() -> None:
    """RLOO: the answers' rewards are equal, and so are their log-ratios where the model drew: nothing is left."""
    logps, ref, drawn = [-1.0, -50.0, -2.0], [-1.5, -3.0, -2.5], [True, False, True]
    plain = Answer(1.0, [True, True], False, [], [-1.0, -2.0], [-1.0, -2.0], [-1.5, -2.5])
    called = Answer(1.0, drawn, False, [], logps, logps, ref)
    x = experience([plain, called, plain], old=False)
    got = group_advantages(x, algorithm_of(GRPOConfig("rloo")), beta=0.3)
    assert not np.concatenate(got.advantages).any()


@pytest.mark.parametrize("beta", [1e-4, 0.002, 0.05, 2.0])
def test_group_advantages_subtract_beta_times_the_kl(beta: float) -> None:
    """RLOO by hand: rewards are equal, and the log-ratios 0.5 and −0.25 of two tokens each are all that differs."""
    one, other = ([-1.0 + d, -2.0 + d] for d in (0.5, -0.25))
    answers = [Answer(1.0, [True, True], False, [], logps, logps, [-1.0, -2.0]) for logps in (one, other, other)]
    got = group_advantages(experience(answers, old=False), algorithm_of(GRPOConfig("rloo")), beta)
    by_hand = [-1.5 * beta, 0.75 * beta, 0.75 * beta]
    np.testing.assert_allclose([a[0] for a in got.advantages], by_hand, rtol=1e-6)


def cluster_of(**methods: Any) -> Any:
    """A cluster without models."""
    settings = ClusterConfig({}, RLTrainingConfig(), RolloutConfig())
    parts = {"rollout": SimpleNamespace(environments=None), "inference": SimpleNamespace(has=lambda role: False)}
    return SimpleNamespace(config=settings, **parts, **methods)


def no_reward(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0] * len(prompts)


def test_settings_in_a_dict_are_answered_with_the_class_to_use() -> None:
    with pytest.raises(RecipeError, match=r"^PPOLearner: ppo_config is .*\n.*wanted: GRPOConfig\(\.\.\.\)"):
        PPOLearner(ppo_config={"gamma": 1})  # type: ignore[call-arg,arg-type]


def test_each_learner_refuses_the_algorithms_of_the_other() -> None:
    with pytest.raises(RecipeError, match="has no critic") as caught:
        PPOLearner(rl_cluster=cluster_of(), reward_fns=no_reward, ppo_config=GRPOConfig(), observers=[])
    assert caught.value.where == "PPOLearner"
    with pytest.raises(RecipeError, match="takes its advantages from a critic") as caught:
        GRPOLearner(rl_cluster=cluster_of(), reward_fns=no_reward, grpo_config=PPOConfig(), observers=[])
    assert caught.value.where == "GRPOLearner"


def test_both_gradients_are_computed_before_either_is_applied() -> None:
    """The explained variance is that of the tokens in the critic's loss, here the first two and the last: 0.75."""
    values, returns = [1.0, 2.0, 900.0, 3.0], [2.0, 4.0, -900.0, 6.0]
    inputs = ValueInputs(np.array([returns]), np.array([values]), weight=np.array([[0.5, 1.0, 0.0, 1.0]]))
    batches: Any = [SimpleNamespace(value_inputs=x, rows_to_sum=slice(None)) for x in (inputs, None)]
    calls: list[tuple[str, str, Any]] = []

    def gradients(role: str, batches: Any) -> str:
        calls.append(("gradients", role, list(batches)))
        return f"of the {role}"

    def apply(role: str, gradients: str) -> dict[str, float]:
        calls.append(("apply", role, gradients))
        return {"loss": float(len(calls)), "grad_norm": 0.5}

    cluster = cluster_of(gradients=gradients, apply=apply)
    metrics = PPOLearner(rl_cluster=cluster, reward_fns=no_reward, observers=[]).update(Replay(iter(batches)))
    assert calls == [
        ("gradients", Role.ACTOR, batches),
        ("gradients", Role.CRITIC, batches),
        ("apply", Role.ACTOR, "of the actor"),
        ("apply", Role.CRITIC, "of the critic"),
    ]
    assert metrics.pop("critic/explained_variance") == pytest.approx(0.75)
    assert metrics == {"loss": 3.0, "grad_norm": 0.5, "critic/loss": 4.0, "critic/grad_norm": 0.5}
