"""Failures of reward functions and environments in all processes, so that their budgets hold for the whole run."""

from collections import Counter
from collections.abc import Mapping

from covey.parallel import distributed
from covey.rewards.runner import RewardRunner
from covey.sampling.turns import ResponderFactory

ENVIRONMENT = "environment"
FUNCTION = "function "


class FailureCounts:
    """Counts of failures that all processes know.

    Args:
        rewards: runs the reward functions of this process.
        environments: runs its environments, if there are some.
    """

    def __init__(self, rewards: RewardRunner, environments: ResponderFactory | None):
        self._rewards, self._environments = rewards, environments
        self._known = self._counts()

    def restart(self) -> None:
        """Begin from the counts of a checkpoint, which are those of all processes."""
        self._known = self._counts()

    def agree(self) -> None:
        """Add the failures of the other processes since the last time. All processes must call it.

        Raises:
            RewardError, EpisodeError: there are more in all processes than the budget allows.
        """
        new = self._counts() - self._known
        total = sum((Counter(each) for each in distributed.gathered(dict(new), "failures")), Counter[str]())
        self._known += total
        self._add(total - new)

    def _counts(self) -> Counter[str]:
        counts = Counter({FUNCTION + name: count for name, count in dict(self._rewards.failed).items()})
        return counts + Counter({ENVIRONMENT: self._environments.failed if self._environments else 0})

    def _add(self, others: Mapping[str, int]) -> None:
        """Count failures of other processes in this one."""
        functions = {name.removeprefix(FUNCTION): n for name, n in others.items() if name.startswith(FUNCTION)}
        if functions:
            self._rewards.count_elsewhere(functions)
        if self._environments and ENVIRONMENT in others:
            self._environments.count_elsewhere(others[ENVIRONMENT])
