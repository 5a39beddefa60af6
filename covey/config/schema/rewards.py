"""Settings of the sandbox that protects a run from its reward functions (`rewards.scoring`).

This module does not import JAX.
"""

from collections.abc import Iterable
from dataclasses import field
from typing import Literal

from covey.config.base import Config, NonNegativeFloat, NonNegativeInt, Problem, problem_if

OnRewardError = Literal["raise", "none", "value"]


class RewardSafetyConfig(Config, section="reward_safety"):
    """Treatment of reward functions that raise, hang, die or return anything but a finite number."""

    workers: NonNegativeInt = 0
    """Number of processes in which reward functions are called, each function always in the same; 0 calls them in the
    run's own process, which cannot stop one that hangs.
    """
    timeout: NonNegativeFloat = 0.0
    """Seconds that a call of a function may take before its worker is killed, with all that it has started, and
    replaced; 0 is no limit. Needs workers.
    """
    on_error: OnRewardError = "raise"
    """Treatment of a sample for which a function fails: stop the run (raise), leave the sample without a score of this
    function (none), or score it with `value`.
    """
    on_error_of: dict[str, OnRewardError] = field(default_factory=dict)
    """The same for single functions, by their names: {judge: none}."""
    value: float = 0.0
    """Score of such a sample under the treatment value."""
    budget: NonNegativeInt = 100
    """Number of failures, over all functions and the whole run, that none and value accept; one more stops the run."""

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for a timeout without workers."""
        return problem_if(
            self.timeout and not self.workers,
            "timeout",
            f"reward_safety.timeout is {self.timeout:g}, and reward_safety.workers is 0",
            "workers of 1 or more: a call in the run's own process cannot be stopped",
        )
