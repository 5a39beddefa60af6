"""Outputs of a run: by-products of its loop, such as its report, which installed packages offer.

An entry point of the group `covey.outputs` names a maker without arguments of an `Output`. A run with a folder makes
all of them and calls them in order of name. One that raises is logged, and the run goes on.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from covey.monitor.record import StepRecord

if TYPE_CHECKING:
    from covey.rl.experience import Experience
    from covey.run.base import Run


class Output:
    """A by-product of a run. Each method is called at one point of the loop, and does nothing unless a class overrides
    it.
    """

    def begin(self, run: "Run[Any]", summary: Mapping[str, Any]) -> None:
        """Begin, before the first step of this process: after a restore, and after the evaluation before training.

        Args:
            run: has the recipe, the folder, the learner, the loader, the held-out rows and the total of steps.
            summary: content of `summary.json` so far; that of a resumed run as the run has written it.
        """

    def before_update(self, experience: "Experience") -> None:
        """Look at an experience whose advantages are estimated, before the updates on it. RL only."""

    def step(self, record: StepRecord) -> None:
        """Look at the record of a step."""

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Look at the metrics of the evaluation `name`: "before" or "after"."""

    def end(self, status: str) -> Mapping[str, str]:
        """End with the run, and return facts for its last message, by name.

        Args:
            status: "" of a finished run, `STOPPED` of one that a signal stopped.
        """
        return {}
