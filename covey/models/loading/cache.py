"""Covey's cache on this disk: its folder, files that are written into it as a whole or not at all, and digests.

The SHA-256 of the files of a local model identifies its weights by content and not by path. Digests are cached by path,
size and times of the file: the first start reads a model of many gigabytes once for its digest, and later starts do
not. A cache that is damaged or cannot be written costs that time and nothing else. No JAX here.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from covey.errors import WeightsError
from covey.files import file_sha256, replace_file

DIGESTS_FILE = "digests.json"
MAX_CACHED_FILES = 1000
"""Maximum number of files whose digests are cached; the latest ones are kept."""
MIN_AGE_SECONDS = 2.0
"""Minimum age of a file's last change for its digest to be cached: a later change could leave the same timestamp."""

DigestCache = dict[str, list[Any]]
"""Path of a file → its size, its modification and change times, and its SHA-256."""


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
    """Write `text` to a file of the cache, as a whole or not at all.

    Raises:
        WeightsError: the cache cannot be written.
    """
    with create_folder(file.parent):
        replace_file(file, text.encode(), durable=False)


def files_digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 in hex of a single file, or of the digests and names of several files."""
    cache = _read_cache()
    before = dict(cache)
    sums = {file.name: _cached_digest(file, cache) for file in files}
    if cache != before:
        _write_cache(cache)
    if len(sums) == 1:
        return next(iter(sums.values()))
    listed = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(sums.items()))
    return hashlib.sha256(listed.encode()).hexdigest()


def _cached_digest(file: Path, cache: DigestCache) -> str:
    """Return the SHA-256 of `file`, from `cache` if the file is unchanged; otherwise compute it and store it there."""
    path, state = str(file.resolve()), _file_state(file)
    cached = cache.pop(path, [])
    if cached[:-1] == state:
        cache[path] = cached
        return str(cached[-1])
    checksum = file_sha256(file)
    if state == _file_state(file) and time.time() - file.stat().st_mtime > MIN_AGE_SECONDS:
        cache[path] = [*state, checksum]
    return checksum


def _file_state(file: Path) -> list[int]:
    """Return size and times: a tool may set back the modification time, but not the change time."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_cache() -> DigestCache:
    try:
        entries = json.loads((cache_folder() / DIGESTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {
        path: entry
        for path, entry in (entries.items() if isinstance(entries, dict) else ())
        if isinstance(entry, list) and len(entry) == 4 and re.fullmatch("[0-9a-f]{64}", str(entry[-1]))
    }


def _write_cache(cache: DigestCache) -> None:
    latest = dict(list(cache.items())[-MAX_CACHED_FILES:])
    with contextlib.suppress(WeightsError):
        write_text(cache_folder() / DIGESTS_FILE, json.dumps(latest))
