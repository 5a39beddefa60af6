"""Objects of a Cloud Storage bucket, read and written by the driver of tensorstore that Orbax uses for arrays.

Orbax accesses its small files at `gs://` addresses through fsspec, which has no file system for them unless gcsfs is
installed. `register_file_system` gives it one over the same driver, so that there is one way to find credentials: the
file that GOOGLE_APPLICATION_CREDENTIALS names, the login of gcloud, or the service account of the machine.

A bucket has no folders and no renames. An object is there as a whole or not at all, and a list is always up to date.
"""

import functools
import hashlib
import importlib.util
import io
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import tensorstore

from covey.errors import CoveyError, ResumeError
from covey.files import IN_BUCKET

log = logging.getLogger(__name__)

NOTICE_SECONDS = 5.0
"""Number of seconds without an answer after which a line in the log says so."""
FIRST_ANSWER_SECONDS = 20.0
"""Number of seconds after which a bucket that has never answered is given up."""
_ANSWERED: set[str] = set()
"""Names of the buckets that have answered in this process."""
AT_ONCE = 4
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
        found = self._result(self._store.list(keys, strip_prefix_length=len(self._prefix.encode())))
        return sorted(key.decode() for key in found if key and not key.endswith(b"/"))

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        found = self._result(self._store.read(self._prefix + name))
        if found.state == "missing":
            raise FileNotFoundError(f"{self.address}/{name}: there is no such object")
        return bytes(found.value)

    def write(self, name: str, content: bytes) -> None:
        """Write an object, in place of an earlier one."""
        self._result(self._store.write(self._prefix + name, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object; return False and change nothing when it exists. Of several who try at once one succeeds."""
        there = self._result(self._store.read(self._prefix + name))
        if there.state != "missing":
            return False
        self._result(self._store.write(self._prefix + name, content, if_equal=there.stamp.generation))
        return self.read(name) == content

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that does not exist is left out."""
        for removed in [self._store.write(self._prefix + name, None) for name in names]:
            self._result(removed)

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Return the SHA-256 of objects by name."""

        def digest(name: str) -> str:
            return hashlib.sha256(self.read(name)).hexdigest()

        listed = list(names)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(listed, pool.map(digest, listed), strict=True))

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
            found = future.result()
            _ANSWERED.add(self._bucket)
            return found
        except Exception as error:
            raise ResumeError(
                f"the bucket does not answer as it should: {str(error).splitlines()[0]}",
                want="a bucket whose objects these credentials may list, read, write and delete",
                fix="check the network; gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=FILE",
                where=self.address,
            ) from error


def _is_done(future: Any, seconds: float) -> bool:
    """Wait for an answer of the driver; return whether it came within some seconds."""
    try:
        future.exception(timeout=seconds)
    except TimeoutError:
        return bool(future.done())
    return True


@functools.cache
def _open(bucket: str) -> Any:
    return tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket}).result()


class BucketFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The file system of `gs://` addresses for fsspec, as far as Orbax uses it. Files are small: each is in memory."""

    protocol = ("gs", "gcs")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return files and folders in a folder; for a file, that file."""
        path = self._strip_protocol(path)
        names = Bucket(f"gs://{path}").names()
        kinds = {name.partition("/")[0]: "directory" if "/" in name else "file" for name in names}
        entries = [{"name": f"{path}/{child}", "size": None, "type": kind} for child, kind in kinds.items()]
        entries = entries or [self.info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the entry of a file or of a folder that has some.

        Raises:
            FileNotFoundError: it is neither.
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
        return io.BytesIO(objects.read(name)) if mode == "rb" else _Draft(objects, name)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove a file; or a folder with all that is in it."""
        objects, name = _split(self._strip_protocol(path))
        objects.remove([name, *(objects.names(f"{name}/") if recursive else ())])

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Do nothing: a folder is there as soon as something is in it."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, as `mkdir`."""

    def rmdir(self, path: str) -> None:
        """Do nothing: an empty folder is not there."""


def _split(path: str) -> tuple[Bucket, str]:
    """Return the bucket of BUCKET/NAME, and the name."""
    bucket, _, name = path.partition("/")
    return Bucket(f"gs://{bucket}"), name


class _Draft(io.BytesIO):
    """A file being written; closing it makes the object."""

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
