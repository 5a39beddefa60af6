"""Store the steps of a run's checkpoints, sealed with digests, in a folder; a package may store them elsewhere.

In a folder a step is written to `00000500.partial`. SHA256SUMS is written last and marks the step complete; a rename
to `00000500` commits it. `00000500.old` is a step being removed. If the process is killed at any moment, the folder
holds complete steps, and leftovers that the next writer finishes or removes. A file or link in the place of such a
folder is not ours: an error names it, and it is kept. This module imports neither JAX nor NumPy.

Orbax's `training.Checkpointer` is not used for this: it deletes a finished step before it writes it again, reads
flipped bits without an error, takes a score of NaN for the best, and reaches a bucket only through gcsfs.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from covey.errors import ResumeError
from covey.files import file_sha256, folder_below, open_below, replace_file

log = logging.getLogger(__name__)

SUMS, LOCK, POINTER = "SHA256SUMS", "lock", "bucket.json"
LOCK_SECONDS = 0.1
"""Seconds between two attempts to take a lock."""
Digests = dict[str, str]
"""SHA-256 of files by their names relative to the folder."""


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"{step:08d}"


class CheckpointStore:
    """Committed steps of a run in a folder, and the step being written.

    A subclass keeps them elsewhere, and overrides each method that uses the folder. Names of files are relative to the
    path of the step.

    Attributes:
        address: address of the steps in a bucket; empty when they are in a folder.
    """

    address = ""

    def __init__(self, folder: Path):
        self._folder = folder

    def committed(self) -> list[int]:
        """Return the steps that are complete, in any order."""
        names = [path.name for path in self._folder.glob("*") if re.fullmatch(r"\d{8,}", path.name)]
        return [int(name) for name in names if (self._folder / name).is_dir() and folder_below(self._folder, name)]

    def path(self, step: int) -> str:
        """Return the path or address of a committed step."""
        return str(self._folder / step_name(step))

    def temporary_path(self, step: int) -> str:
        """Return the path or address at which a step is written."""
        return f"{self.path(step)}.partial"

    def read(self, step: int, name: str) -> bytes:
        """Return the content of a file of a step.

        Raises:
            OSError: it cannot be read.
        """
        with open_below(self._folder, f"{step_name(step)}/{name}") as file:
            return file.read()

    def prepare(self, step: int, needed: int) -> None:
        """Remove the rest of an earlier attempt to write a step of `needed` bytes.

        Raises:
            OSError: there is no space for it.
        """
        if needed > shutil.disk_usage(self._folder).free:
            raise OSError("the disk is full")
        self._below(step_name(step))
        temporary = self._below(f"{step_name(step)}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def discard(self, step: int) -> None:
        """Remove a step that is being written."""
        shutil.rmtree(self.temporary_path(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove a committed step. At no moment a part of it looks complete."""
        old = self._below(f"{step_name(step)}.old")
        shutil.rmtree(old, ignore_errors=True)
        Path(self.path(step)).rename(old)
        shutil.rmtree(old)

    def finish_interrupted(self) -> None:
        """Finish or remove the leftovers of a killed process."""
        names = sorted(path.name for path in self._folder.iterdir())
        for name in (name for name in names if re.fullmatch(r"\d{8,}\.(partial|old)", name)):
            path = self._below(name)
            if path.suffix == ".partial" and (path / SUMS).is_file():
                self._commit_sealed(int(path.stem))
            else:
                shutil.rmtree(path)

    def release(self) -> None:
        """Leave the address to others: no step has been written."""

    def local_digests(self, step: int, process: int) -> Digests:
        """Return the digests of the files that Orbax has written for a process, after they are on the disk."""
        path, folder = self.temporary_path(step), f"ocdbt.process_{process}"
        names = [name for name in self._names(path) if folder in name.split("/")]
        return self._digests(path, names, synced=True)

    def commit(self, step: int, files: Mapping[str, bytes], known: Digests) -> None:
        """Add `files` to a step that is being written, seal it with the digests of all its files, and commit it.

        Args:
            step: the step.
            files: content by name.
            known: the `local_digests` of all processes.

        Raises:
            OSError: a file cannot be written, or a file of another process is missing.
        """
        path = self.temporary_path(step)
        for name, content in files.items():
            self._write(path, name, content)
        names = set(self._names(path))
        if missing := sorted(known.keys() - names):
            raise OSError(f"{missing[0]}, which another process has written, is not here: do all share this folder?")
        digests = known | self._digests(path, sorted(names - known.keys()), synced=True)
        self._seal(step, "".join(f"{digests[name]}  {name}\n" for name in sorted(names)).encode())

    def damage(self, step: int, part: tuple[int, int] = (0, 1)) -> str:
        """Describe the damage to the files of a step; empty when they are intact.

        Args:
            step: the step.
            part: (number, count): only the digests of this part of the files are compared, out of `count` parts.
        """
        path = self.path(step)
        if links := self._links(path):
            return f"{links[0]} is a link, or no file"
        try:
            lines = self.read(step, SUMS).decode().splitlines()
            listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        except (OSError, ValueError) as error:
            return f"{SUMS} cannot be read ({error})"
        names = self._names(path)
        if odd := sorted(listed.keys() ^ set(names)):
            return f"{odd[0]} is missing" if odd[0] in listed else f"{odd[0]} is not listed in {SUMS}"
        digests = self._digests(path, names[part[0] :: part[1]])
        changed = sorted(name for name, digest in digests.items() if digest != listed[name])
        return f"{', '.join(changed)} changed since it was written" if changed else ""

    def _links(self, path: str) -> list[Path]:
        """Return the names of links and special files in the folder of a step."""
        odd = [file for file in Path(path).rglob("*") if file.is_symlink() or not (file.is_file() or file.is_dir())]
        return [file.relative_to(path) for file in odd]

    def _names(self, path: str) -> list[str]:
        """Return the names of the files of a step, except SHA256SUMS: by size, so that each part of them takes about as
        long. Hidden files are left out.
        """
        files = [file for file in sorted(Path(path).rglob("*")) if file.is_file() and not file.name.startswith(".")]
        names = [str(file.relative_to(path)) for file in sorted(files, key=lambda file: -file.stat().st_size)]
        return [name for name in names if name != SUMS]

    def _digests(self, path: str, names: Sequence[str], synced: bool = False) -> Digests:
        """Return the digests of files of a step, with `synced` after they are on the disk."""
        for name in names if synced else ():
            sync(Path(path, name))
        with ThreadPoolExecutor() as pool:
            return dict(zip(names, pool.map(lambda name: file_sha256(Path(path, name)), names), strict=True))

    def _write(self, path: str, name: str, content: bytes) -> None:
        """Write a file of a step."""
        replace_file(Path(path, name), content)

    def _seal(self, step: int, sums: bytes) -> None:
        """Write SHA256SUMS, which marks a step complete, and commit the step."""
        folder = Path(self.temporary_path(step))
        for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
            sync(path)
        replace_file(folder / SUMS, sums)
        sync(folder)
        self._commit_sealed(step)

    def _commit_sealed(self, step: int) -> None:
        """Rename a sealed step into place; after a kill in the middle `finish_interrupted` continues."""
        if self._below(step_name(step)).exists():
            self.remove(step)
        Path(self.temporary_path(step)).rename(self.path(step))
        sync(self._folder)

    def _below(self, name: str) -> Path:
        return folder_below(self._folder, name)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        raise ResumeError(
            f"this folder cannot be made: {error.strerror}",
            want="the right to write there",
            fix="--out ANOTHER",
            where=str(folder),
        ) from error
    return True


def claim(folder: Path, inner: str) -> bool:
    """Claim a new or empty folder for one run, before anything is written in it, by creating the folder `inner` inside.

    If several processes try at the same time, one succeeds: no folder can be created twice.

    Returns:
        whether `folder` itself was created.

    Raises:
        ResumeError: it is not empty, or another run was faster.
    """
    is_new = make_folder(folder)
    empty = is_new or (folder.is_dir() and not any(folder.iterdir()))
    if not (empty and make_folder(folder / inner)):
        raise ResumeError(
            "this folder is taken: something is in it, or another run has just begun here",
            want="a new or empty folder",
            fix="--out ANOTHER",
            where=str(folder),
        )
    return is_new


def release(folder: Path, is_new: bool) -> None:
    """Empty a folder that this process has claimed and locked, and remove it if `claim` has created it."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if is_new:
        with suppress(OSError):  # another run has claimed the empty folder by now
            folder.rmdir()


def is_open_at(file: IO[Any], path: Path) -> bool:
    """Return whether the open `file` is still at `path`; False when the file there was removed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def take_lock(folder: Path, patience: float = 0.0) -> IO[bytes]:
    """Take the folder's lock and hold it until the file is closed. The system releases it when the process ends, so no
    lock is ever stale.

    Args:
        folder: the folder.
        patience: seconds to wait for the end of another holder.
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
    if not (_try_lock(lock) or (patience and _wait_for(lock, folder, patience))):
        holder = _holder(lock)
        lock.close()
        raise ResumeError(
            f"another run writes its checkpoints here: {holder}",
            want="one writer",
            fix="wait for it, end it, or choose another folder",
            where=str(folder),
        )
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    lock.flush()
    return lock


def _try_lock(lock: IO[bytes]) -> bool:
    """Take the lock if no other process holds it; return whether this process has it now."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _wait_for(lock: IO[bytes], folder: Path, seconds: float) -> bool:
    """Wait at most `seconds` for the end of the holder of the lock, and take it; return whether this process has it.

    Raises:
        ResumeError: its holder has removed the folder.
    """
    log.warning(f"{folder} is in use by {_holder(lock)}: waiting up to {seconds:.0f} s for its end")
    until = time.monotonic() + seconds
    while not (taken := _try_lock(lock)) and time.monotonic() < until:
        time.sleep(LOCK_SECONDS)
    if taken and not is_open_at(lock, folder / LOCK):
        lock.close()
        raise ResumeError(
            "this run has made no step, and removed its folder at its end", fix="begin it again", where=str(folder)
        )
    return taken


def _holder(lock: IO[bytes]) -> str:
    lock.seek(0)
    return lock.read().decode(errors="replace").strip()
