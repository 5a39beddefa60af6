"""Base of RL and supervised runs: a run folder, and a loop that can be stopped and resumed.

A run opens its resources, makes its learner, restores the checkpoint if it resumes, evaluates, trains, and evaluates
again. The learner and its data come from a recipe (`from_recipe` in `rl` and `sft`) or from a script (`learners`); from
there on both are the same run. `folder` has the files of a run. During the run, `heartbeat.json` holds the current
phase. With several processes the first shows progress.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Generic, Self

from jax.sharding import Mesh

from covey.allocator import release_free_memory
from covey.config.metrics import metric
from covey.config.recipe import COMMANDS, Recipe, RecipeT, SFTRecipe, is_from_python, load_any
from covey.data import Dataset
from covey.data.duplicates import data_counts
from covey.data.loader import PromptLoader
from covey.display import echo, show_log
from covey.errors import Stopped
from covey.files import require_entry
from covey.models.config import ModelConfig
from covey.models.dtypes import AUTO, resolve_compute_dtype
from covey.monitor.progress import Progress
from covey.monitor.record import Observer, StepLines, StepRecord
from covey.monitor.run_files import METRICS, SAMPLES, SUMMARY
from covey.monitor.status import STOPPED
from covey.monitor.trackers import Tracked, Trackers
from covey.monitor.writer import read_rows
from covey.parallel import distributed, mesh_from_config
from covey.parallel.checks import check_shared_folder
from covey.parallel.wire import PeerLostError
from covey.run.folder import RunFolder, create_folder, describe_environment, reopen_folder
from covey.run.inference import console_of_process
from covey.run.load_model import check_same_weights, with_absolute_paths
from covey.run.observers import CompileCounter, memory_in_use
from covey.run.outputs import Output
from covey.run.settings import check_same_recipe, check_same_settings, settings_of
from covey.run.signals import SignalHandler
from covey.run.watchdog import Watchdog
from covey.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ANOTHER_FOLDER = 'undo that; or begin a new run: out="ANOTHER"'
"""Advice for a script whose settings are not those of the run in its folder."""


@dataclass(frozen=True)
class RunResources:
    """Resources that a run holds open from its start to its end.

    Attributes:
        phase: function that begins a phase in the progress display, the watchdog and the compile counter.
        stack: closes further contexts when the run ends.
        started: time at which they were opened, on the monotonic clock.
    """

    folder: RunFolder
    progress: Progress
    phase: Callable[[str], None]
    compile_counter: CompileCounter
    trackers: Trackers
    signals: SignalHandler
    stack: ExitStack
    started: float = field(default_factory=time.monotonic)


@contextmanager
def open_resources(recipe: Recipe | SFTRecipe, folder: RunFolder, progress: Progress) -> Iterator[RunResources]:
    """Open the watchdog, trackers and signal handler of a run; they are closed in the reverse order."""
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


@dataclass(eq=False)
class Run(ABC, Generic[RecipeT]):
    """One run in its folder.

    Attributes:
        recipe: the checked recipe; that of a script's run has the learner's settings.
        resources: folder, display, trackers and signal handler of the run.
        learner: the learner that it trains.
        loader: batches of training data.
        held_out: rows of the evaluations before, during and after training.
        origin: origin of the initial weights.
        counts: numbers of the training rows that are used and of those that are not, for the summary, which has numbers
            of equal rows beside them.
        total: number of steps of the whole run.
        trained: the cluster or the trainer, whose arrays are those of a checkpoint.
        former_origin: what older versions have recorded as the origin of the same weights; "" for the same.
        changed: settings that a resumed run has changed since its checkpoint, by name, with the former value in words.
        tokenizer, model_config: of the model that is trained.
        base: origin of the weights that a script's cluster loaded; `origin` has their checksum.
    """

    recipe: RecipeT
    resources: RunResources
    learner: Any
    loader: PromptLoader
    held_out: Sequence[Any]
    origin: str
    counts: Mapping[str, int]
    trained: Any = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    model_config: ModelConfig = field(init=False)
    former_origin: str = field(init=False, default="")
    changed: Mapping[str, str] = field(init=False, default_factory=dict)
    base: str = field(init=False, default="")

    headline: ClassVar[str] = "reward"
    answers: ClassVar[str] = SAMPLES
    step_files: ClassVar[tuple[str, ...]] = (METRICS, SAMPLES)
    """Names of the files that get lines at each step."""

    def __post_init__(self) -> None:
        self.folder, self.progress, self.phase = self.resources.folder, self.resources.progress, self.resources.phase
        self.outputs = _outputs()
        self.started = self.resources.started
        self.total = self.prepare()

    @classmethod
    def start(cls, recipe: RecipeT, out: Path) -> dict[str, Any]:
        """Run `recipe` in the new folder `out`; return the content of `summary.json`."""
        recipe = with_absolute_paths(recipe)
        return cls._run_in(recipe, out, recipe, create_folder)

    @classmethod
    def resume(cls, recipe: RecipeT, out: Path) -> dict[str, Any]:
        """Resume the run in the folder `out`; return the content of `summary.json`."""
        # The run keeps the type of products that it began with, on any machine.
        began: Any = load_any(out)
        if with_absolute_paths(began) == began:  # an older run may have been saved with relative ones
            recipe = with_absolute_paths(recipe)
        return cls._run_in(recipe, out, began, partial(reopen_folder, step_files=cls.step_files))

    @classmethod
    def _run_in(
        cls,
        recipe: RecipeT,
        out: Path,
        began: Recipe | SFTRecipe,
        open_folder: Callable[[Path, RecipeT], AbstractContextManager[RunFolder]],
    ) -> dict[str, Any]:
        """Run `recipe` in `out`, in the type of products that the recipe `began` leads to."""
        check_shared_folder(out)
        recipe = _with_compute_dtype(recipe, resolve_compute_dtype(began.model.compute_dtype))
        data, mesh = cls._load_inputs(recipe)
        with open_folder(out, recipe) as folder:
            return cls.execute(recipe, folder, partial(cls.from_recipe, recipe, data, mesh))

    @classmethod
    @abstractmethod
    def load_data(cls, recipe: RecipeT) -> Dataset:
        """Load and check the data of a recipe."""

    @classmethod
    @abstractmethod
    def from_recipe(cls, recipe: RecipeT, data: Dataset, mesh: Mesh | None, resources: RunResources) -> Self:
        """Make the run of a recipe: load its model and make its learner.

        Args:
            recipe: the checked recipe.
            data: its data.
            mesh: the devices to train on; the default device when not given.
            resources: folder, display, trackers and signal handler of the run.
        """

    @abstractmethod
    def prepare(self) -> int:
        """Check the data, build the trainers, and return the number of steps of the whole run."""

    @abstractmethod
    def measure(self, name: str) -> dict[str, Any]:
        """Evaluate the held-out rows, show the result and write it to the folder as `name`; return the metrics."""

    @abstractmethod
    def show(self, record: StepRecord) -> None:
        """Show a step."""

    @abstractmethod
    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return the JSON values of a checkpoint other than those on model and data."""

    @abstractmethod
    def load_metadata(self, extra: Mapping[str, Any], step: int) -> None:
        """Restore these values."""

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of a checkpoint."""
        return self.trained.state()  # type: ignore[no-any-return]

    def array_shapes(self, step: int) -> dict[str, Any]:
        """Return the shapes of the arrays of the checkpoint `step`."""
        return self.trained.state_shapes()  # type: ignore[no-any-return]

    def load_arrays(self, arrays: dict[str, Any], step: int) -> None:
        """Restore the arrays of the checkpoint `step`."""
        self.trained.load_state(arrays, step)

    @classmethod
    def _load_inputs(cls, recipe: RecipeT) -> tuple[Dataset, Mesh | None]:
        """Load data and mesh, and show the forms of the rows. Mistakes in them end the run before it has a folder."""
        check_same_recipe(recipe, "the same command for all")
        mesh = mesh_from_config(recipe.model.mesh)
        show = echo if distributed.is_first() else lambda text: None
        with show_log(info=show, warning=show):
            return cls.load_data(recipe), mesh

    @classmethod
    def execute(
        cls,
        recipe: RecipeT,
        folder: RunFolder,
        make: Callable[[RunResources], Self],
    ) -> dict[str, Any]:
        """Open the resources of a run, make the run and execute it; return the content of `summary.json`. A recipe's
        run that is finished is not made; a script's is, because its learner gets the weights.
        """
        shown: dict[str, Any] = {"headline": cls.headline, "answers": cls.answers, "memory": memory_in_use}
        with Progress(0, console_of_process(), show=recipe.training.show, **shown) as progress:
            if not is_from_python(recipe) and folder.is_finished(recipe.training.max_steps or 0):
                with show_log(progress.phase, progress.message):
                    folder.saves.restore(
                        folder.last, target={}, subset=True, check=partial(_check_settings, recipe, folder)
                    )
                return _report_finished(recipe, folder, progress)
            with open_resources(recipe, folder, progress) as resources:
                try:
                    run = make(resources)
                    with run.observing():
                        return run.run()
                except Stopped as stopped:
                    stopped.step = folder.saved
                    progress.message(_describe_stop(recipe, folder, stopped))
                    raise
                except PeerLostError as error:
                    if error.stopped:
                        error.stopped.step = folder.saved
                    raise
                except OSError:
                    folder.check_not_replaced()
                    raise

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Write and show the steps of the learner, beside the observers that a script gave."""
        learner = self.learner
        observers, on_phase, on_bad_batch = learner.observers, learner.on_phase, learner.on_bad_batch
        others: list[Observer] = [observer for observer in observers if not isinstance(observer, StepLines)]
        learner.observers = [self.write, self.show, *others, self.after_step]
        learner.on_phase = _both(self.phase, on_phase)
        learner.on_bad_batch = _both(self.folder.keep_bad_batch, on_bad_batch)
        learner.before_update = lambda x: self._call(lambda output: output.before_update(x))
        try:
            yield
        finally:
            self.outputs = []
            learner.observers, learner.on_phase, learner.on_bad_batch = observers, on_phase, on_bad_batch

    def run(self) -> dict[str, Any]:
        """Restore, evaluate, train and evaluate again; return the content of `summary.json`."""
        self.progress.total = self.total
        self._restore()
        if self.folder.is_finished(self.total):
            return _report_finished(self.recipe, self.folder, self.progress)
        self.folder.update_recipe(self.recipe)
        self.folder.write_model(self.model_config, self.tokenizer, dtype=self.recipe.model.dtype)
        summary = self.folder.summary or self._begin_summary()
        self.folder.write_summary(summary)
        self._call(lambda output: output.begin(self, summary))
        self._train_and_save()
        if (best := self.folder.saves.best()) is not None:
            summary["best"] = best
        summary |= {"after": self.evaluate("after"), "steps": self.learner.step, "seconds": round(self._seconds(), 1)}
        summary["programs"] = dict(self.resources.compile_counter.counts)
        self.folder.write_summary(summary)
        self.progress.done(
            summary,
            self.folder.path_as_given,
            report=self._end("").get("report", ""),
            chat=not is_from_python(self.recipe),
        )
        return summary

    def evaluate(self, name: str) -> dict[str, Any]:
        """Run the evaluation `name`, if there are held-out rows, and return its metrics."""
        if not self.held_out:
            return {}
        self.phase(f"evaluating {name} training")
        metrics = self.measure(name)
        self.resources.trackers.log(self.learner.step, {f"eval/{what}": value for what, value in metrics.items()})
        return metrics

    def _begin_summary(self) -> dict[str, Any]:
        """Evaluate, and return the summary of a run that has not trained yet."""
        return {
            "model": self.origin,
            "data": {**self.counts, **data_counts(self.recipe, self.loader.rows, self.held_out)},
            "has_chat_template": self.tokenizer.chat_template is not None,
            "data_digest": self.loader.fingerprint["content"],
            "environment": describe_environment(),
            "before": self._evaluate_before(),
        }

    def write(self, record: StepRecord) -> None:
        """Write a step to the folder, and its metrics to the trackers."""
        record.metrics["time/compile"] = self.resources.compile_counter.step(record.step)
        self.folder.write_step(record)
        self.track(record)

    def track(self, record: StepRecord) -> None:
        """Send a step to the trackers."""
        self.resources.trackers.log(record.step, record.metrics)

    def after_step(self, record: StepRecord) -> None:
        """Save if a checkpoint is due, and end the run if a signal requested it. Called last in each step."""
        self._call(lambda output: output.step(record))
        due = record.due(self.recipe.training.checkpoint_every_n_steps)
        if name := self.resources.signals.requested():
            self.save()
            self.folder.saves.wait()
            self._end(STOPPED)
            raise Stopped(name)
        if due:
            self.save()

    def _call(self, use: Callable[[Output], Any]) -> None:
        """Call `use` with each output; one that raises is logged."""
        for output in self.outputs:
            try:
                use(output)
            except Exception as error:  # outputs are by-products, and the run goes on without them
                log.warning(f"{type(output).__name__} failed: {type(error).__name__}: {error}; the run goes on")

    def _end(self, status: str) -> dict[str, str]:
        """End the outputs of a run in this state; return their facts for its last message."""
        facts: dict[str, str] = {}
        self._call(lambda output: facts.update(output.end(status)))
        return facts

    def save(self) -> None:
        """Start writing a checkpoint."""
        self.folder.saved = self.learner.step
        self.phase("save")
        extra = {"data": self.loader.state(), "model": self.origin, "seconds": self._seconds()}
        extra |= {**self.checkpoint_metadata(), "settings": settings_of(self.recipe), "base": self.base}
        self.folder.save(self.learner.step, self.arrays(), extra, self._score())

    def check_same_run(self, extra: Mapping[str, Any]) -> None:
        """Refuse a checkpoint, by its JSON values, that was made with other settings or other initial weights."""
        self.changed = _check_settings(self.recipe, self.folder, extra)
        if (origin := require_entry(extra, "model", str)) != self.former_origin:
            check_same_weights(origin, self.origin, self.folder.path)

    def _restore(self) -> None:
        folder = self.folder
        if not folder.resuming:
            return
        if folder.last is None:
            self.phase("no checkpoint was written yet: starting from the beginning")
            return
        state, extra = folder.saves.restore(
            folder.last, target=self.array_shapes(folder.last), check=self.check_same_run
        )
        seconds = require_entry(extra, "seconds", float)
        self.started -= seconds
        self.progress.seconds_before, self.progress.steps_before = seconds, folder.last
        self.load_arrays(state, folder.last)
        self.load_metadata(extra, folder.last)
        self.learner.history.rows[:] = _read_history(folder.path)
        why = [
            x for name, x in self.changed.items() if name.endswith((".too_long", ".max_length", ".max_prompt_length"))
        ]
        self.loader.restore(require_entry(extra, "data", dict), why)

    def _evaluate_before(self) -> dict[str, Any] | None:
        """Return the evaluation before training; None when it was lost and the weights are already trained."""
        if not self.learner.step:
            return self.evaluate("before")
        log.warning(f"there is no {SUMMARY}: the evaluation before training is left out, for training has begun")
        return None

    def train(self) -> None:
        """Train to the last step."""
        self.learner.train(self.loader, self.held_out or None)

    def _train_and_save(self) -> None:
        """Train to the end and save the result; a signal meanwhile ends the run at a step that is saved."""
        with self.resources.signals.deferring():
            self.train()
            if self.folder.saved != self.learner.step:
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


def _outputs() -> list[Output]:
    """Return an output of each entry point of the group `covey.outputs`, in the order of their names."""
    return [point.load()() for point in sorted(entry_points(group="covey.outputs"), key=lambda point: point.name)]


def _with_compute_dtype(recipe: RecipeT, chosen: Any) -> RecipeT:
    """Return `recipe` with the type of products that was chosen, and report it where the recipe leaves the choice."""
    if recipe.model.compute_dtype != AUTO:
        return recipe
    if distributed.is_first():
        echo(f"model.compute_dtype auto: this run computes in {chosen}")
    model: Any = replace(recipe.model, compute_dtype=chosen)
    return replace(recipe, model=model)


def _check_settings(recipe: Recipe | SFTRecipe, folder: RunFolder, extra: Mapping[str, Any]) -> dict[str, str]:
    fix = ANOTHER_FOLDER if is_from_python(recipe) else ""
    saved, now = require_entry(extra, "settings", dict), settings_of(recipe)
    if is_from_python(recipe) and "base" not in extra:
        saved |= {name: value for name, value in now.items() if name.startswith(NOT_OF_OLDER_SCRIPTS)}
    for name in saved.keys() & {"envs.environment", "envs.tools"} if is_from_python(recipe) else ():
        # The same class is one of `__main__` or of a named module, by how the script was started.
        saved |= {name: now[name]} if _members(saved[name]) == _members(now[name]) else {}
    return check_same_settings(saved, now, folder.path, fix)


def _members(names: Any) -> list[str]:
    """Return the names of classes and functions without their modules."""
    return [str(name).rpartition(":")[2] for name in (names if isinstance(names, list) else [names])]


NOT_OF_OLDER_SCRIPTS = ("model.lora.", "rewards", "envs.", "reward_model", "reward_safety.", "critic")
"""Beginnings of the settings that older versions did not record of a script's run."""


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call


def _read_history(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps that the run in `folder` has made, NaN where a value was not finite."""
    rows = read_rows(folder / METRICS)
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def _describe_stop(recipe: Recipe | SFTRecipe, folder: RunFolder, stopped: Stopped) -> str:
    """Return the line that says which step of a stopped run is saved, and how the run goes on."""
    by_command = f"to go on: {COMMANDS[recipe.method]} --resume {folder.path_as_given}"
    saved = f"step {stopped.step} is saved; {'the same call goes on' if is_from_python(recipe) else by_command}"
    return f"stopped by {stopped.signal}; {'nothing is saved' if stopped.step is None else saved}"


def _report_finished(recipe: Recipe | SFTRecipe, folder: RunFolder, progress: Progress) -> dict[str, Any]:
    command = f"{COMMANDS[recipe.method]} --resume {folder.path_as_given} --max-steps MORE"
    by_command = f"{command}; to evaluate: covey eval {folder.path_as_given}"
    by_script = "make a new learner with a larger max_steps, and give it the same out"
    progress.message(f"this run is finished: it has made its {folder.last} steps")
    progress.message(f"to train longer: {by_script if is_from_python(recipe) else by_command}")
    return dict(folder.summary or {})
