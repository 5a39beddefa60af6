"""Base of RL and supervised runs: a run folder, and a loop that can be stopped and resumed.

A run opens its resources, loads model and data, restores the checkpoint if it resumes, evaluates, trains, and evaluates
again. `folder` has the files of a run. During the run, `heartbeat.json` holds the current phase. With several processes
the first shows progress.

The modules `rl` and `sft` define what a run trains, and how.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from jax.sharding import Mesh
from rich.console import Console

from covey.allocator import release_free_memory
from covey.config.metrics import metric
from covey.config.recipe import COMMANDS, Recipe, SFTRecipe, is_from_python, load_any, to_yaml
from covey.data import Dataset
from covey.data.loader import PromptLoader
from covey.display import echo, show_log
from covey.errors import Stopped
from covey.models.dtypes import AUTO, resolve_compute_dtype
from covey.monitor.progress import Progress
from covey.monitor.record import StepRecord
from covey.monitor.run_files import METRICS, SAMPLES, SUMMARY
from covey.monitor.trackers import Tracked, Trackers
from covey.parallel import distributed, mesh_from_config
from covey.parallel.checks import check_shared_folder
from covey.report import REPORT
from covey.run.folder import RunFolder, create_folder, describe_environment, reopen_folder
from covey.run.load_model import refuse_other_weights
from covey.run.observers import CompileCounter, FindingsLog, ReportWriter, memory_in_use
from covey.run.settings import refuse_changed_settings, settings_of
from covey.run.signals import SignalHandler
from covey.run.user_modules import check_same_modules
from covey.run.watchdog import Watchdog
from covey.train.json_lines import require_entry

log = logging.getLogger(__name__)

RecipeT = TypeVar("RecipeT", Recipe, SFTRecipe)


@dataclass(frozen=True)
class RunResources:
    """Resources that a run holds open from its start to its end.

    Attributes:
        phase: function that begins a phase in the progress display, the watchdog and the compile counter.
        stack: closes further contexts when the run ends.
    """

    folder: RunFolder
    progress: Progress
    phase: Callable[[str], None]
    compile_counter: CompileCounter
    trackers: Trackers
    signals: SignalHandler
    stack: ExitStack


@contextmanager
def open_resources(recipe: Recipe | SFTRecipe, folder: RunFolder, progress: Progress) -> Iterator[RunResources]:
    """Open what a run needs beside its folder and the progress display."""
    with ExitStack() as stack:
        watched = folder.path if folder.writes else None
        watchdog = stack.enter_context(Watchdog(watched, recipe.training.watchdog_seconds, status=progress.status))
        compile_counter = stack.enter_context(CompileCounter(progress.compiling))

        def phase(name: str) -> None:
            for listener in (progress, watchdog, compile_counter):
                listener.phase(name)
            if name == "update":  # the phase that needs the most memory, and that donates what a save reads
                folder.saves.wait_until_read()
                release_free_memory()

        stack.enter_context(show_log(phase, progress.message))
        tracked = Tracked(folder.path, asdict(recipe), folder.resume_at)
        trackers = stack.enter_context(Trackers(recipe.tracking if folder.writes else (), tracked))
        signals = stack.enter_context(SignalHandler(second_ends_process=not is_from_python(recipe)))
        yield RunResources(folder, progress, phase, compile_counter, trackers, signals, stack)


class Run(ABC, Generic[RecipeT]):
    """One run in its folder. A subclass loads all that it trains when it is made.

    Args:
        recipe: the checked recipe.
        data: its data.
        mesh: the devices to train on; the default device when not given.
        resources: what it holds open.

    Attributes:
        loader: batches of training data.
        origin: origin of the initial weights.
        total: number of steps of the whole run.
    """

    headline: ClassVar[str] = "reward"
    answers: ClassVar[str] = SAMPLES
    step_files: ClassVar[tuple[str, ...]] = (METRICS, SAMPLES)
    """Names of the files that get lines at each step."""
    loader: PromptLoader
    origin: str
    total: int

    def __init__(self, recipe: RecipeT, data: Dataset, mesh: Mesh | None, resources: RunResources):
        self.recipe: RecipeT = recipe
        self.data, self.mesh, self.resources = data, mesh, resources
        self.folder, self.progress, self.phase = resources.folder, resources.progress, resources.phase
        self.reports = ReportWriter(resources.folder)
        self.started = time.monotonic()

    @classmethod
    def start(cls, recipe: RecipeT, out: Path) -> dict[str, Any]:
        """Run `recipe` in the new folder `out`; return the content of `summary.json`."""
        check_shared_folder(out)
        recipe = _with_compute_dtype(recipe, resolve_compute_dtype(recipe.model.compute_dtype))
        data, mesh = cls._load_inputs(recipe)
        with create_folder(out, recipe) as folder:
            return cls._execute(recipe, folder, partial(cls, recipe, data, mesh))

    @classmethod
    def resume(cls, recipe: RecipeT, out: Path) -> dict[str, Any]:
        """Resume the run in the folder `out`; return the content of `summary.json`."""
        check_shared_folder(out)
        if recipe.model.compute_dtype == AUTO:  # the run keeps the type that it began with, on any machine
            recipe = _with_compute_dtype(recipe, resolve_compute_dtype(load_any(out).model.compute_dtype))
        data, mesh = cls._load_inputs(recipe)
        with reopen_folder(out, recipe, cls.step_files) as folder:
            return cls._execute(recipe, folder, partial(cls, recipe, data, mesh))

    @classmethod
    @abstractmethod
    def load_data(cls, recipe: RecipeT) -> Dataset:
        """Load and check the data of a recipe."""

    @abstractmethod
    def evaluate(self, name: str) -> dict[str, Any]:
        """Run the evaluation `name`, show it and write it to the folder."""

    @abstractmethod
    def initial_summary(self) -> dict[str, Any]:
        """Return the summary's entries on model and data."""

    @abstractmethod
    def train(self) -> None:
        """Train to the end; call `after_step` after each step."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of optimizer updates made."""

    @abstractmethod
    def state(self) -> Any:
        """Return the arrays of a checkpoint."""

    @abstractmethod
    def state_shapes(self) -> Any:
        """Return the shapes of `state()`, with their shardings."""

    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return the JSON values of a checkpoint other than those on model and data."""
        return {}

    @abstractmethod
    def load_state(self, state: Any, extra: Mapping[str, Any], step: int) -> None:
        """Restore a checkpoint."""

    @classmethod
    def _load_inputs(cls, recipe: RecipeT) -> tuple[Dataset, Mesh | None]:
        """Return data and mesh, and show the forms of the rows; what is wrong with them is found before a folder is
        made.
        """
        distributed.refuse_differences("recipe", lambda: to_yaml(recipe), "the same command for all")
        check_same_modules(recipe)
        mesh = mesh_from_config(recipe.model.mesh)
        show = echo if distributed.is_first() else _show_nothing
        with show_log(info=show, warning=show):
            return cls.load_data(recipe), mesh

    @classmethod
    def _execute(
        cls, recipe: RecipeT, folder: RunFolder, make: Callable[[RunResources], "Run[RecipeT]"]
    ) -> dict[str, Any]:
        with cls.make_progress(recipe, folder) as progress:
            if folder.is_finished(recipe.training.max_steps or 0):
                with show_log(progress.phase, progress.message):
                    check = lambda extra: _refuse_changed_settings(recipe, extra, folder)  # noqa: E731
                    folder.saves.restore(folder.last, target={}, subset=True, check=check)
                return _report_finished(recipe, folder, progress)
            return cls.execute(recipe, folder, progress, make)

    @classmethod
    def make_progress(cls, recipe: RecipeT, folder: RunFolder) -> Progress:
        """Return the progress display of a run in `folder`; only the first process shows one."""
        console = None if folder.writes else Console(quiet=True)
        how: dict[str, Any] = {"headline": cls.headline, "answers": cls.answers, "memory": memory_in_use}
        return Progress(0, console, show=recipe.training.show, **how)

    @classmethod
    def execute(
        cls,
        recipe: RecipeT,
        folder: RunFolder,
        progress: Progress,
        make: Callable[[RunResources], "Run[RecipeT]"],
    ) -> dict[str, Any]:
        """Open the resources of a run, make the run with `make` and execute it; return what `summary.json` holds."""
        with open_resources(recipe, folder, progress) as resources:
            try:
                return make(resources).run()
            except Stopped as stopped:
                stopped.step = folder.saved
                raise
            except distributed.PeerError as error:
                if error.stopped:
                    error.stopped.step = folder.saved
                raise
            except OSError:
                folder.refuse_replaced()
                raise

    def run(self) -> dict[str, Any]:
        """Restore, evaluate, train and evaluate again; return the content of `summary.json`."""
        self.progress.total = self.total
        self._restore()
        if self.folder.is_finished(self.total):
            return _report_finished(self.recipe, self.folder, self.progress)
        self.folder.update_recipe(self.recipe)
        summary = self.folder.summary or self._begin_summary()
        self.folder.write_summary(summary)
        self.findings = FindingsLog(self.recipe, self.folder, summary.get("before"))
        self._train_and_save()
        if (best := self.folder.saves.best()) is not None:
            summary["best"] = best
        summary |= {"after": self.evaluate("after"), "steps": self.step, "seconds": round(self._seconds(), 1)}
        summary["programs"] = dict(self.resources.compile_counter.counts)
        self.folder.write_summary(summary)
        self.findings.end()
        report = self.folder.given / REPORT if self.reports.write() else ""
        self.progress.done(summary, self.folder.given, report, chat=not is_from_python(self.recipe))
        return summary

    def _begin_summary(self) -> dict[str, Any]:
        """Return the summary of what is known before training; the evaluation is made here."""
        recorded = {"data_digest": self.loader.fingerprint["content"], "environment": describe_environment()}
        return self.initial_summary() | recorded | {"before": self._evaluate_before()}

    def write(self, record: StepRecord) -> None:
        """Write a step's metrics to the folder and to the trackers."""
        record.metrics["time/compile"] = self.resources.compile_counter.step(record.step)
        self.folder.write_metrics(record.metrics)
        self.resources.trackers.log(record.step, record.metrics)

    def after_step(self, record: StepRecord) -> None:
        """Save if a checkpoint is due, and end the run if a signal requested it. Called last in each step."""
        self.findings.step(record.metrics)
        due = record.due(self.recipe.training.checkpoint_every_n_steps)
        if name := self.resources.signals.requested():
            self.save()
            self.folder.saves.wait()
            self.reports.write()
            raise Stopped(name)
        if due:
            self.save()
        self.reports.write_if_due()

    def save(self) -> None:
        """Start writing a checkpoint."""
        self.folder.saved = self.step
        self.phase("save")
        extra = {"data": self.loader.state(), "model": self.origin, "seconds": self._seconds()}
        extra |= {**self.checkpoint_metadata(), "settings": settings_of(self.recipe)}
        self.folder.save(self.step, self.state(), extra, self._score())

    def refuse_another_run(self, extra: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that was made with other settings, or from other initial weights.

        Args:
            extra: the JSON values of the checkpoint.
        """
        self.refuse_other_settings(extra)

    def refuse_other_settings(self, extra: Mapping[str, Any], fix: str = "") -> None:
        """Refuse a checkpoint that was made with other settings or weights; `fix` replaces advice for commands."""
        saved = require_entry(extra, "settings", dict)
        refuse_changed_settings(saved, settings_of(self.recipe), self.folder.path, fix)
        refuse_other_weights(require_entry(extra, "model", str), self.origin, self.folder.path)

    def _restore(self) -> None:
        folder = self.folder
        if not folder.resuming:
            return
        if folder.last is None:
            self.phase("no checkpoint was written yet: starting from the beginning")
            return
        state, extra = folder.saves.restore(folder.last, target=self.state_shapes(), check=self.refuse_another_run)
        seconds = require_entry(extra, "seconds", float)
        self.started -= seconds
        self.progress.seconds_before, self.progress.steps_before = seconds, folder.last
        self.load_state(state, extra, folder.last)
        self.loader.restore(require_entry(extra, "data", dict))

    def _evaluate_before(self) -> dict[str, Any] | None:
        """Return the evaluation before training; None when it was lost and the weights are already trained."""
        if not self.step:
            return self.evaluate("before")
        log.warning(f"there is no {SUMMARY}: the evaluation before training is left out, for training has begun")
        return None

    def _train_and_save(self) -> None:
        """Train to the end and save the result; a signal meanwhile ends the run at a step that is saved."""
        with self.resources.signals.deferring():
            self.train()
            if self.folder.saved != self.step:
                self.save()
            self.folder.saves.wait()
            self.resources.signals.raise_if_requested()

    def _score(self) -> float | None:
        """Return the score of the weights by the metric that the recipe names; None if this step has no such metric."""
        name = self.recipe.training.keep_best
        value, row = self.folder.metrics.get(name), metric(name)
        return -value if value is not None and row is not None and row.lower_is_better else value

    def _seconds(self) -> float:
        """Return the seconds that the run has taken, those before a resume included."""
        return time.monotonic() - self.started


def _show_nothing(text: str) -> None:
    """Show nothing: the first process shows it for all."""


def _with_compute_dtype(recipe: RecipeT, chosen: Any) -> RecipeT:
    """Return `recipe` with the type of products that was chosen, and report it where the recipe leaves the choice."""
    if recipe.model.compute_dtype != AUTO:
        return recipe
    if distributed.is_first():
        echo(f"model.compute_dtype auto: this run computes in {chosen}")
    model: Any = replace(recipe.model, compute_dtype=chosen)
    return replace(recipe, model=model)


def _refuse_changed_settings(recipe: Recipe | SFTRecipe, extra: Mapping[str, Any], folder: RunFolder) -> None:
    refuse_changed_settings(require_entry(extra, "settings", dict), settings_of(recipe), folder.path)


def _report_finished(recipe: Recipe | SFTRecipe, folder: RunFolder, progress: Progress) -> dict[str, Any]:
    command = f"{COMMANDS[recipe.method]} --resume {folder.given} --max-steps MORE"
    longer = f"{command}; to evaluate: covey eval {folder.given}"
    if is_from_python(recipe):
        longer = "make a new learner with a larger max_steps, and give it the same out"
    progress.message(f"this run is finished: it has made its {folder.last} steps")
    progress.message(f"to train longer: {longer}")
    return dict(folder.summary or {})
