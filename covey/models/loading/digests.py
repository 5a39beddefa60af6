"""SHA-256 of the files that a local model is read from, so that a run knows its weights by content and not by place.

Sums are kept in our cache by path, size and times of the file: a start reads a model of many gigabytes once for its
digest, and later starts not at all. A cache that is damaged or cannot be written costs that time and nothing else.

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

from covey.models.loading.sources import cache_folder

KEPT = "digests.json"
MOST_KEPT = 1000
"""Files whose sums are kept, the latest ones."""
SETTLED_SECONDS = 2.0
"""The sum of a file that changed later than this ago is not kept: another change could leave the same time behind."""

Sums = dict[str, list[Any]]
"""Path of a file → its size, its times of change and its SHA-256."""


def digest(files: Sequence[Path]) -> str:
    """SHA-256 of what `files` hold, in hex: of one file its own, of several that of their sums and names."""
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
    """The SHA-256 of `file`, from `kept` while the file is unchanged; noted there otherwise."""
    path, state = str(file.resolve()), _state(file)
    known = kept.pop(path, [])
    if known[:-1] == state:
        kept[path] = known
        return str(known[-1])
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if state == _state(file) and time.time() - file.stat().st_mtime > SETTLED_SECONDS:
        kept[path] = [*state, found]
    return found


def _state(file: Path) -> list[int]:
    """Size and times: a tool may set back the time of the last write, but not that of the last change."""
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
