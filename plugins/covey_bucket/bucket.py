"""Store the steps of a run's checkpoints in a Cloud Storage bucket.

    gs://bucket/runs/mine/00000500/arrays/...    by Orbax
                                   meta.json
                                   SHA256SUMS    written last: only a step that has it is complete
                          run.json              identity of the run whose checkpoints these are

The run folder stays on a disk. Its `checkpoints/bucket.json` names address and identity, so that only the run that has
begun at an address continues there, and its `checkpoints/lock` keeps a second writer out.

A bucket has no folders and no renames. An object is there as a whole or not at all, and a list is always up to date.
So a step that is written again is removed first, and objects of a step without SHA256SUMS are leftovers of a killed
writer, which the next one removes.

Objects are read and written by the driver of tensorstore that Orbax uses for arrays. Orbax accesses its small files at
`gs://` addresses through fsspec, which has no file system for them unless gcsfs is installed. `register_file_system`
gives it one over the same driver, so that there is one way to find credentials: the file that
GOOGLE_APPLICATION_CREDENTIALS names, the login of gcloud, or the service account of the machine.
"""

import functools
import hashlib
import importlib.util
import io
import json
import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import tensorstore

from covey.errors import CoveyError, ResumeError, first_line
from covey.files import IN_BUCKET, MAX_LINE, has_file, open_below, parse_line, replace_file
from covey.train.storage import POINTER, SUMS, CheckpointStore, Digests, step_name

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

NOTICE_SECONDS = 5.0
"""Number of seconds without an answer after which a line in the log says so."""
FIRST_ANSWER_SECONDS = 20.0
"""Number of seconds after which a bucket that has never answered is given up."""
_ANSWERED: set[str] = set()
"""Names of the buckets that have answered in this process."""
IDENTITY = "run.json"
MAX_OBJECTS_IN_MEMORY = 4
"""Number of objects that are in memory at a time while they are digested."""


class Bucket:
    """The objects below an address.

    Args:
        address: gs://BUCKET/FOLDER.

    Raises:
        CoveyError: it is no such address.
    """

    def __init__(self, address: str):
        if not IN_BUCKET.fullmatch(address):
            raise CoveyError(f"{address!r} is no address in a bucket", want="gs://BUCKET/FOLDER")
        self.address = address.rstrip("/")
        bucket, _, folder = self.address.removeprefix("gs://").partition("/")
        self._bucket, self._store, self._prefix = bucket, _open(bucket), f"{folder}/" if folder else ""

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that begin with `prefix`, in order."""
        first = (self._prefix + prefix).encode()
        keys = tensorstore.KvStore.KeyRange(first, first[:-1] + bytes([first[-1] + 1]) if first else b"")
        listed = self._result(self._store.list(keys, strip_prefix_length=len(self._prefix.encode())))
        return sorted(key.decode() for key in listed if key and not key.endswith(b"/"))

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        result = self._result(self._store.read(self._prefix + name))
        if result.state == "missing":
            raise FileNotFoundError(f"{self.address}/{name}: there is no such object")
        return bytes(result.value)

    def write(self, name: str, content: bytes) -> None:
        """Write an object, in place of an earlier one."""
        self._result(self._store.write(self._prefix + name, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object; return False and change nothing when it exists. Of several who try at once one succeeds."""
        current = self._result(self._store.read(self._prefix + name))
        if current.state != "missing":
            return False
        self._result(self._store.write(self._prefix + name, content, if_equal=current.stamp.generation))
        return self.read(name) == content

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that does not exist is left out."""
        for removal in [self._store.write(self._prefix + name, None) for name in names]:
            self._result(removal)

    def digests(self, names: Sequence[str]) -> dict[str, str]:
        """Return the SHA-256 of objects by name."""
        with ThreadPoolExecutor(MAX_OBJECTS_IN_MEMORY) as pool:
            return dict(
                zip(names, pool.map(lambda name: hashlib.sha256(self.read(name)).hexdigest(), names), strict=True)
            )

    def _result(self, future: Any) -> Any:
        """Wait for the driver, which itself tries again for minutes when the server is overloaded or unreachable.

        Every `NOTICE_SECONDS` a line in the log says so. A bucket that has never answered in this process is given up
        after `FIRST_ANSWER_SECONDS`: a wrong network or wrong credentials do not mend themselves.
        """
        waited = 0.0
        try:
            while not _is_done(future, NOTICE_SECONDS):
                waited += NOTICE_SECONDS
                if waited >= FIRST_ANSWER_SECONDS and self._bucket not in _ANSWERED:
                    future.cancel()
                    raise TimeoutError(f"no answer for {waited:.0f} seconds")
                log.warning(f"{self.address} has not answered for {waited:.0f} s: trying again")
            result = future.result()
            _ANSWERED.add(self._bucket)
            return result
        except Exception as error:
            raise ResumeError(
                f"the bucket does not answer as it should: {first_line(error)}",
                want="a bucket whose objects these credentials may list, read, write and delete",
                fix="check the network; gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=FILE",
                where=self.address,
            ) from error


def _is_done(future: Any, seconds: float) -> bool:
    """Wait for an answer of the driver; return whether it came within `seconds`."""
    try:
        future.exception(timeout=seconds)
    except TimeoutError:
        return bool(future.done())
    return True


@functools.cache
def _open(bucket: str) -> Any:
    return tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket}).result()


class BucketFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The file system of `gs://` addresses for fsspec, as far as Orbax uses it. Files are small: each is in memory. To
    make or remove a folder does nothing: a folder is there as soon as something is in it.
    """

    protocol = ("gs", "gcs")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the entries of a folder; of a file, its own entry."""
        path = self._strip_protocol(path)
        names = Bucket(f"gs://{path}").names()
        kinds = {name.partition("/")[0]: "directory" if "/" in name else "file" for name in names}
        entries = [{"name": f"{path}/{child}", "size": None, "type": kind} for child, kind in kinds.items()]
        entries = entries or [self.info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the entry of a file, or of a folder with files.

        Raises:
            FileNotFoundError: there is no such file or folder.
        """
        path = self._strip_protocol(path)
        objects, name = _split(path)
        names = objects.names(name)
        if name in names:
            return {"name": path, "size": None, "type": "file"}
        if not name or any(other.startswith(f"{name}/") for other in names):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        objects, name = _split(self._strip_protocol(path))
        return io.BytesIO(objects.read(name)) if mode == "rb" else _NewObject(objects, name)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove a file, or with `recursive` a folder and its content."""
        objects, name = _split(self._strip_protocol(path))
        objects.remove([name, *(objects.names(f"{name}/") if recursive else ())])


def _split(path: str) -> tuple[Bucket, str]:
    """Return the bucket of BUCKET/NAME, and the name."""
    bucket, _, name = path.partition("/")
    return Bucket(f"gs://{bucket}"), name


class _NewObject(io.BytesIO):
    """A file being written; closing it writes the object."""

    def __init__(self, bucket: Bucket, name: str):
        super().__init__()
        self._bucket, self._name = bucket, name

    def close(self) -> None:
        if not self.closed:
            self._bucket.write(self._name, self.getvalue())
        super().close()


def register_file_system() -> None:
    """Make fsspec use `BucketFileSystem` for `gs://` addresses, unless gcsfs is installed."""
    if importlib.util.find_spec("gcsfs") is None:
        for name in BucketFileSystem.protocol:
            fsspec.register_implementation(name, BucketFileSystem, clobber=True)


class BucketStore(CheckpointStore):
    """Steps at an address.

    Args:
        folder: the folder of the checkpoints.
        address: gs://BUCKET/FOLDER.
    """

    def __init__(self, folder: Path, address: str):
        super().__init__(folder)
        self._bucket = Bucket(address)
        self.address = self._bucket.address
        register_file_system()

    def committed(self) -> list[int]:
        matches = (re.fullmatch(rf"(\d{{8,}})/{SUMS}", name) for name in self._bucket.names())
        return [int(match[1]) for match in matches if match]

    def path(self, step: int) -> str:
        return f"{self.address}/{step_name(step)}"

    temporary_path = path

    def read(self, step: int, name: str) -> bytes:
        return Bucket(self.path(step)).read(name)

    def remove(self, step: int) -> None:
        objects = Bucket(self.path(step))
        objects.remove([SUMS])
        objects.remove(objects.names())

    discard = remove

    def prepare(self, step: int, needed: int) -> None:
        self.remove(step)

    def finish_interrupted(self) -> None:
        committed = {step_name(step) for step in self.committed()}
        folders = ((name, name.partition("/")[0]) for name in self._bucket.names())
        leftovers = [name for name, step in folders if re.fullmatch(r"\d{8,}", step) and step not in committed]
        self._bucket.remove(leftovers)

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

    def _links(self, path: str) -> list[Path]:
        return []

    def _names(self, path: str) -> list[str]:
        return [name for name in Bucket(path).names() if name != SUMS]

    def _digests(self, path: str, names: Sequence[str], synced: bool = False) -> Digests:
        return Bucket(path).digests(names)

    def _write(self, path: str, name: str, content: bytes) -> None:
        Bucket(path).write(name, content)

    def _seal(self, step: int, sums: bytes) -> None:
        self._write(self.path(step), SUMS, sums)


def open_store(folder: Path, address: str, writes: bool) -> CheckpointStore:
    """Open the store of a run at the address in a bucket that `folder` names, or at that of a new run.

    Args:
        folder: the folder of the checkpoints.
        address: address for a new run, which is taken and which the folder then names; "" where it names one.
        writes: whether this process holds the lock of the folder.

    Raises:
        ResumeError: another run has taken the address.
    """
    is_new = not has_file(folder, POINTER)
    address, identity = (address, secrets.token_hex(16)) if is_new else _read_pointer(folder)
    store = BucketStore(folder, address)
    if writes and not (store.take(identity) if is_new else store.belongs_to(identity)):
        raise ResumeError(
            "the checkpoints of another run are at this address",
            want="a folder in the bucket with nothing in it"
            if is_new
            else f"the files of this run, with its {IDENTITY}",
            fix="another training.checkpoint_path, or another name of the run folder",
            where=store.address,
        )
    if writes and is_new:
        replace_file(folder / POINTER, json.dumps({"address": store.address, "run": identity}).encode())
    return store


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
