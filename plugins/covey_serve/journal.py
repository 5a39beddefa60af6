"""Requests that were acknowledged, in order: a file to which records are appended, each whole or not there."""

import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from covey.errors import ResumeError

Change = Callable[[str, bytes], tuple[str, bytes] | None]
"""Function from kind and body of a record to those of the record in its place; None for none."""
HEAD = struct.Struct("<III")
"""Length of the kind, length of the body, and checksum of both."""


class Journal:
    """A journal.

    Args:
        path: its file; None for none, which forgets.

    Raises:
        ResumeError: another server has it.
    """

    def __init__(self, path: Path | None):
        self._file, self._path = None, path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.close()
                raise ResumeError("another server has this journal", fix="another --state", where=str(path)) from error

    def records(self, identity: str) -> Iterator[tuple[str, bytes]]:
        """Yield the records of requests after the first, which says with what the journal was begun.

        Raises:
            ResumeError: it was begun with something else than `identity`, or a record is damaged.
        """
        records = self.read()
        _, begun = next(records, ("", b""))
        if begun and begun != identity.encode():
            what = f"the journal was begun with {begun.decode(errors='replace')}"
            raise ResumeError(what, want=identity, fix="the same model and settings, or another --state")
        yield from records
        if not begun:
            self.write("begun", identity.encode())

    def write(self, kind: str, body: bytes, *, flush: bool = True) -> None:
        """Append a record, and unless not `flush` wait until it is on the disk."""
        if self._file is not None:
            data = kind.encode() + body
            self._file.write(HEAD.pack(len(kind), len(body), zlib.crc32(data)) + data)
            if flush:
                self.flush()

    def flush(self) -> None:
        """Wait until all records are on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def rewrite(self, change: Change) -> None:
        """Replace each record by what `change` makes of it. The old file stays until the new one is on the disk."""
        if self._file is None or self._path is None:
            return
        made = self._path.with_suffix(".new")
        made.unlink(missing_ok=True)  # an interrupted call may have left it
        new = Journal(made)
        for record in self.read():
            if (changed := change(*record)) is not None:
                new.write(*changed, flush=False)
        new.flush()
        os.replace(made, self._path)
        self.close()
        self._file = new._file

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Yield the records from the beginning, then cut a last one that is not whole, which nobody was told of.

        Raises:
            ResumeError: a record before the last one is damaged.
        """
        if self._file is None:
            return
        self._file.seek(0)
        size, end = os.fstat(self._file.fileno()).st_size, 0
        while len(head := self._file.read(HEAD.size)) == HEAD.size:
            kind, body, checksum = HEAD.unpack(head)
            data = self._file.read(kind + body) if end + HEAD.size + kind + body <= size else b""
            if zlib.crc32(data) != checksum or not data:
                if end + HEAD.size + kind + body < size:
                    raise ResumeError("a record of the journal is damaged", where=str(self._path))
                break
            end += HEAD.size + len(data)
            yield data[:kind].decode(), data[kind:]
        self._file.truncate(end)
        self._file.seek(end)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
