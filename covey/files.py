"""Open the files of folders that others may have made, and read JSON in them; digest files, replace them atomically.

In a run folder no link is followed (`open_below`): what a link leads to would be overwritten, shown or published.

In the folder of a model, a file name in an index may not contain a path separator (`models.loading.weights`), and a
link may not lead out of the folder: its target would be read, shown in errors and copied by exports. The one exception
is the hub's cache, where `snapshots/COMMIT/FILE` is a link to `../../blobs/DIGEST`.

A folder that is itself a link was chosen by the user and is followed.

The rows of a run folder and the entries of a checkpoint are not trusted. A line or a value of another form is no error;
the functions return None for it, or False. An entry that a run needs is one.
"""

import codecs
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeGuard, TypeVar

from covey.errors import CoveyError, ResumeError, WeightsError

LFS_POINTER = b"version https://git-lfs"
IN_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+(/[^/?#*\[\]]+)*/?")
"""Pattern of the address of a folder in a Cloud Storage bucket."""


def check_file(path: Path) -> None:
    """Refuse a file that is empty, is a Git LFS pointer instead of its content, or is a link out of its folder; and a
    pipe or a device.

    A missing file passes.

    Raises:
        WeightsError: the file is one of these.
    """
    if path.is_symlink() and _leaves_folder(path):
        raise WeightsError(
            "this is a link that leads out of the checkpoint's folder",
            want="files in the folder, or links into the blobs of the hub's cache",
            fix="copy the file here, or give the folder that holds it",
            where=str(path),
        )
    if not path.is_file():
        if path.exists() and not path.is_dir():
            raise WeightsError("this is a pipe or a device", want="a regular file", where=str(path))
        return
    with path.open("rb") as file:
        head = file.read(len(LFS_POINTER))
    if not head:
        raise WeightsError("the file is empty", fix="fetch it again", where=str(path))
    if head == LFS_POINTER:
        raise WeightsError(
            "only a pointer of Git LFS is here: the content was not fetched",
            fix="git lfs pull in this folder, or fetch the model without git",
            where=str(path),
        )


NO_TEXT = {
    b"\x1f\x8b": ("gzip data", "gunzip -k FILE"),
    b"(\xb5/\xfd": ("Zstandard data", "zstd -d FILE"),
    b"BZh": ("bzip2 data", "bunzip2 -k FILE"),
    b"\xfd7zX": ("xz data", "unxz -k FILE"),
    b"PK\x03\x04": ("a ZIP archive or an Excel workbook", "unpack it; save a workbook as CSV in UTF-8"),
    b"ARRO": ("an Arrow file", "save it as Parquet, as FILE.parquet"),
    b"PAR1": ("a Parquet file", "name it FILE.parquet"),
}
"""First bytes of files that are no text: what they are, and what makes a text of them."""


def check_utf8(start: bytes, where: str, error: type[CoveyError]) -> None:
    """Refuse a file that begins as compressed data, an archive, or a text in UTF-16 or UTF-32, whose first bytes are a
    byte order mark or have zeros among them.

    Raises:
        CoveyError: the class `error`.
    """
    kind, fix = next((NO_TEXT[magic] for magic in NO_TEXT if start.startswith(magic)), ("", ""))
    if not kind and (b"\0" in start[:4] or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))):
        name = "UTF-32" if b"\0\0" in start[:4] else "UTF-16"
        kind, fix = f"a text in {name}", f"iconv -f {name} -t UTF-8 FILE > NEW, or save it as UTF-8 in your editor"
    if kind:
        raise error(f"this is {kind}", want="UTF-8", fix=fix, where=where)


def check_not_url(folder: str | Path) -> None:
    """Refuse the address of an object store in place of a folder for a run or for checkpoints.

    Raises:
        CoveyError: it is one; the error tells the way round.
    """
    scheme = re.match(r"([a-z][a-z0-9]+):/", str(folder))
    if scheme is None:
        return
    tools = {"s3": "mount-s3 or s3fs", "gs": "gcsfuse"}.get(scheme[1], "its file system driver")
    alone = "; --training.checkpoint-path puts the checkpoints alone there" if scheme[1] == "gs" else ""
    raise CoveyError(
        f"run folders are not written to {scheme[1]}:// addresses",
        want="a folder; for several machines one that all of them share",
        fix=f"mount the bucket ({tools}) and name the mounted folder, or copy whole steps from a local folder{alone}",
        where=str(folder),
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_below(folder: Path, name: str, mode: str = "rb", **options: Any) -> IO[bytes]:
    """Open a regular file below a folder, and follow no link on the way from the folder to the file.

    The folder itself may be a link: the user chose it. A named pipe or a device is refused without waiting for it.

    Args:
        name: path of the file, relative to the folder.
        mode: mode of a binary file, as of `open`; with "xb" nothing may be there.
        options: further arguments of `open`.

    Raises:
        ResumeError: a link, or something else than a regular file, is there.
        OSError: the file cannot be opened.
    """
    *parents, last = Path(name).parts
    try:
        with _descriptor_of(folder, parents) as inside:

            def opener(_: str, flags: int) -> int:
                return os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=inside)

            file: IO[bytes] = open(folder / name, mode, opener=opener, **options)  # noqa: SIM115
    except OSError:  # the number of the error differs between systems, and between files and folders
        _check_way(folder, parents, last)
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _not_regular(folder / name)
    return file


def open_or_empty(folder: Path, name: str) -> IO[bytes]:
    """Open a file below a folder to read it, as `open_below`; a missing file reads as an empty one."""
    try:
        return open_below(folder, name)
    except FileNotFoundError:
        return io.BytesIO()


def has_file(folder: Path, name: str) -> bool:
    """Return whether there is a regular file of that name directly in a folder.

    Raises:
        ResumeError: it is a link.
    """
    if (folder / name).is_symlink():
        raise _not_regular(folder / name)
    return (folder / name).is_file()


def folder_below(folder: Path, name: str) -> Path:
    """Return the path of a folder directly in a folder; it need not exist yet.

    Raises:
        ResumeError: a link or a file is there.
    """
    path = folder / name
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise _not_regular(path, "a folder")
    return path


@contextmanager
def _descriptor_of(folder: Path, names: list[str]) -> Iterator[int]:
    """Open a folder, then one folder in it after the other without following links; yield the descriptor of the last.

    Raises:
        OSError: one of them is no folder, or a link.
    """
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names:
            outer, inside = inside, os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
            os.close(outer)
        yield inside
    finally:
        os.close(inside)


def _check_way(folder: Path, parents: list[str], last: str) -> None:
    """Refuse links on the way from a folder to a file, and anything in its place that is no regular file.

    Raises:
        ResumeError: there is one.
    """
    for name in parents:
        folder = folder_below(folder, name)
    path = folder / last
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise _not_regular(path)


def _not_regular(path: Path, want: str = "a regular file") -> ResumeError:
    kinds = {"link": path.is_symlink(), "file": path.is_file(), "folder": path.is_dir(), "pipe or device": True}
    what = next(kind for kind, is_one in kinds.items() if is_one)
    of_link = "put what it leads to in its place; to keep a run on another disk, link its whole folder, or --out there"
    return ResumeError(
        f"a {what} is in the way",
        want=f"{want}: no link is followed in a run folder",
        fix=of_link if what == "link" else "move it elsewhere",
        where=str(path),
    )


def replace_file(file: Path, data: bytes, durable: bool = True) -> None:
    """Write a file atomically: a reader sees the old one or the new one, never a part.

    Args:
        durable: wait until the content is on the disk, so that the file survives a crash of the machine.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a killed process with the same number
    with open_below(file.parent, temporary.name, "xb") as output:
        output.write(data)
        output.flush()
        if durable:
            os.fsync(output.fileno())
    os.replace(temporary, file)


def _leaves_folder(link: Path) -> bool:
    folder, target = link.parent.resolve(), link.resolve()
    in_hub_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or in_hub_cache)


T = TypeVar("T")

MAX_LINE = 16_000_000
"""Maximum length in bytes of a line that is read; a longer one is left out."""
MAX_COUNT = 2**53
"""Upper end of the steps that are read: a page has no exact number beyond it."""
LARGEST = 1e300
"""Largest number of a page: rounded to a few digits, one beside the end of the range of floats would be infinite."""


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse one line of JSON; None if it is no object, too long or too deeply nested."""
    try:
        row = json.loads(line) if len(line) <= MAX_LINE else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def number(value: Any) -> float | None:
    """Return `value` as a float; None if it is no number, or none of a magnitude up to `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether `value` is a whole number that a page can show exactly: the number of a step or of a group."""
    return type(value) is int and 0 <= value < MAX_COUNT


def require_entry(extra: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return the entry `name` of the `extra` of a checkpoint, or of a mapping in it.

    Raises:
        ResumeError: it is missing, or of another kind than `kind`: a file made by others may hold anything.
    """
    value = extra.get(name)
    is_right = {int: is_count(value), float: number(value) is not None}.get(kind, isinstance(value, kind))
    if not is_right:
        raise ResumeError(
            "meta.json of the checkpoint has " + (f"{name} = {value!r:.80}" if name in extra else f"no {name}"),
            want=f"{name} as the run has saved it",
            fix="remove this checkpoint, to resume from the one before",
        )
    return value if isinstance(value, kind) else kind(value)  # type: ignore[call-arg]  # of a number
