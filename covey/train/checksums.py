"""Write folders atomically: sealed with digests, renamed into place, written by one process.

A folder is filled under the name `X.partial`. `write_checksums` writes its SHA256SUMS last; from then on it is
complete, and `put_in_place` renames it to `X`. `X.old` is a folder being removed. `finish_interrupted` finishes what a
kill interrupted. A file or link in the place of one of these folders is not ours: an error names it, and it is kept.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from covey.errors import ResumeError
from covey.files import file_sha256, folder_below, open_below

SUMS, LOCK = "SHA256SUMS", "lock"
Digests = dict[str, str]
"""SHA-256 of files by their names relative to the folder."""


def files_in(folder: Path) -> dict[str, Path]:
    """Return every file under `folder` except SHA256SUMS, by relative name. Hidden files are ignored."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path for path in paths if path != folder / SUMS}


def _digests(files: Mapping[str, Path]) -> Digests:
    with ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(file_sha256, files.values()), strict=True))


def digest_synced(files: Mapping[str, Path]) -> Digests:
    """Sync the files to disk and return their digests."""
    for path in files.values():
        sync(path)
    return _digests(files)


def write_checksums(folder: Path, known: Digests | None = None) -> None:
    """Sync all files to disk, then write the digests, which mark the folder complete.

    Args:
        folder: what is sealed.
        known: digests of files that other processes have written and synced.
    """
    files, known = files_in(folder), known or {}
    if missing := sorted(known.keys() - files.keys()):
        raise OSError(f"{missing[0]}, which another process has written, is not here: do all share this folder?")
    digests = known | _digests({name: path for name, path in files.items() if name not in known})
    draft = folder / f".{SUMS}"
    with open_below(folder, draft.name, "wb") as file:
        file.write(format_sums({name: digests[name] for name in files}).encode())
    for path in [*(path for path in folder.rglob("*") if str(path.relative_to(folder)) not in known), folder]:
        sync(path)
    draft.rename(folder / SUMS)
    sync(folder)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_damage(folder: Path, part: tuple[int, int] = (0, 1)) -> str:
    """Describe the damage to the files of a checkpoint; empty when they are intact.

    Args:
        folder: the checkpoint.
        part: (number, count): only the digests of this part of the files are compared, out of `count` parts.
    """
    try:
        with open_below(folder, SUMS) as sums:
            listed = parse_sums(sums.read().decode())
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read ({error})"
    if odd := [path for path in folder.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]:
        return f"{odd[0].relative_to(folder)} is a link, or no file"
    files = files_in(folder)
    by_size = sorted(files, key=lambda name: -files[name].stat().st_size)
    return compare_digests(listed, files, lambda: _digests({name: files[name] for name in by_size[part[0] :: part[1]]}))


def format_sums(digests: Digests) -> str:
    """Format digests as `sha256sum` does."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())


def parse_sums(text: str) -> Digests:
    """Parse what `format_sums` has formatted.

    Raises:
        ValueError: it is something else.
    """
    return {name: digest for digest, name in (line.split("  ", 1) for line in text.splitlines())}


def compare_digests(listed: Digests, names: Collection[str], digests: Callable[[], Digests]) -> str:
    """Describe the differences between the `listed` files and those that are there; empty when there are none.

    Args:
        listed: digests of all files when they were written.
        names: names of the files that are there.
        digests: returns the digests of those that are to be compared.
    """
    if odd := sorted(listed.keys() ^ set(names)):
        return f"{odd[0]} is missing" if odd[0] in listed else f"{odd[0]} is not listed in {SUMS}"
    found = digests()
    changed = [name for name in names if found.get(name, listed[name]) != listed[name]]
    return f"{', '.join(changed)} changed since it was written" if changed else ""


def put_in_place(partial: Path) -> None:
    """Rename a sealed folder `X.partial` to `X`, replacing an older `X`."""
    final = partial.with_suffix("")
    if _place_of(final).exists():
        remove(final)  # after a kill here, `finish_interrupted` finds the sealed folder and continues
    partial.rename(final)
    sync(final.parent)


def remove(folder: Path) -> None:
    """Remove a folder atomically: a half-removed folder must not be taken for a complete one."""
    old = _place_of(folder.with_suffix(".old"))
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def finish_interrupted(folder: Path) -> None:
    """Finish or remove what a killed process left behind."""
    found = sorted(path for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.(partial|old)", path.name))
    for path in map(_place_of, found):
        if path.suffix == ".partial" and (path / SUMS).is_file():
            put_in_place(path)
        else:
            shutil.rmtree(path)


def _place_of(folder: Path) -> Path:
    return folder_below(folder.parent, folder.name)


def make_folder(folder: Path) -> bool:
    """Create a folder and its parents. Return False when something of that name exists.

    Raises:
        ResumeError: it cannot be created.
        OSError: its name is longer than the system allows.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(folder):
            return False
        if error.errno == errno.ENAMETOOLONG:
            raise
        what = f"this folder cannot be made: {error.strerror}"
        raise ResumeError(what, want="the right to write there", fix="--out ANOTHER", where=str(folder)) from error
    return True


def claim(folder: Path, inner: str) -> bool:
    """Claim a new or empty folder for one run, before anything is written in it, by creating the folder `inner` inside.

    If several processes try at the same time, one succeeds: no folder can be created twice.

    Returns:
        whether `folder` itself was created.

    Raises:
        ResumeError: it is not empty, or another run was faster.
    """
    made = make_folder(folder)
    empty = made or (folder.is_dir() and not any(folder.iterdir()))
    if not (empty and make_folder(folder / inner)):
        raise ResumeError(
            "this folder is taken: something is in it, or another run has just begun here",
            want="a new or empty folder",
            fix="--out ANOTHER",
            where=str(folder),
        )
    return made


def release(folder: Path, made: bool) -> None:
    """Empty a folder that this process has claimed and locked, and remove it if this process `made` it."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if made:
        with suppress(OSError):  # another run has claimed the empty folder by now
            folder.rmdir()


def holds_lock(lock: IO[bytes], folder: Path) -> bool:
    """Return whether `lock` is still the lock of `folder`; False when the folder was removed or replaced."""
    return is_open_at(lock, folder / LOCK)


def is_open_at(file: IO[Any], path: Path) -> bool:
    """Return whether the open `file` is the one at `path`; False when that was removed or replaced since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of `folder`, as far as this machine can see."""
    try:
        with open_below(folder, LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file gives it back
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def take_lock(folder: Path) -> IO[bytes]:
    """Take the folder's lock and hold it until the file is closed. The system releases it when the process ends, so no
    lock is ever stale.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_below(folder, LOCK, "a+b")
    except OSError as error:
        raise ResumeError(
            f"checkpoints cannot be written: {error.strerror}",
            want="a folder in which this user may write",
            fix="make it writable, or choose another folder with --out",
            where=str(folder),
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip()
        lock.close()
        raise ResumeError(
            f"another run writes its checkpoints here: {holder}",
            want="one writer",
            fix="wait for it, end it, or choose another folder",
            where=str(folder),
        ) from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    lock.flush()
    return lock
