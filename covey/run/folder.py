"""Write and read the folder of a run (`monitor.run_files` lists its files). The lock of `checkpoints/` keeps a second
writer out. With several processes the first writes; all read when resuming.
"""

import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jax
import numpy as np
import psutil

from covey import __version__
from covey.config.recipe import Recipe, SFTRecipe, load_any, to_yaml
from covey.display import check_no_secrets
from covey.errors import CoveyError, NumbersError, ResumeError, WeightsError
from covey.files import check_not_url, folder_below, has_file, open_below, replace_file
from covey.models.config import ModelConfig
from covey.models.hf_folder import write_settings
from covey.monitor.record import StepRecord
from covey.monitor.run_files import BAD, CHECKPOINTS, METRICS, MODEL, RECIPE, SAMPLES, SUMMARY, RunFile, run_files
from covey.monitor.writer import Correct, MetricsWriter, group_lines, write_answers, write_bad_batch, write_summary
from covey.parallel import processes
from covey.text.tokenizer import Tokenizer
from covey.train.checkpoint import Checkpointer
from covey.train.storage import claim, release
from covey.types import Group

log = logging.getLogger(__name__)

EVERY_STEP = {"rl": (METRICS, SAMPLES), "sft": (METRICS,)}
"""Method of a run → names of the files that have rows of every step."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """The open folder of a run; a context manager. The methods write in the first process alone.

    Args:
        out: the folder.
        saves: its checkpoints, locked by the first process; all save together.
        resuming: continue from the state in the folder.
        must_reach: names of the files that must have lines up to the last checkpoint.

    Attributes:
        path: the absolute path, because a reward function may change the working directory.
        path_as_given: the path as the user wrote it.
        writes: whether this process writes.
        last: step of the last checkpoint at the start; None when there is none.
        resume_at: step that the run resumes from; None for a new run.
        summary: content of `summary.json` of the resumed run, if it has written one.
        saved: step of the last checkpoint of this run, in any process.
        metrics: metrics of the last step.

    Raises:
        ResumeError: `summary.json` or a file of rows was not written by a run.
    """

    def __init__(self, out: Path, saves: Checkpointer, resuming: bool = False, must_reach: Sequence[str] = ()):
        self.path, self.path_as_given, self.saves, self.resuming = out.absolute(), out, saves, resuming
        self.writes = processes.here().is_first
        self.last = processes.here().broadcast(saves.latest(), "last checkpoint")
        self.saved = self.last if resuming else None
        self.resume_at = (self.last or 0) if resuming else None
        self.summary = processes.here().broadcast(read_summary(self.path / SUMMARY) if resuming else None, "summary")
        self.metrics: Mapping[str, float] = {}
        self._group_files = [file for file in run_files() if file.group_rows]
        self._writer = (
            MetricsWriter(self.path, resume_at=self.resume_at, must_reach=must_reach if self.resume_at else ())
            if self.writes
            else None
        )

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def is_finished(self, total: int) -> bool:
        """Return whether the resumed run has made all of the `total` steps, and evaluated the result.

        Args:
            total: 0 when not known yet.
        """
        done = self.summary or {}
        return self.last is not None and 0 < total <= self.last == done.get("steps") and "after" in done

    def check_not_replaced(self) -> None:
        """Refuse to go on when the folder was removed or replaced."""
        if self.writes and not self.saves.holds():
            raise ResumeError(
                "the run folder was removed or replaced while the run was writing in it",
                want="a folder that is left alone until the run has ended",
                fix="begin the run again, or put the folder back and resume",
                where=str(self.path),
            )

    def write_step(self, record: StepRecord) -> None:
        """Write the rows of a step. Each process encodes the rows of its groups; the first writes all."""
        self.metrics = record.metrics
        lines = {file.name: _gather_rows(file, record) for file in self._group_files}
        if self._writer is not None:
            self.check_not_replaced()
            self._writer.step(record.metrics)
            for name, parts in lines.items():
                self._writer.lines(name, parts)

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows of a step to the file `name`. A resumed run cuts them back to its checkpoint: at once where
        `run_files` has the file, otherwise before the first row that it writes.
        """
        if self._writer is not None:
            self._writer.rows(name, rows)

    def write_answers(self, name: str, groups: Iterable[Group], correct: Correct | None = None) -> None:
        """Write the completions of the evaluation `name`, and which of them are right."""
        if self.writes:
            write_answers(self.path, name, groups, correct)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        if self.writes:
            self.check_not_replaced()
            write_summary(self.path, summary)

    def update_recipe(self, recipe: Recipe | SFTRecipe) -> None:
        """Write the recipe of a resumed run, with the overrides given with --resume."""
        if self.writes and self.resuming and load_any(self.path) != recipe:
            text = to_yaml(recipe)
            check_no_secrets(text)
            replace_file(self.path / RECIPE, text.encode())

    def write_model(self, config: ModelConfig, tokenizer: Tokenizer, dtype: str) -> None:
        """Write config and tokenizer of the model, so that the run is opened without the folder that it began with."""
        folder = model_folder(self.path)
        if not self.writes or has_file(folder, "config.json"):
            return
        folder.mkdir(exist_ok=True)
        try:
            write_settings(config, tokenizer, folder, dtype)
        except WeightsError as error:  # a model of a script's own making
            log.info(f"only the model that this run began with opens it: {error.what}")

    def save(self, step: int, state: Any, extra: Mapping[str, Any], score: float | None) -> None:
        """Start writing a checkpoint, after the lines before it are on the disk."""
        self.check_not_replaced()
        if self._writer is not None:
            self._writer.sync()
        self.saves.save(step, state, extra, score=score)

    def keep_bad_batch(
        self, step: int, groups: Iterable[Group], arrays: Mapping[str, np.ndarray], error: NumbersError
    ) -> None:
        """Write the batch of a non-finite update into `bad/` for debugging, and report it."""
        if self.writes:
            file = write_bad_batch(self.path, step, groups, arrays)
            log.warning(f"{error.what}; its batch is kept: {file}.jsonl")


def _gather_rows(file: RunFile, record: StepRecord) -> Sequence[bytes | memoryview]:
    """Return the encoded rows of a step in `file` from all processes, in the first process alone."""
    lines = group_lines(resolve_name(file.group_rows), record.step, record.groups, record.numbers)
    return processes.here().gather_parts(lines, record.numbers, file.name)


def model_folder(run: Path) -> Path:
    """Return the folder of a run's config and tokenizer, which need not exist; a link in it is refused."""
    folder = folder_below(run, MODEL)
    for file in folder.iterdir() if folder.exists() else ():
        has_file(folder, file.name)
    return folder


@contextmanager
def create_folder(out: Path, recipe: Recipe | SFTRecipe) -> Iterator[RunFolder]:
    """Create the folder of a new run. After an error of the user it is left as it was, unless it is worth keeping, so
    that the corrected command can use the name.
    """
    check_not_url(out)
    text, path, writes = to_yaml(recipe), out.absolute(), processes.here().is_first
    check_no_secrets(text)
    claimed = writes and claim(path, CHECKPOINTS)
    with Checkpointer(
        path / CHECKPOINTS,
        recipe.training.max_to_keep,
        address=_address(path, recipe),
        scored_by=recipe.training.keep_best,
    ) as saves:
        if writes:
            replace_file(path / RECIPE, text.encode())
        folder = None
        try:
            with RunFolder(out, saves) as folder:
                yield folder
        except CoveyError:
            stepped = folder is not None and folder.metrics  # even if the files were lost since
            if saves.holds() and not (stepped or (path / BAD).exists()):
                saves.release()
                release(path, claimed)
            raise


@contextmanager
def reopen_folder(out: Path, recipe: Recipe | SFTRecipe) -> Iterator[RunFolder]:
    """Open the folder of a run to resume it."""
    with Checkpointer(
        folder_below(out.absolute(), CHECKPOINTS),
        recipe.training.max_to_keep,
        scored_by=recipe.training.keep_best,
    ) as saves:
        _check_checkpoint_path(saves, recipe)
        with RunFolder(out, saves, resuming=True, must_reach=EVERY_STEP[recipe.method]) as folder:
            yield folder


def _address(path: Path, recipe: Recipe | SFTRecipe) -> str:
    """Return the address of a new run's checkpoints in a bucket; empty when they are in the run folder."""
    base = recipe.training.checkpoint_path.rstrip("/")
    return base and f"{base}/{path.name}"


def _check_checkpoint_path(saves: Checkpointer, recipe: Recipe | SFTRecipe) -> None:
    """Refuse another place of the checkpoints than the run began with."""
    began, wanted = saves.address.rpartition("/")[0], recipe.training.checkpoint_path.rstrip("/")
    if began != wanted:
        place = saves.address or "in its folder"
        raise ResumeError(
            f"training.checkpoint_path is {wanted!r}, and the checkpoints of this run are {place}",
            want="the path that the run began with",
            fix=f"--training.checkpoint-path {began!r}; or begin a new run with its model: --model.source RUN",
            where=str(saves.folder.parent),
        )


def read_summary(path: Path) -> dict[str, Any] | None:
    """Read the summary of a run; None when it has written none.

    Raises:
        ResumeError: the file is not a summary.
    """
    if not has_file(path.parent, path.name):
        return None
    with open_below(path.parent, path.name) as file:
        content = file.read()
    try:
        summary = json.loads(content)
        wrong = _find_fault(summary)
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        raise ResumeError(
            f"this is no summary of a run: {wrong}",
            want="the file that the run has written, with the figures from before training",
            fix="put the file back, or remove it: the figures from before training are then left out",
            where=str(path),
        )
    return dict(summary)


def _find_fault(summary: Any) -> str:
    """Explain why JSON is not a valid summary of a run, as far as it is used; empty when it is."""
    if not isinstance(summary, dict) or not isinstance(summary.get("before", ""), dict | None):
        return "it is no mapping with the figures under before"
    figures = summary["before"] or {}
    strange = [name for name, value in figures.items() if isinstance(value, bool) or not isinstance(value, Figure)]
    return f"before.{strange[0]} is {figures[strange[0]]!r}, which is no number" if strange else ""


Figure = int | float | None
"""Value of an evaluation metric; None where nothing was measured."""


PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
"""Packages whose version may change results."""


def describe_environment() -> dict[str, str]:
    """Describe software and devices by name; no text names the machine or its user."""
    devices = jax.devices()
    described = {
        "covey": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: str(resolve_name(name).__version__) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "devices": f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform})",
        "processes": str(jax.process_count()),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
    }
    return {name: text for name, text in described.items() if text}


def _commit() -> str:
    """Return the commit of the checkout that Covey runs from, marked when files were changed; empty elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=, with changes", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
