"""Access the steps of a run's checkpoints: in a folder, or in a bucket (`train.bucket_steps`).

In a folder a step is written to `00000500.partial`. SHA256SUMS is written last and marks the step complete; a rename
puts it in place. If the process is killed at any moment, the folder holds complete steps, and leftovers that the next
writer finishes or removes.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax

from covey.files import folder_below, open_below
from covey.train.checksums import (
    Digests,
    describe_damage,
    digest_synced,
    files_in,
    finish_interrupted,
    put_in_place,
    remove,
    write_checksums,
)

META = "meta.json"


class Steps(Protocol):
    """Steps of one run: those that are whole, and the one being written."""

    def whole(self) -> list[int]:
        """Return the steps that are whole, in any order."""

    def place(self, step: int) -> str:
        """Return the path or address of a step that is whole."""

    def draft(self, step: int) -> str:
        """Return the path or address at which a step is written."""

    def read(self, step: int, name: str) -> bytes:
        """Return the content of a file of a step.

        Raises:
            OSError: it cannot be read.
        """

    def prepare(self, step: int, needed: int) -> None:
        """Remove what an earlier attempt has left of a step of `needed` bytes.

        Raises:
            OSError: there is no room for it.
        """

    def digest_own(self, step: int) -> Digests:
        """Return the digests of the files that Orbax has written for this process at a draft; they are on the disk."""

    def complete(self, step: int, files: Mapping[str, bytes], known: Digests | None) -> None:
        """Add `files` to a draft, write the digests of all its files, and put it in place.

        Args:
            step: the step.
            files: content by name.
            known: digests of the files that other processes have written.
        """

    def discard(self, step: int) -> None:
        """Remove a draft."""

    def remove(self, step: int) -> None:
        """Remove a step so that at no moment a part of it is taken for a whole one."""

    def damage(self, step: int, part: tuple[int, int] = (0, 1)) -> str:
        """Describe the damage to the files of a step; empty when they are intact. `part` is as in `describe_damage`."""

    def finish_interrupted(self) -> None:
        """Finish or remove what a killed process has left behind."""

    def free(self) -> int | None:
        """Return the free bytes; None where there is no limit."""


def name_of(step: int) -> str:
    """Return the name of a step's folder."""
    return f"{step:08d}"


def is_written_by(process: int, name: str) -> bool:
    """Return whether Orbax has written the file `name` of a step for that process."""
    return f"ocdbt.process_{process}" in name.split("/")


class FolderSteps:
    """Steps in a folder; the methods are those of `Steps`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def whole(self) -> list[int]:
        found = (path.name for path in self._folder.glob("*") if re.fullmatch(r"\d{8,}", path.name))
        return [int(name) for name in found if (self._folder / name).is_dir() and folder_below(self._folder, name)]

    def place(self, step: int) -> str:
        return str(self._folder / name_of(step))

    def draft(self, step: int) -> str:
        return f"{self.place(step)}.partial"

    def read(self, step: int, name: str) -> bytes:
        with open_below(self._folder, f"{name_of(step)}/{name}") as file:
            return file.read()

    def prepare(self, step: int, needed: int) -> None:
        if needed > shutil.disk_usage(self._folder).free:
            raise OSError("the disk is full")
        folder_below(self._folder, name_of(step))
        shutil.rmtree(folder_below(self._folder, f"{name_of(step)}.partial"), ignore_errors=True)

    def digest_own(self, step: int) -> Digests:
        files = files_in(Path(self.draft(step)))
        return digest_synced({name: path for name, path in files.items() if is_written_by(jax.process_index(), name)})

    def complete(self, step: int, files: Mapping[str, bytes], known: Digests | None) -> None:
        partial = Path(self.draft(step))
        partial.mkdir(exist_ok=True)
        for name, content in files.items():
            with open_below(partial, name, "wb") as file:
                file.write(content)
        write_checksums(partial, known)
        put_in_place(partial)

    def discard(self, step: int) -> None:
        shutil.rmtree(self.draft(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        remove(self._path(step))

    def damage(self, step: int, part: tuple[int, int] = (0, 1)) -> str:
        return describe_damage(self._path(step), part)

    def finish_interrupted(self) -> None:
        finish_interrupted(self._folder)

    def free(self) -> int | None:
        return shutil.disk_usage(self._folder).free

    def _path(self, step: int) -> Path:
        return self._folder / name_of(step)
