"""The reward that an environment gave to each episode, as a reward function."""

from collections.abc import Sequence
from typing import Any

from covey.rewards.call import RewardFn
from covey.rewards.text import Completions


def environment(
    prompts: Sequence[Any], completions: Completions, episode_rewards: Sequence[float | None], **columns: Any
) -> list[float | None]:
    """Return the sum of the rewards of the episode's turns; None where the environment failed, or there was none."""
    return list(episode_rewards)


def environment_reward(name: str) -> RewardFn:
    """Return `environment` under the name of an environment, which is then its name among the rewards."""

    def reward(
        prompts: Sequence[Any], completions: Completions, episode_rewards: Sequence[float | None], **columns: Any
    ) -> list[float | None]:
        return environment(prompts, completions, episode_rewards)

    reward.__name__ = name
    reward.in_process = True  # type: ignore[attr-defined]  # it only passes on what is here
    return reward
