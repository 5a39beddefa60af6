"""The reward that an environment gave to each episode, as a reward function."""

from covey.rewards.call import RewardFn


def environment(episode_rewards: list[float | None]) -> list[float | None]:
    """Return the sum of the rewards of the episode's turns; None where the environment failed, or there was none."""
    return episode_rewards


def environment_reward(name: str) -> RewardFn:
    """Return `environment` under the name of an environment, which is then its name among the rewards."""

    def reward(episode_rewards: list[float | None]) -> list[float | None]:
        return environment(episode_rewards)

    reward.__name__ = name
    reward.in_process = True  # type: ignore[attr-defined]  # it only passes on what is here
    return reward
