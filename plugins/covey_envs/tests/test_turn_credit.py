"""Advantages of turns against plain loops in float64, and the cases in which they are those of the episode."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covey.config import recipe
from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, PPOConfig
from covey.errors import RecipeError
from covey.rl.grpo import group_advantages
from covey.rl.step_data import Experience, table_of
from covey.types import Completion, Episode, FinishReason, Group

G = 5
WEIGHT = 0.5


def episodes(seed: int, *, most_turns: int = 4, unscored: bool = True) -> Experience:
    """Groups of episodes of different numbers of turns; a second reward function scores the whole."""
    rng, groups = np.random.default_rng(seed), []
    for _ in range(3):
        completions, totals = [], []
        for _ in range(G):
            turns = int(rng.integers(1, most_turns + 1))
            mask = np.concatenate(
                [np.r_[np.zeros(k and 2, bool), np.ones(rng.integers(1, 4), bool)] for k in range(turns)]
            )
            ends = [*np.flatnonzero(np.diff(mask.astype(int)) == -1) + 1, len(mask)]
            given = tuple(float(r) for r in rng.normal(size=turns))
            episode = Episode(turn_ends=tuple(map(int, ends)), turn_rewards=given, reward=sum(given), done=True)
            logps = rng.normal(size=len(mask)).astype(np.float32)
            tokens = np.arange(len(mask), dtype=np.int32)
            completions.append(Completion(tokens, logps, logps, FinishReason.STOP, mask=mask, episode=episode))
            totals.append(WEIGHT * sum(given) + rng.normal())
        rewards = np.array(totals)
        if unscored:
            rewards[2] = np.nan
        groups.append(Group("", np.zeros(1, np.int32), tuple(completions), rewards=rewards))
    return Experience(groups, table_of(groups))


def settings(**given: Any) -> Any:
    return algorithm_of(GRPOConfig(num_generations=G, reward_weights=(WEIGHT, 1.0), **given))


@pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("beta", [0.0, 0.002, 0.3])
def test_a_turn_is_compared_with_the_same_turn_of_the_others(gamma: float, beta: float) -> None:
    x = episodes(1)
    kl = {"beta": beta, "kl": "k1", "kl_in": "reward"} if beta else {}
    if beta:
        x = replace(x, ref_logps=[c.logps * 0.5 for g in x.groups for c in g.completions])
    found = group_advantages(x, settings(credit="turn", turn_gamma=gamma, **kl), beta)
    by_completion = iter(found.advantages)
    alone = 0
    for group, scored in zip(x.groups, found.groups, strict=True):
        returns: list[list[float]] = []
        for c, total in zip(group.completions, group.rewards, strict=True):
            assert c.episode is not None
            rewards = [WEIGHT * r for r in c.episode.turn_rewards]
            rewards[-1] += total - WEIGHT * c.episode.reward
            start = 0
            for k, end in enumerate(c.episode.turn_ends):
                rewards[k] -= sum(beta * float(c.logps[t]) * 0.5 for t in range(start, end) if c.mask[t])
                start = end
            turns = range(len(rewards))
            returns.append([sum(gamma ** (j - k) * rewards[j] for j in turns if j >= k) for k in turns])
        for number, c in enumerate(group.completions):
            got, start = next(by_completion), 0
            for k, end in enumerate(c.episode.turn_ends):
                others = [r[k] for r in returns if len(r) > k and not math.isnan(r[k])]
                wanted = 0.0
                if len(others) > 1 and not math.isnan(returns[number][k]):
                    mean = sum(others) / len(others)
                    std = math.sqrt(sum((r - mean) ** 2 for r in others) / (len(others) - 1))
                    wanted = (returns[number][k] - mean) / (std + 1e-4)
                alone += len(others) == 1
                np.testing.assert_allclose(got[start:end], wanted, rtol=1e-5, atol=1e-6)
                start = end
            assert got.dtype == np.float32
            assert scored.advantages[number] == pytest.approx(got[c.mask].mean())
    assert alone


def test_one_turn_has_the_credit_of_the_episode_bit_for_bit() -> None:
    x = episodes(2, most_turns=1)
    plain = replace(
        x, groups=[replace(g, completions=tuple(replace(c, episode=None) for c in g.completions)) for g in x.groups]
    )
    for given in (x, plain):
        of_turns, of_episodes = (
            group_advantages(given, settings(credit=credit), 0.0) for credit in ("turn", "episode")
        )
        assert [a.tobytes() for a in of_turns.advantages] == [a.tobytes() for a in of_episodes.advantages]


def test_only_the_last_reward_without_a_discount_is_that_of_the_episode_for_all_turns() -> None:
    """So tools, which give no rewards, differ only where episodes have different numbers of turns."""
    x = episodes(3, unscored=False)
    last = [
        replace(g, completions=tuple(replace(c, episode=replace(c.episode, reward=None)) for c in g.completions))
        for g in x.groups
    ]
    of_turns, of_episodes = (
        group_advantages(replace(x, groups=last), settings(credit=credit), 0.0) for credit in ("turn", "episode")
    )
    for one, other in zip(of_turns.advantages, of_episodes.advantages, strict=True):
        first = one[0]
        np.testing.assert_allclose(first, other[0], rtol=1e-6)
    assert any(len(set(a.tolist())) > 1 for a in of_turns.advantages)


def test_what_contradicts_it_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"grpo\.turn_gamma is set, and grpo with these settings has no use for it"):
        GRPOConfig(turn_gamma=0.5)
    with pytest.raises(RecipeError, match=r"grpo\.credit is set, and ppo with these settings has no use for it"):
        PPOConfig(credit="turn")
    assert recipe.load("guess-tiny", ["--grpo.credit", "turn", "--grpo.turn-gamma", "0.9"]).grpo.turn_gamma == 0.9
    with pytest.raises(RecipeError, match=r"grpo\.credit is turn, and there is no environment"):
        recipe.load("quickstart", ["--grpo.credit", "turn"])


def test_returns_that_differ_by_rounding_alone_are_equal() -> None:
    """0.1 + 0.2 − 0.3 is 5.6e-17: such an episode is no better than one without a reward."""
    tokens, logps, completions = np.arange(3, dtype=np.int32), np.zeros(3, np.float32), []
    for given in [(0.1, 0.2, -0.3), (0.0, 0.0, 0.0)] * 2:
        episode = Episode(turn_ends=(1, 2, 3), turn_rewards=given, reward=0.0, done=True)
        completions.append(Completion(tokens, logps, logps, FinishReason.STOP, episode=episode))
    groups = [Group("", np.zeros(1, np.int32), tuple(completions), rewards=np.zeros(4))]
    found = group_advantages(Experience(groups, table_of(groups)), settings(credit="turn", advantage="batch_std"), 0.0)
    first, second, *_ = found.advantages
    assert (first[0], second[0]) == (0, 0)
    assert (first[1] < 0 < second[1], first[2] < 0 < second[2]) == (True, True)
