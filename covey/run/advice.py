"""What a run says when its numbers tell that it learns nothing, and what to try."""

from collections.abc import Callable

from covey.rl.learner import StepRecord

PATIENCE = 5
"""Steps in a row without anything to learn before it is said."""


class TiedGroups:
    """An observer: where all samples of every group are scored alike, all advantages are 0 and nothing is learnt. After
    `PATIENCE` such steps in a row it says so, once until a group differs again.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say, self._steps = say, 0

    def __call__(self, record: StepRecord) -> None:
        self._steps = self._steps + 1 if record.metrics.get("frac_reward_zero_std") == 1 else 0
        if self._steps == PATIENCE:
            self.say(f"step {record.step}: in {PATIENCE} steps all samples of every group scored alike: {TIED}")


TIED = (
    "nothing is learnt from such groups. Samples too alike: raise rollout.temperature, loosen top_k and top_p, raise "
    "grpo.num_generations. All wrong or all right: a reward with steps between the two, or easier or harder prompts."
)
