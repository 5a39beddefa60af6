"""The turn of a check that is timed, where the minutes are limited: it compiles, says that it is ready, and waits until
it has the device for itself.
"""

import os
import time
from pathlib import Path

VARIABLE = "COVEY_BENCH_TURN"
"""Names the files of a check's turn, without their endings; not set where checks are made one after the other."""


def file_of(place: str | Path, ending: str) -> Path:
    """Return the file `ready`, by which a check says that it has compiled, or `go`, by which it is told to go on."""
    return Path(f"{place}.{ending}")


def wait_for_turn() -> None:
    """Wait until this check has the device for itself."""
    if place := os.environ.get(VARIABLE):
        file_of(place, "ready").touch()
        while not file_of(place, "go").exists():
            time.sleep(0.05)
