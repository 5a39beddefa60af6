"""Send the steps and evaluations of a run to the trackers that its recipe names."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from covey.config.recipe import Recipe
from covey.monitor.record import StepRecord
from covey.run.outputs import Output
from covey.run.saved_run import SavedRun
from covey_trackers.trackers import Tracked, Trackers


class TrackersOutput(Output):
    """Log to trackers in the first process. They are closed when the run ends, whatever ends it."""

    def begin(self, run: SavedRun, summary: Mapping[str, Any]) -> None:
        self._learner, self._recipe = run.learner, run.recipe
        tracked = Tracked(run.folder.path, asdict(run.recipe), run.folder.resume_at)
        names = run.recipe.tracking if run.folder.writes else ()
        self._trackers = run.stack.enter_context(Trackers(names, tracked))

    def step(self, record: StepRecord) -> None:
        recipe, table = self._recipe, list[Any]()
        if isinstance(recipe, Recipe):
            due = recipe.log_completions and record.due(recipe.log_completions_every_n_steps)
            table = [record.groups if due else (), recipe.num_completions_to_log]
        self._trackers.log(record.step, record.metrics, *table)

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        self._trackers.log(self._learner.step, {f"eval/{what}": value for what, value in metrics.items()})
