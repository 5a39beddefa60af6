"""Folder of a program: made empty, measured while the program runs, and removed whatever stands in it."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

MAX_DEPTH = 100
"""Maximum depth of folders inside of each other."""
BLOCK = 4096
"""Bytes that a file or a folder counts at least."""


@contextmanager
def own_folder() -> Iterator[str]:
    """Make an empty folder in a folder that the program cannot write; both are removed at the end."""
    outer = tempfile.mkdtemp(prefix="covey-python-")
    try:
        folder = os.path.join(outer, "0")
        os.mkdir(folder, 0o700)
        yield folder
    finally:
        try:
            _remove(outer)
        except OSError as error:  # something outside of the run still writes there
            log.warning(f"{outer} cannot be removed: {error}")


def excess(folder: str, limit: int) -> str:
    """Return which limit the files and folders below a folder exceed; nothing if none.

    Args:
        folder: the folder; empty for none.
        limit: bytes of all of them, each counted as a block at least.
    """
    if not folder:
        return ""
    total, outside = 0, folder.count(os.sep)
    try:
        for path, folders, names, inside in os.fwalk(folder, onerror=_raise):  # a path may be too long for os.walk
            if path.count(os.sep) - outside > MAX_DEPTH:
                return f"the program made folders more than {MAX_DEPTH} deep"
            for name in (*folders, *names):
                with suppress(OSError):
                    total += max(os.stat(name, dir_fd=inside, follow_symlinks=False).st_size, BLOCK)
            if total > limit:
                return f"the program wrote more than {limit:,} bytes"
    except PermissionError:
        return "the program made a folder that cannot be read"
    return ""


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # the program may have removed it meanwhile
        raise error


def _remove(outer: str) -> None:
    """Remove what `own_folder` made. Each folder is moved up before it is emptied, so that no depth is too large."""
    above = os.open(outer, os.O_RDONLY | os.O_DIRECTORY)
    try:
        left, count = os.listdir(above), 0
        while left:
            count = _empty(above, name := left.pop(), left, count)
            os.rmdir(name, dir_fd=above)
    finally:
        os.close(above)
    os.rmdir(outer)


def _empty(above: int, name: str, left: list[str], count: int) -> int:
    """Remove the files of a folder and move its folders up; add their new names to `left`, and return the last."""
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        with os.scandir(inside) as entries:
            found = list(entries)
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=inside)
                continue
            count += 1
            os.chmod(entry.name, 0o700, dir_fd=inside)
            os.rename(entry.name, str(count), src_dir_fd=inside, dst_dir_fd=above)
            left.append(str(count))
    finally:
        os.close(inside)
    return count
