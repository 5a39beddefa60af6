"""The run folder of a model that a client trains, which `covey board` lists: rows of its steps, and its state."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.config.recipe import RUN_RECIPE
from covey.config.strict_yaml import dump
from covey.files import replace_file
from covey.monitor.run_files import CHECKPOINTS
from covey.monitor.writer import MetricsWriter
from covey.train.storage import take_lock
from covey_status.run_files import HEARTBEAT
from covey_status.watched_run import STOPPED


class RunFolder:
    """A run folder, which is locked while it is open.

    Args:
        folder: the folder; it is made if it is not there.
        settings: what the list shows of the run.
        step: number of steps that the model has made: rows of later ones are cut, because they will be written again.

    Raises:
        ResumeError: it cannot be written, or another server writes it.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int):
        self._folder, self._lock = folder, take_lock(folder / CHECKPOINTS)
        (folder / HEARTBEAT).unlink(missing_ok=True)
        replace_file(folder / RUN_RECIPE, dump(settings).encode())
        self._writer = MetricsWriter(folder, resume_at=step)

    def step(self, row: Mapping[str, Any]) -> None:
        """Write the row of a step."""
        self._writer.step(row)

    def close(self) -> None:
        """Say that the run has been stopped: a later server may go on with it."""
        self._writer.close()
        replace_file(self._folder / HEARTBEAT, json.dumps({"ended": STOPPED}).encode())
        self._lock.close()
