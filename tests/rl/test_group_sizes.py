"""Groups of different sizes in one step: each is treated as it is alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covey.config.algorithms import algorithm_of
from covey.config.schema import EvalConfig, GRPOConfig, PPOConfig
from covey.rewards.scoring import score
from covey.rl.evaluate import evaluate_groups
from covey.rl.grpo import group_advantages
from covey.rl.metrics import group_metrics
from covey.rl.step_data import Experience, table_of
from covey.types import Completion, Episode, FinishReason, Group

RNG = np.random.default_rng(0)


def completion(size: int) -> Completion:
    logps, reward = RNG.normal(size=size).astype(np.float32), float(RNG.normal())
    episode = Episode(turn_ends=(2, size), turn_rewards=(reward, 0.5), reward=reward + 0.5, done=True)
    return Completion(np.arange(size, dtype=np.int32), logps, logps, FinishReason.STOP, "1", episode=episode)


def group(*lengths: int) -> Group:
    rewards = RNG.normal(size=len(lengths))
    return Group("p", np.zeros(2, np.int32), tuple(map(completion, lengths)), rewards=rewards)


GROUPS = [group(4, 5), group(3, 6, 4, 5), group(5, 3, 4)]


def experience(groups: list[Group]) -> Experience:
    arrays = [[c.logps * scale for g in groups for c in g.completions] for scale in (0.5, 0.1)]
    return Experience(groups, table_of(groups), ref_logps=arrays[0], values=arrays[1])


def assert_like_alone(estimate: Any) -> None:
    together, alone = estimate(experience(GROUPS)), [estimate(experience([one])) for one in GROUPS]
    for got, wanted in zip(together.groups, (x.groups[0] for x in alone), strict=True):
        assert got.advantages.tobytes() == wanted.advantages.tobytes()
    parts = [array for x in alone for array in x.advantages]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(together.advantages, parts, strict=True))


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize("advantage", ["group_zscore", "centred", "leave_one_out"])
def test_advantages_are_those_of_each_group_alone(advantage: Any, credit: Any, kl_in: Any) -> None:
    if credit == "turn":
        pytest.importorskip("covey_envs")
    config = GRPOConfig(
        advantage=advantage, credit=credit, kl_in=kl_in, beta=0.1, kl="k1" if kl_in == "reward" else "k3"
    )
    assert_like_alone(lambda x: group_advantages(x, algorithm_of(config), 0.1))


def test_an_advantage_that_names_the_groups_reads_their_texts() -> None:

    def with_text(rewards: np.ndarray, groups: list[Group]) -> np.ndarray:
        texts = [[c.text for c in group.completions] for group in groups]
        return np.array([np.pad([bool(text) for text in row], (0, rewards.shape[1] - len(row))) for row in texts])

    silent = replace(GROUPS[1], completions=(replace(GROUPS[1].completions[0], text=""), *GROUPS[1].completions[1:]))
    found = group_advantages(experience([GROUPS[0], silent]), algorithm_of(GRPOConfig()), 0.0, with_text)
    assert [group.advantages.tolist() for group in found.groups] == [[1, 1], [0, 1, 1, 1]]
    assert [array.tolist() for array in found.advantages[1:3]] == [[1] * 5, [0] * 3]


def test_the_advantages_of_a_critic_are_too() -> None:
    gae_advantages = pytest.importorskip("covey_ppo.learner").gae_advantages
    assert_like_alone(lambda x: gae_advantages(x, algorithm_of(PPOConfig(whiten=False)), 0.1))


def test_metrics_and_evaluation_count_every_completion() -> None:
    metrics, rewards = group_metrics(table_of(GROUPS)), np.concatenate([g.rewards for g in GROUPS])
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert metrics["reward_std"] == pytest.approx(np.mean([g.rewards.std(ddof=1) for g in GROUPS]))
    assert metrics["frac_reward_zero_std"] == 0
    found = evaluate_groups(GROUPS, EvalConfig(accuracy="environment", samples=4, pass_k=4))
    assert found.metrics["samples"] == 9
    right = np.array([c.episode.reward >= 1 for c in GROUPS[1].completions])
    assert found.metrics["pass@4"] == float(right.any())


def test_a_process_may_have_no_group() -> None:
    assert score([], ["arithmetic_answer"]) == []
    assert group_advantages(experience([]), algorithm_of(GRPOConfig()), 0.0).advantages == []
