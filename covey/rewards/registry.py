"""The built-in reward functions by name.

Installed packages offer more as entry points of the group `covey.rewards`, and `module:function` names one of the
user's modules.
"""

from collections.abc import Sequence
from typing import Any

from covey.registry import Registry

REWARDS = {
    "environment": "covey.rewards.registry:environment",
    "first_letter": "covey.rewards.first_letter:first_letter",
    "sentence": "covey.rewards.first_letter:sentence",
    "starts_with_letter": "covey.rewards.first_letter:starts_with_letter",
    "arithmetic_answer": "covey.rewards.numbers:arithmetic_answer",
    "number_only": "covey.rewards.numbers:number_only",
}
"""Name → where the function is; it is imported at its first use."""

REGISTRY = Registry("reward function", "covey.rewards", "function", "rewards", REWARDS)

resolve = REGISTRY.resolve
"""Return the reward function of a name."""


def environment(
    prompts: Sequence[Any], completions: Sequence[Any], episode_rewards: Sequence[float | None], **columns: Any
) -> list[float | None]:
    """Return the reward that the environment gave to each episode: None where it gave none."""
    return list(episode_rewards)


environment.is_needed = True  # type: ignore[attr-defined]
