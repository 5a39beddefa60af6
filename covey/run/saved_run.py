"""A run in its folder: it can be stopped and resumed, and tells its outputs what happens.

The learner and its data come from a recipe (`recipes.build`) or from a script (`train(..., out=)` of a learner). With
several processes the first shows progress.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil
from rich.console import Console

from covey.config.metrics import metric
from covey.config.recipe import COMMANDS, Recipe, SFTRecipe, is_from_python
from covey.data.rows import count_plain
from covey.display import show_log
from covey.errors import NumbersError, Stopped
from covey.files import require_entry
from covey.models.config import ModelConfig
from covey.monitor.display import StepLines
from covey.monitor.formats import SampleLine
from covey.monitor.progress import Progress
from covey.monitor.record import StepRecord
from covey.monitor.run_files import AFTER, METRICS, SAMPLES, SUMMARY
from covey.monitor.writer import read_rows
from covey.parallel import processes
from covey.parallel.processes import PeerLostError
from covey.registry import all_offered
from covey.run import loop
from covey.run.folder import RunFolder, describe_environment
from covey.run.outputs import Measured, Output, Outputs, Watcher
from covey.run.settings import check_same_settings, check_same_weights, settings_of
from covey.run.signals import SignalHandler
from covey.text.tokenizer import Tokenizer
from covey.train.allocator import release_free_memory
from covey.types import Group

log = logging.getLogger(__name__)

ANOTHER_FOLDER = 'undo that; or begin a new run: out="ANOTHER"'
"""Advice for a script with other settings than the run in its folder."""
SHOWN = {
    "rl": {"main_metric": "reward", "samples_file": SAMPLES},
    "sft": {"main_metric": "loss", "samples_file": AFTER},
}
"""Method of a run → the metric that is shown first, and the file that the last message names."""


class ReadyRun(NamedTuple):
    """A learner and its data, ready for the loop.

    Attributes:
        learner: an RL or SFT learner.
        loader: batches of training data.
        tokenizer, model: the tokenizer, and the shape of the model.
        held_out: rows of the evaluations before, during and after training.
        origin: origin of the initial weights.
        counts: numbers of used and unused training rows, for the summary.
        other_models: origin of reward model and critic, by the setting that names them.
        base: origin of the weights that a script's cluster loaded; `origin` has their checksum.
        former_origin: what older versions have recorded as the origin of the same weights; "" for the same.
    """

    learner: Any
    loader: Any
    tokenizer: Tokenizer
    model: ModelConfig
    held_out: Sequence[Any]
    origin: str
    counts: Mapping[str, int]
    other_models: Mapping[str, str] = MappingProxyType({})
    base: str = ""
    former_origin: Callable[[], str] = str


def memory_in_use() -> int:
    """Return the bytes in use: on the fullest accelerator of this process, or by this process if it has none."""
    stats = [device.memory_stats() for device in jax.local_devices() if device.platform != "cpu"]
    used = [int(each["bytes_in_use"]) for each in stats if each and "bytes_in_use" in each]
    return max(used) if used else int(psutil.Process().memory_info().rss)


def console_of_process() -> Console | None:
    """Return the console of a progress display: None for the standard console, or a quiet one after process 0."""
    return None if processes.here().is_first else Console(quiet=True)


def train_in_folder(
    recipe: Recipe | SFTRecipe, folder: RunFolder, make: Callable[["SavedRun"], ReadyRun]
) -> dict[str, Any]:
    """Train in an open folder what `make` returns; return the content of `summary.json`. A recipe's run that is
    finished is not made; a script's is, because its learner gets the weights.
    """
    shown: dict[str, Any] = {**SHOWN[recipe.method], "memory": memory_in_use}
    with Progress(0, console_of_process(), show=recipe.training.show, **shown) as progress:
        if not is_from_python(recipe) and folder.is_finished(recipe.training.max_steps or 0):
            with show_log(progress.phase, progress.message):
                folder.saves.restore(folder.last, target={}, subset=True, check=partial(check_settings, recipe, folder))
            return _tell_finished(recipe, folder, progress)
        with ExitStack() as stack:
            run = SavedRun(recipe, folder, progress, stack)
            try:
                run.train(make(run))
                return dict(run.summary)
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


class SavedRun(Outputs):
    """A run in its folder: it writes files and checkpoints, shows progress, and tells the other outputs.

    Args:
        recipe: the checked recipe; for a script, the settings of its learner.
        folder: the open folder of the run.
        progress: its display.
        stack: closes what the run holds open when it ends; outputs may add to it.

    Attributes:
        recipe, folder, progress, stack: see above.
        learner, loader, held_out: see `ReadyRun`.
        total: number of steps of the whole run.
        changed: settings that a resumed run has changed since its checkpoint, by name, with the former value in words.
        summary: content of `summary.json`.
        outputs: what else is told of the run, by name.
    """

    def __init__(self, recipe: Recipe | SFTRecipe, folder: RunFolder, progress: Progress, stack: ExitStack):
        super().__init__([])
        self.recipe, self.folder, self.progress, self.stack = recipe, folder, progress, stack
        self.started, self.total = time.monotonic(), 0
        self.changed: Mapping[str, str] = {}
        self.summary: dict[str, Any] = {}
        self.outputs: dict[str, Output] = {}
        offers = all_offered("covey.watchers").values()
        self._watchers: list[Watcher] = [stack.enter_context(load()(recipe, folder, progress)) for load in offers]
        stack.enter_context(show_log(self.phase, progress.message))
        self._signals = stack.enter_context(SignalHandler(second_ends_process=not is_from_python(recipe)))

    def train(self, ready: ReadyRun) -> None:
        """Train the learner of `ready` in this folder."""
        self.ready, self.learner, self.loader, self.held_out = ready, ready.learner, ready.loader, ready.held_out
        self.observers = [each for each in ready.learner.observers if not isinstance(each, StepLines)]
        loop.train(self.learner, self.loader, self.held_out, self)

    def phase(self, name: str) -> None:
        """Begin a phase in the display and the watchers."""
        self.progress.phase(name)
        for watcher in self._watchers:
            watcher.phase(name)
        if name == "update":  # the phase that needs the most memory, and that donates what a save reads
            self.folder.saves.wait_until_read()
            release_free_memory()

    def advance(self, done: int, total: int) -> None:
        """Show the progress of the phase."""
        self.progress.advance(done, total)

    def restore(self, total: int) -> bool:
        """Restore the last checkpoint of a resumed run; return whether its training is not finished."""
        self.total = self.progress.total = total
        environment = self.recipe.envs.environment if isinstance(self.recipe, Recipe) else None
        plain = count_plain(self.loader.rows, self.ready.tokenizer, environment)
        self.counts = {**self.ready.counts, "plain": plain}
        self._restore()
        if self.folder.is_finished(total):
            self.summary = _tell_finished(self.recipe, self.folder, self.progress)
            return False
        self.folder.update_recipe(self.recipe)
        self.folder.write_model(self.ready.model, self.ready.tokenizer, dtype=self.recipe.model.dtype)
        self.summary = dict(self.folder.summary or {})
        return True

    def _restore(self) -> None:
        folder, learner = self.folder, self.learner
        if not folder.resuming:
            return
        if folder.last is None:
            self.phase("no checkpoint was written yet: starting from the beginning")
            return
        shapes = learner.checkpoint_shapes(partial(folder.saves.shapes, folder.last))
        arrays, extra = folder.saves.restore(folder.last, target=shapes, check=self._check_checkpoint)
        seconds = require_entry(extra, "seconds", float)
        self.started -= seconds
        self.progress.seconds_before, self.progress.steps_before = seconds, folder.last
        learner.load_checkpoint(arrays, extra, folder.last, self.changed)
        learner.history.rows[:] = _read_history(folder.path)
        why = [
            x for name, x in self.changed.items() if name.endswith((".too_long", ".max_length", ".max_prompt_length"))
        ]
        self.loader.restore(require_entry(extra, "data", dict), why)

    def _check_checkpoint(self, extra: Mapping[str, Any]) -> None:
        """Refuse a checkpoint, by its JSON values, that was made with other settings or other initial weights."""
        self.changed = check_settings(self.recipe, self.folder, extra)
        if (origin := require_entry(extra, "model", str)) != self.ready.former_origin():
            check_same_weights(origin, self.ready.origin, self.folder.path)
        then = require_entry(extra, "other_models", dict) if self.recipe.method == "rl" else {}
        for name in then.keys() & self.ready.other_models.keys():
            check_same_weights(then[name], self.ready.other_models[name], self.folder.path, name)

    def needs_before(self) -> bool:
        """Return whether this is a new run. A resumed run that lost its summary has trained weights already."""
        if self.learner.step and not self.summary:
            log.warning(f"there is no {SUMMARY}: the evaluation before training is left out, for training has begun")
        return not self.learner.step and not self.summary

    def begin(self) -> None:
        """Write the summary, and begin the other outputs."""
        self.summary = self.summary or self._first_summary()
        self.folder.write_summary(self.summary)
        for name, load in all_offered("covey.outputs").items():
            with self._by_product(name):
                self.outputs[name] = load()()
        self._tell("begin", self, self.summary)
        if before := self.learner.evaluations.get("before"):
            self._tell("evaluation", "before", before)

    def _first_summary(self) -> dict[str, Any]:
        """Return the summary of a run that begins; packages count its rows by the entry points `covey.counts`."""
        counts = dict(self.counts)
        for load in all_offered("covey.counts").values():
            counts |= load()(self.recipe, self.loader.rows, self.held_out)
        return {
            "model": self.ready.origin,
            "data": counts,
            "has_chat_template": self.ready.tokenizer.chat_template is not None,
            "data_digest": self.loader.fingerprint["content"],
            "environment": describe_environment(),
            "before": None if self.learner.step else self.learner.evaluations.get("before", {}),
        }

    @contextmanager
    def training(self) -> Iterator[None]:
        """Train to the end and save the result; a signal meanwhile ends the run at a step that is saved."""
        with self._signals.deferring():
            yield
            if self.folder.saved != self.learner.step:
                self.save()
            self.folder.saves.wait()
            self._signals.raise_if_requested()

    def bad_batch(
        self, step: int, groups: Sequence[Group], arrays: Mapping[str, np.ndarray], error: NumbersError
    ) -> None:
        """Write the batch of an update that is not finite."""
        self.folder.keep_bad_batch(step, groups, arrays, error)

    def before_update(self, experience: Any) -> None:
        """Tell the outputs."""
        self._tell("before_update", experience)

    def step(self, record: StepRecord) -> None:
        """Write and show a step, tell the observers and outputs; save if a checkpoint is due, and end the run if a
        signal requested it.
        """
        for watcher in self._watchers:
            watcher.step(record)
        self.folder.write_step(record)
        self.progress.step(record.metrics, SampleLine.of(record.groups))
        super().step(record)
        self._tell("step", record)
        name = self._signals.requested()
        if name or record.due(self.recipe.training.checkpoint_every_n_steps):
            self.save()
        if name:
            self.folder.saves.wait()
            self._tell("end", "stopped")
            raise Stopped(name)

    def evaluation(self, name: str, measured: Measured) -> None:
        """Show an evaluation, write its completions, and tell the outputs."""
        self.progress.evaluation(name, measured.metrics, SampleLine.of(measured.shown))
        for ending, (groups, correct) in measured.answers.items():
            self.folder.write_answers(f"{name}{ending}", groups, correct)
        self._tell("evaluation", name, measured.metrics)

    def end(self) -> None:
        """Write the summary of a finished run, end the other outputs, and show the result."""
        if (best := self.folder.saves.best()) is not None:
            self.summary["best"] = best
        after = self.learner.evaluations.get("after", {})
        self.summary |= {"after": after, "steps": self.learner.step, "seconds": round(self._seconds(), 1)}
        for watcher in self._watchers:
            self.summary |= watcher.summary()
        self.folder.write_summary(self.summary)
        facts = {name: text for told in self._tell("end", "") for name, text in told.items()}
        script = is_from_python(self.recipe)
        self.progress.done(self.summary, self.folder.path_as_given, facts, chat=not script)

    def _tell(self, event: str, *args: Any) -> list[Any]:
        """Call a method of each output; leave out an output that raises."""
        told = []
        for name, output in list(self.outputs.items()):
            with self._by_product(name):
                told.append(getattr(output, event)(*args))
        return told

    @contextmanager
    def _by_product(self, name: str) -> Iterator[None]:
        """Log an error of the output `name`, and go on without it."""
        try:
            yield
        except Exception as error:
            self.outputs.pop(name, None)
            log.warning(f"the output {name} failed: {type(error).__name__}: {error}; the run goes on without it")

    def save(self) -> None:
        """Start writing a checkpoint."""
        self.folder.saved = self.learner.step
        self.phase("save")
        arrays, extra = self.learner.checkpoint()
        extra |= {"data": self.loader.state(), "model": self.ready.origin, "seconds": self._seconds()}
        extra |= {"settings": settings_of(self.recipe), "base": self.ready.base}
        extra |= {"other_models": dict(self.ready.other_models)} if self.recipe.method == "rl" else {}
        self.folder.save(self.learner.step, arrays, extra, self._score())

    def _score(self) -> float | None:
        """Return the score of the weights by the metric that the recipe names; None if this step has no such metric."""
        name = self.recipe.training.keep_best
        value, row = self.folder.metrics.get(name), metric(name)
        return -value if value is not None and row is not None and row.lower_is_better else value

    def _seconds(self) -> float:
        """Return the seconds that the run has taken, also before a resume."""
        return time.monotonic() - self.started


def check_settings(recipe: Recipe | SFTRecipe, folder: RunFolder, extra: Mapping[str, Any]) -> dict[str, str]:
    """Compare the settings of a run with the settings in a checkpoint; see `check_same_settings`."""
    fix = ANOTHER_FOLDER if is_from_python(recipe) else ""
    saved, now = require_entry(extra, "settings", dict), settings_of(recipe)
    if is_from_python(recipe) and "base" not in extra:
        saved |= {name: value for name, value in now.items() if name.startswith(NOT_OF_OLDER_SCRIPTS)}
    for name in saved.keys() & {"envs.environment", "envs.tools"} if is_from_python(recipe) else ():
        # The module of a class is `__main__` or its name, by how the script was started.
        saved |= {name: now[name]} if _members(saved[name]) == _members(now[name]) else {}
    return check_same_settings(saved, now, folder.path, fix)


def _members(names: Any) -> list[str]:
    """Return the names of classes and functions without their modules."""
    return [str(name).rpartition(":")[2] for name in (names if isinstance(names, list) else [names])]


NOT_OF_OLDER_SCRIPTS = ("model.lora.", "rewards", "envs.", "reward_model", "reward_safety.", "critic")
"""Beginnings of the settings that older versions did not record of a script's run."""


def _read_history(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps that the run in `folder` has made, NaN where a value was not finite."""
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_rows(folder / METRICS)
    ]


def _describe_stop(recipe: Recipe | SFTRecipe, folder: RunFolder, stopped: Stopped) -> str:
    """Return the line that says which step of a stopped run is saved, and how the run goes on."""
    by_command = f"to go on: {COMMANDS[recipe.method]} --resume {folder.path_as_given}"
    saved = f"step {stopped.step} is saved; {'the same call goes on' if is_from_python(recipe) else by_command}"
    return f"stopped by {stopped.signal}; {'nothing is saved' if stopped.step is None else saved}"


def _tell_finished(recipe: Recipe | SFTRecipe, folder: RunFolder, progress: Progress) -> dict[str, Any]:
    command = f"{COMMANDS[recipe.method]} --resume {folder.path_as_given} --max-steps MORE"
    by_command = f"{command}; to evaluate: covey eval {folder.path_as_given}"
    by_script = "make a new learner with a larger max_steps, and give it the same out"
    progress.message(f"this run is finished: it has made its {folder.last} steps")
    progress.message(f"to train longer: {by_script if is_from_python(recipe) else by_command}")
    return dict(folder.summary or {})
