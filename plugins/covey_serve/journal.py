"""Requests that were acknowledged, in order: a file to which records are appended, each whole or not there.

A saved state of a model replaces the requests to it before: `shorten` begins them with a record that loads the state.
"""

import fcntl
import math
import os
import struct
import zlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from covey.errors import ResumeError

HEAD = struct.Struct("<III")
"""Length of the kind, length of the body, and checksum of both."""
Record = tuple[str, bytes]
"""Kind and body of a request."""


class Entry(NamedTuple):
    """Where a record is in the file, and what may take its place.

    Attributes:
        start: its first byte.
        owner: the model that it changes, or the samples that it asks for; "" if it always stays.
        number: its number among the requests to its owner: 0 for the one that makes a model.
        rest: the record that stays of it once a state of the owner is loaded in its place; None for none.
    """

    start: int
    owner: str = ""
    number: float = math.inf
    rest: Record | None = None


class Journal:
    """A journal.

    Args:
        path: its file.

    Raises:
        ResumeError: another server has it.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._entries, self._replays = path, list[Entry](), False
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ResumeError("another server has this journal", fix="another --state", where=str(path)) from error

    def records(self, identity: str) -> Iterator[Record]:
        """Yield the records of requests after the first, which says with what the journal was begun. Until the next one
        is taken, `write` says whose the record is, and writes nothing.

        Raises:
            ResumeError: it was begun with something else than `identity`, or a record is damaged.
        """
        records = self.read()
        _, begun = next(records, ("", b""))
        if begun and begun != identity.encode():
            what = f"the journal was begun with {begun.decode(errors='replace')}"
            raise ResumeError(what, want=identity, fix="the same model and settings, or another --state")
        self._replays = True
        yield from records
        self._replays = False
        if not begun:
            self.write("begun", identity.encode())

    def write(
        self,
        kind: str,
        body: bytes,
        owner: str = "",
        number: float = math.inf,
        rest: Record | None = None,
        flush: bool = True,
    ) -> None:
        """Append a record, and unless not `flush` wait until it is on the disk. See `Entry` for the others."""
        start = self._entries.pop().start if self._replays else self._append(kind.encode(), body)
        self._entries.append(Entry(start, owner, number, rest))
        if flush and not self._replays:
            self.flush()

    def _append(self, kind: bytes, body: bytes) -> int:
        start = self._file.tell()
        self._file.write(HEAD.pack(len(kind), len(body), zlib.crc32(kind + body)) + kind + body)
        return start

    def flush(self) -> None:
        """Wait until all records are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def shorten(self, owner: str, number: int, first: Record, gone: Container[str]) -> None:
        """Begin the requests to a model with the record `first` in place of those up to `number`, and leave out the
        samples of `gone`. The old file stays until the new one is on the disk.
        """
        path = self._path.with_suffix(".new")
        path.unlink(missing_ok=True)  # an interrupted call may have left it
        new = Journal(path)
        for entry in self._entries:
            if entry.owner in gone:
                continue
            if entry.owner != owner or entry.number > number:
                record, _ = self._record_at(entry.start)
                assert record is not None
                new.write(*record, entry.owner, entry.number, entry.rest, flush=False)
            elif entry.number == 0:
                new.write(*first, owner, 0, flush=False)
            elif entry.rest is not None:
                new.write(*entry.rest, flush=False)
        new.flush()
        os.replace(path, self._path)
        self.close()
        self._file, self._entries = new._file, new._entries

    def read(self) -> Iterator[Record]:
        """Yield the records from the beginning, then cut a last one that is not whole, which nobody was told of.

        Raises:
            ResumeError: a record before the last one is damaged.
        """
        start, size = 0, os.fstat(self._file.fileno()).st_size
        self._entries.clear()
        while start < size:
            record, end = self._record_at(start)
            if record is None and end < size:
                raise ResumeError("a record of the journal is damaged", where=str(self._path))
            if record is None:
                break
            self._entries.append(Entry(start))
            yield record
            start = end
        self._file.truncate(start)
        self._file.seek(start)

    def _record_at(self, start: int) -> tuple[Record | None, int]:
        """Return the record at a place in the file, or None if it is not whole, and the place of the next one."""
        file = self._file.fileno()
        head = os.pread(file, HEAD.size, start).ljust(HEAD.size, b"\xff")
        kind, body, checksum = HEAD.unpack(head)
        end = start + HEAD.size + kind + body
        data = os.pread(file, kind + body, start + HEAD.size) if end <= os.fstat(file).st_size else b""
        is_whole = data and zlib.crc32(data) == checksum
        return ((data[:kind].decode(), data[kind:]) if is_whole else None), end

    def close(self) -> None:
        """Close the file."""
        self._file.close()
