"""Covey's cache on this disk: its folder, and files that are written into it as a whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from covey.errors import WeightsError


def cache_folder() -> Path:
    """Return `$COVEY_CACHE`, or ~/.cache/covey."""
    return Path(os.environ.get("COVEY_CACHE") or Path.home() / ".cache" / "covey").expanduser()


@contextlib.contextmanager
def create_folder(folder: Path) -> Iterator[None]:
    """Create `folder`, and turn a full disk or a missing permission into a readable error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise WeightsError(
            f"the model cache cannot be written: {error}", fix="free some space, or set COVEY_CACHE to another folder"
        ) from error


def write_text(file: Path, text: str) -> None:
    """Write `text` to a file of the cache, under a temporary name until it is complete.

    Raises:
        WeightsError: the cache cannot be written.
    """
    with create_folder(file.parent), tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        part = Path(scratch) / file.name
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
