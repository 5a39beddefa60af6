"""Base of RL and supervised runs: a run folder, and a loop that can be stopped and resumed.

The run folder holds the whole run: `recipe.yaml` its settings, `metrics.jsonl` the metrics, `before.jsonl` and
`after.jsonl` the answers to held-out prompts, `checkpoints/` the state to resume from, `summary.json` the result.
During the run, `heartbeat.json` holds the current phase. With several processes the first writes and shows progress;
all read when resuming. One lock, that of `checkpoints/`, keeps a second writer out.

The modules `rl` and `sft` define what a run trains, and how.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from rich.console import Console

from covey.config.metrics import metric
from covey.config.recipe import COMMANDS, Recipe, SFTRecipe, load_any, to_yaml
from covey.data.loader import PromptLoader
from covey.display import refuse_secrets, show_log
from covey.errors import CoveyError, NumbersError, ResumeError, Stopped
from covey.parallel import distributed, mesh_for
from covey.run.compile_counter import CompileCounter
from covey.run.load_model import CHECKPOINTS, refuse_other_weights
from covey.run.settings import refuse_changed_settings, settings_of
from covey.run.signals import SignalHandler
from covey.run.watchdog import Watchdog
from covey.train.checkpoint import Checkpointer
from covey.train.checksums import claim, give_back, replace_file
from covey.train.metrics import BAD, METRICS, SAMPLES, SUMMARY, MetricsWriter, write_bad_batch, write_summary
from covey.train.progress import Progress
from covey.train.trackers import Tracked, Trackers
from covey.types import Group

log = logging.getLogger(__name__)

RecipeT = TypeVar("RecipeT", Recipe, SFTRecipe)


class Step(Protocol):
    """Interface of a step's record; both learners implement it."""

    @property
    def step(self) -> int: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    def due(self, every: int) -> bool: ...


class Run(ABC, Generic[RecipeT]):
    """One run in its folder.

    Args:
        ready: the checked recipe.
        out: the run folder; made absolute, because a reward function may change the working directory.
        resuming: continue from the state in the folder.
    """

    headline: ClassVar[str] = "reward"
    answers: ClassVar[str] = SAMPLES
    rows: ClassVar[tuple[str, ...]] = (METRICS, SAMPLES)
    """Names of the files that get rows at each step."""
    loader: PromptLoader
    origin: str

    def __init__(self, ready: RecipeT, out: Path, resuming: bool = False):
        self.recipe: RecipeT = ready
        self.out, self._given_out, self.resuming = out.absolute(), out, resuming
        self.started, self.writes = time.monotonic(), distributed.is_first()
        self._saved: int | None = None
        self._metrics: Mapping[str, float] = {}
        distributed.refuse_differences("recipe", lambda: to_yaml(ready), "the same command for all")
        self.mesh = mesh_for(ready.model.mesh)

    @abstractmethod
    def prepare(self) -> int:
        """Load all that the run needs, including `loader` and `origin`; return the number of steps of the whole run."""

    @abstractmethod
    def judged(self, name: str) -> dict[str, Any]:
        """Run the evaluation `name`, show it and write it to the folder."""

    @abstractmethod
    def beginning(self) -> dict[str, Any]:
        """Return the summary's entries on model and data."""

    @abstractmethod
    def steps(self) -> None:
        """Train to the end; call `after_step` after each step."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of optimizer updates made."""

    @abstractmethod
    def state(self) -> Any:
        """Return the arrays of a checkpoint."""

    def remembers(self) -> dict[str, Any]:
        """Return the JSON values of a checkpoint other than those on model and data."""
        return {}

    @abstractmethod
    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        """Restore a checkpoint."""

    def begin(self) -> dict[str, Any]:
        """Run in the new folder; return the content of `summary.json`."""
        text = to_yaml(self.recipe)
        refuse_secrets(text)
        made = self.writes and claim(self.out, CHECKPOINTS)
        with self._checkpointer() as self.saves:
            if self.writes:
                replace_file(self.out / RECIPE, text.encode())
            try:
                return self._run()
            except CoveyError:
                if self.saves.holds() and not self._worth_keeping():
                    give_back(self.out, made)  # so that the corrected command can use the name
                raise

    def take_up(self) -> dict[str, Any]:
        """Resume in the folder of an earlier run; return the content of `summary.json`."""
        with self._checkpointer() as self.saves:
            return self._run()

    def _checkpointer(self) -> Checkpointer:
        """Open the checkpoints; the process that writes locks them."""
        keep = self.recipe.training.max_to_keep
        return Checkpointer(self.out / CHECKPOINTS, keep, read_only=not self.writes)

    def _run(self) -> dict[str, Any]:
        """Run, or resume, to the end."""
        training = self.recipe.training
        with ExitStack() as stack:
            self.opened = opened = stack.enter_context
            self.last = distributed.agreed(self.saves.latest(), "last checkpoint")
            self._saved = self.last if self.resuming else None
            at = (self.last or 0) if self.resuming else None
            reaching = self.rows if at else ()
            self.writer = opened(MetricsWriter(self.out, resume_at=at, reaching=reaching)) if self.writes else None
            self.written = distributed.agreed(self._written(), "summary")
            console = None if self.writes else Console(quiet=True)
            face = Progress(0, console, headline=self.headline, show=training.show, answers=self.answers)
            self.progress = opened(face)
            opened(show_log(self.phase, self.progress.message))
            if self._is_finished(self.recipe.training.max_steps or 0):
                self.saves.restore(self.last, target={}, subset=True, check=self._refuse_other_settings)
                return self._told_finished()
            watched = self.out if self.writes else None
            self.watchdog = opened(Watchdog(watched, training.watchdog_seconds))
            self.programs = opened(CompileCounter())
            names = self.recipe.tracking if self.writes else ()
            self.trackers = opened(Trackers(names, Tracked(self.out, asdict(self.recipe), at)))
            self.signals = opened(SignalHandler())
            try:
                return self._go()
            except Stopped as stopped:
                stopped.step = self._saved
                raise
            except OSError:
                self._refuse_another_folder()
                raise

    def _go(self) -> dict[str, Any]:
        total = self.progress.total = self.prepare()
        self._restore()
        if self._is_finished(total):
            return self._told_finished()
        self._keep_recipe()
        summary = self.written or self.beginning() | {"before": self._before()}
        self._summarise(summary)
        with self.signals.deferring():
            self.steps()
            if self._saved != self.step:
                self.save()
            self.saves.wait()
            self.signals.leave_if_asked()
        if (best := self.saves.best()) is not None:
            summary["best"] = best
        summary |= {"after": self.judged("after"), "steps": self.step, "seconds": round(self._seconds(), 1)}
        summary["programs"] = dict(self.programs.counts)
        self._summarise(summary)
        self.progress.done(summary, self._given_out)
        return summary

    def phase(self, name: str) -> None:
        """Begin the phase `name` in the progress display, the watchdog and the compile counter."""
        self.progress.phase(name)
        self.watchdog.phase(name)
        self.programs.phase(name)

    def write(self, record: Step) -> None:
        """Write a step's metrics to the folder and to the trackers."""
        self._metrics = record.metrics
        record.metrics["time/compile"] = self.programs.step(record.step)
        if self.writer is not None:
            self._refuse_another_folder()
            self.writer.step(record.metrics)
            self.trackers.log(record.step, record.metrics)

    def after_step(self, record: Step) -> None:
        """Save if a checkpoint is due, and end the run if a signal requested it. Called last in each step."""
        due = record.due(self.recipe.training.checkpoint_every_n_steps)
        if asked := self.signals.asked():
            self.save()
            self.saves.wait()
            raise Stopped(asked)
        if due:
            self.save()

    def keep_bad_batch(
        self, step: int, groups: Iterable[Group], arrays: Mapping[str, np.ndarray], error: NumbersError
    ) -> None:
        """Write the batch of a non-finite update into `bad/` for debugging, and report it."""
        if self.writes:
            place = write_bad_batch(self.out, step, groups, arrays)
            log.warning(f"{error.what}; its batch is kept: {place}.jsonl")

    def save(self) -> None:
        """Start writing a checkpoint."""
        self._saved = self.step
        if self.writer is None:
            return
        self.phase("save")
        self._refuse_another_folder()
        self.writer.sync()
        extra = {"data": self.loader.state(), "model": self.origin, "seconds": self._seconds(), **self.remembers()}
        extra["settings"] = settings_of(self.recipe)
        self.saves.save(self.step, self.state(), extra, score=self._score())

    def refuse_another_run(self, extra: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that was made with other settings, or from other initial weights.

        Args:
            extra: the JSON values of the checkpoint.
        """
        self._refuse_other_settings(extra)
        refuse_other_weights(extra["model"], self.origin, self.out)

    def _restore(self) -> None:
        if not self.resuming:
            return
        if self.last is None:
            self.phase("no checkpoint was written yet: starting from the beginning")
            return
        state, extra = self.saves.restore(self.last, target=self.state(), check=self.refuse_another_run)
        self.started -= extra["seconds"]
        self.load_state(state, extra, self.last)
        self.loader.restore(extra["data"])

    def _is_finished(self, total: int) -> bool:
        """Return whether the resumed run has made all of the `total` steps, and evaluated the result.

        Args:
            total: 0 when not known yet.
        """
        done = self.written or {}
        return self.last is not None and 0 < total <= self.last == done.get("steps") and "after" in done

    def _told_finished(self) -> dict[str, Any]:
        command, run = COMMANDS[self.recipe.method], self._given_out
        self.progress.message(f"this run is finished: it has made its {self.last} steps")
        longer = f"{command} --resume {run} --max-steps MORE"
        self.progress.message(f"to train longer: {longer}; to evaluate: covey eval {run}")
        return dict(self.written or {})

    def _keep_recipe(self) -> None:
        """Write the recipe with the overrides given with --resume, once they are accepted."""
        if self.writes and self.resuming and load_any(self.out) != self.recipe:
            text = to_yaml(self.recipe)
            refuse_secrets(text)
            replace_file(self.out / RECIPE, text.encode())

    def _refuse_other_settings(self, extra: Mapping[str, Any]) -> None:
        refuse_changed_settings(extra["settings"], settings_of(self.recipe), self.out)

    def _refuse_another_folder(self) -> None:
        if self.writes and not self.saves.holds():
            raise ResumeError(
                "the run folder was removed or replaced while the run was writing in it",
                want="a folder that is left alone until the run has ended",
                fix="begin the run again, or put the folder back and resume",
                where=str(self.out),
            )

    def _before(self) -> dict[str, Any] | None:
        """Return the evaluation before training; None when it was lost and the weights are already trained."""
        if not self.step:
            return self.judged("before")
        log.warning(f"there is no {SUMMARY}: the evaluation before training is left out, for training has begun")
        return None

    def _written(self) -> dict[str, Any] | None:
        """Return the summary of the resumed run, if it has written one."""
        path = self.out / SUMMARY
        if not (self.resuming and path.is_file()):
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            wrong = _unlike_a_summary(found)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise ResumeError(
                f"this is no summary of a run: {wrong}",
                want="what the run has written, with the figures from before training",
                fix="put the file back, or remove it: the figures from before training are then left out",
                where=str(path),
            )
        return dict(found)

    def _summarise(self, summary: Mapping[str, Any]) -> None:
        if self.writes:
            self._refuse_another_folder()
            write_summary(self.out, summary)

    def _score(self) -> float | None:
        """Return the score of the weights by the metric that the recipe names; None if this step has no such metric."""
        name = self.recipe.training.keep_best
        value, row = self._metrics.get(name), metric(name)
        return -value if value is not None and row is not None and row.lower_is_better else value

    def _worth_keeping(self) -> bool:
        """Return whether a step was made, even if its files were lost since, or a bad batch was kept."""
        return bool(self._metrics) or (self.out / BAD).exists()

    def _seconds(self) -> float:
        """Return the seconds that the run has taken, those before a resume included."""
        return time.monotonic() - self.started


def _unlike_a_summary(found: Any) -> str:
    """Explain why JSON is not a valid summary of a run, as far as it is used; empty when it is."""
    if not isinstance(found, dict) or not isinstance(found.get("before", ""), dict | None):
        return "it is no mapping with the figures under before"
    figures = found["before"] or {}
    strange = [name for name, value in figures.items() if isinstance(value, bool) or not isinstance(value, Figure)]
    return f"before.{strange[0]} is {figures[strange[0]]!r}, which is no number" if strange else ""


Figure = int | float | None
"""Value of an evaluation metric; None where nothing was measured."""

RECIPE = "recipe.yaml"
