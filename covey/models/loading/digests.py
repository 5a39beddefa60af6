"""SHA-256 of the files of a local model, so that a run identifies its weights by content and not by path.

Digests are cached by path, size and times of the file: the first start reads a model of many gigabytes once for its
digest, and later starts do not. A cache that is damaged or cannot be written costs that time and nothing else.

No JAX here.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.files import file_sha256
from covey.models.loading.sources import cache_folder

KEPT = "digests.json"
MOST_KEPT = 1000
"""Maximum number of files in the cache; the latest ones are kept."""
SETTLED_SECONDS = 2.0
"""Minimum age of a file's last change for its digest to be cached: a later change could leave the same timestamp."""

Sums = dict[str, list[Any]]
"""Path of a file → its size, its modification and change times, and its SHA-256."""


def digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of `files` in hex: that of a single file, or that of the digests and names of several."""
    kept = _kept()
    before = dict(kept)
    sums = {file.name: _sum(file, kept) for file in files}
    if kept != before:
        _keep(kept)
    if len(sums) == 1:
        return next(iter(sums.values()))
    listed = "".join(f"{found}  {name}\n" for name, found in sorted(sums.items()))
    return hashlib.sha256(listed.encode()).hexdigest()


def _sum(file: Path, kept: Sums) -> str:
    """Return the SHA-256 of `file`, from `kept` if the file is unchanged; otherwise compute it and store it there."""
    path, state = str(file.resolve()), _state(file)
    known = kept.pop(path, [])
    if known[:-1] == state:
        kept[path] = known
        return str(known[-1])
    found = file_sha256(file)
    if state == _state(file) and time.time() - file.stat().st_mtime > SETTLED_SECONDS:
        kept[path] = [*state, found]
    return found


def _state(file: Path) -> list[int]:
    """Return size and times: a tool may set back the modification time, but not the change time."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _kept() -> Sums:
    try:
        found = json.loads((cache_folder() / KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {path: entry for path, entry in found.items() if _is_entry(entry)} if isinstance(found, dict) else {}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 4 and re.fullmatch("[0-9a-f]{64}", str(entry[-1])) is not None


def _keep(kept: Sums) -> None:
    folder, latest = cache_folder(), dict(list(kept.items())[-MOST_KEPT:])
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            part = Path(scratch) / KEPT
            part.write_text(json.dumps(latest), encoding="utf-8")
            os.replace(part, folder / KEPT)
