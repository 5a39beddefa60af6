"""Steps of a run's checkpoints in a Cloud Storage bucket.

    gs://bucket/runs/mine/00000500/arrays/...    by Orbax
                                   meta.json
                                   SHA256SUMS    written last: only a step that has it is whole
                          run.json              identity of the run whose checkpoints these are

The run folder stays on a disk. Its `checkpoints/bucket.json` names address and identity, so that only the run that has
begun at an address goes on there, and its `checkpoints/lock` keeps a second writer out.

A bucket cannot rename, so a step that is written again is removed first. Objects of a step without SHA256SUMS are
leftovers of a killed writer, which the next one removes.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from covey.errors import ResumeError
from covey.files import IN_BUCKET, has_file, open_below, replace_file
from covey.train.bucket import Bucket, register_file_system
from covey.train.checksums import SUMS, Digests, compare_digests, format_sums, parse_sums
from covey.train.json_lines import MAX_LINE, parse_line
from covey.train.steps import is_written_by, name_of

POINTER, IDENTITY = "bucket.json", "run.json"


class BucketSteps:
    """Steps at an address; the methods are those of `Steps`.

    Args:
        address: gs://BUCKET/FOLDER.
    """

    def __init__(self, address: str):
        self._bucket = Bucket(address)
        self.address = self._bucket.address
        register_file_system()

    def whole(self) -> list[int]:
        found = (re.fullmatch(rf"(\d{{8,}})/{SUMS}", name) for name in self._bucket.names())
        return [int(match[1]) for match in found if match]

    def place(self, step: int) -> str:
        return f"{self._bucket.address}/{name_of(step)}"

    draft = place

    def read(self, step: int, name: str) -> bytes:
        return self._bucket.read(f"{name_of(step)}/{name}")

    def prepare(self, step: int, needed: int) -> None:
        self.remove(step)

    def digest_own(self, step: int) -> Digests:
        return self._digests(step, [name for name in self._names(step) if is_written_by(jax.process_index(), name)])

    def complete(self, step: int, files: Mapping[str, bytes], known: Digests | None) -> None:
        for name, content in files.items():
            self._bucket.write(f"{name_of(step)}/{name}", content)
        names, known = self._names(step), known or {}
        if missing := sorted(known.keys() - set(names)):
            raise OSError(f"{missing[0]}, which another process has written, is not there")
        digests = known | self._digests(step, [name for name in names if name not in known])
        self._bucket.write(f"{name_of(step)}/{SUMS}", format_sums(digests).encode())

    def discard(self, step: int) -> None:
        self.remove(step)

    def remove(self, step: int) -> None:
        self._bucket.remove([f"{name_of(step)}/{SUMS}"])
        self._bucket.remove(self._bucket.names(f"{name_of(step)}/"))

    def damage(self, step: int, part: tuple[int, int] = (0, 1)) -> str:
        try:
            listed = parse_sums(self.read(step, SUMS).decode())
        except (OSError, ValueError) as error:
            return f"{SUMS} cannot be read ({error})"
        names = self._names(step)
        return compare_digests(listed, names, lambda: self._digests(step, names[part[0] :: part[1]]))

    def finish_interrupted(self) -> None:
        whole = {name_of(step) for step in self.whole()}
        begun = ((name, name.partition("/")[0]) for name in self._bucket.names())
        self._bucket.remove([name for name, step in begun if re.fullmatch(r"\d{8,}", step) and step not in whole])

    def free(self) -> None:
        return None

    def take(self, identity: str) -> bool:
        """Take the address for the run of that identity; return whether nothing was there."""
        return not self._bucket.names() and self._bucket.create(IDENTITY, identity.encode())

    def belongs_to(self, identity: str) -> bool:
        """Return whether the run of that identity has taken the address."""
        try:
            return self._bucket.read(IDENTITY).decode() == identity
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Leave the address, where no step is, to others."""
        self._bucket.remove([IDENTITY])

    def _names(self, step: int) -> list[str]:
        """Return the names of the objects of a step, except SHA256SUMS."""
        folder = f"{name_of(step)}/"
        return [name for found in self._bucket.names(folder) if (name := found.removeprefix(folder)) != SUMS]

    def _digests(self, step: int, names: Iterable[str]) -> Digests:
        folder = f"{name_of(step)}/"
        found = self._bucket.digests(f"{folder}{name}" for name in names)
        return {name.removeprefix(folder): digest for name, digest in found.items()}


def open_bucket(folder: Path, address: str, writes: bool) -> BucketSteps | None:
    """Return the steps that are not in `folder` but at the address in a bucket that it names; None if it names none.

    Args:
        folder: the folder of the checkpoints.
        address: address for a new run, which is taken and which the folder then names.
        writes: whether this process holds the lock of the folder.

    Raises:
        ResumeError: another run has taken the address.
    """
    pointer = folder / POINTER
    if not has_file(folder, POINTER):
        if not address:
            return None
        steps, identity = BucketSteps(address), secrets.token_hex(16)
        if writes and not steps.take(identity):
            raise _taken(steps.address, "a folder in the bucket with nothing in it")
        if writes:
            replace_file(pointer, json.dumps({"address": steps.address, "run": identity}).encode())
        return steps
    named, identity = _read_pointer(folder)
    steps = BucketSteps(named)
    if writes and not steps.belongs_to(identity):
        raise _taken(steps.address, f"what this run has written there, with its {IDENTITY}")
    return steps


def _read_pointer(folder: Path) -> tuple[str, str]:
    """Return the address and the identity in a folder's `bucket.json`.

    Raises:
        ResumeError: it has another form.
    """
    with open_below(folder, POINTER) as file:
        named = parse_line(file.read(MAX_LINE)) or {}
    address, identity = named.get("address"), named.get("run")
    if not (isinstance(address, str) and IN_BUCKET.fullmatch(address) and isinstance(identity, str)):
        raise ResumeError(
            "this file does not name the bucket of the checkpoints",
            want='{"address": "gs://BUCKET/FOLDER", "run": "IDENTITY"}, as the run has written it',
            fix="put the file back as it was",
            where=str(folder / POINTER),
        )
    return address, identity


def _taken(address: str, want: str) -> ResumeError:
    return ResumeError(
        "the checkpoints of another run are at this address",
        want=want,
        fix="another training.checkpoint_path, or another name of the run folder",
        where=address,
    )
