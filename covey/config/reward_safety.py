"""Settings of the sandbox that protects a run from its reward functions (`rewards.sandbox.runner`).

This module does not import JAX.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

from covey.config.base import Config, NonNegativeFloat, NonNegativeInt, Problem

OnRewardError = Literal["raise", "none", "value"]


class RewardSafetyConfig(Config, section="reward_safety"):
    """What a run does about reward functions that raise, hang, die or give something else than a finite number."""

    workers: NonNegativeInt = 0
    """Processes in which reward functions are called, each function always in the same; 0 calls them in the run itself,
    which cannot stop one that hangs.
    """
    timeout: NonNegativeFloat = 0.0
    """Seconds that a call of a function may take before its worker is killed, with all that it has started, and
    replaced; 0 is no limit. Needs workers.
    """
    on_error: OnRewardError = "raise"
    """What becomes of a sample for which a function fails: the run stops, the function counts as not having scored it
    (none), or it scores `value`.
    """
    on_error_of: dict[str, OnRewardError] = field(default_factory=dict)
    """The same for single functions, by name: {judge: none}."""
    value: float = 0.0
    """The number that value stands for."""
    budget: NonNegativeInt = 100
    """Failures, over all functions and the whole run, that none and value let pass; one more stops the run."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield a problem for a timeout without workers."""
        if self.timeout and not self.workers:
            what = f"reward_safety.timeout is {self.timeout:g}, and reward_safety.workers is 0"
            want = "workers of 1 or more: a call in the run's own process cannot be stopped"
            yield Problem("timeout", what, want)
