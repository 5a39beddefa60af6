"""Failures of reward functions and environments, counted over all processes of a run."""

from collections import Counter

from covey.parallel import channel
from covey.rewards import RewardRunner
from covey.sampling.responder import ResponderFactory


class FailureCounts:
    """Counts of failures in all processes, so that the budgets of reward functions and environments hold for the whole
    run.

    Args:
        rewards: runs the reward functions of this process.
        environments: runs its environments, if there are some.
    """

    def __init__(self, rewards: RewardRunner, environments: ResponderFactory | None):
        self._rewards, self._environments = rewards, environments
        self.restart()

    def restart(self) -> None:
        """Begin from the counts of a checkpoint, which are those of all processes."""
        self._known = self.counts()

    def agree(self) -> None:
        """Add the failures of the other processes since the last time. All processes must call it.

        Raises:
            RewardError, EpisodeError: there are more in all processes than the budget allows.
        """
        rewards, environments = self.counts()
        new = rewards - self._known[0], environments - self._known[1]
        of_rewards, of_environments = zip(*channel.all_gather((dict(new[0]), new[1]), "failures"), strict=True)
        elsewhere = sum(map(Counter, of_rewards), Counter[str]()) - new[0], sum(of_environments) - new[1]
        self._known = rewards + elsewhere[0], environments + elsewhere[1]
        if elsewhere[0]:
            self._rewards.count_elsewhere(elsewhere[0])
        if self._environments and elsewhere[1]:
            self._environments.count_elsewhere(elsewhere[1])

    def counts(self) -> tuple[Counter[str], int]:
        """Return the failures of each reward function and those of environments, as this process knows them."""
        return Counter(dict(self._rewards.failed)), self._environments.failed if self._environments else 0
