"""Check files of an untrusted checkpoint before they are read, digest files, and replace them atomically.

A file name in an index may not contain a path separator (`models.loading.weights`), and a link may not lead out of the
checkpoint's folder: its target would be read, shown in errors and copied by exports. The one exception is the hub's
cache, where `snapshots/COMMIT/FILE` is a link to `../../blobs/DIGEST`. A folder that is itself a link was chosen by
the user and is followed.
"""

import codecs
import hashlib
import os
import re
from pathlib import Path

from covey.errors import CoveyError, WeightsError

LFS_POINTER = b"version https://git-lfs"
IN_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+(/[^/?#*\[\]]+)*/?")
"""Pattern of the address of a folder in a Cloud Storage bucket."""


def check_file(path: Path) -> None:
    """Refuse a file that is empty, is a Git LFS pointer instead of its content, or is a link out of its folder.

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


def check_utf8(start: bytes, where: str, error: type[CoveyError]) -> None:
    """Refuse a text in UTF-16 or UTF-32, which begins with a byte order mark.

    Raises:
        CoveyError: the class `error`.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        wide = start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))  # UTF-32-LE begins as UTF-16-LE does
        name = "UTF-32" if wide else "UTF-16"
        fix = f"iconv -f {name} -t UTF-8 FILE > NEW, or save it as UTF-8 in your editor"
        raise error(f"this is a text in {name}", want="UTF-8", fix=fix, where=where)


def refuse_url(folder: str | Path) -> None:
    """Refuse the address of an object store in place of a folder for a run or for checkpoints.

    Raises:
        CoveyError: it is one; the error tells the way round.
    """
    found = re.match(r"([a-z][a-z0-9]+):/", str(folder))
    if found is None:
        return
    tools = {"s3": "mount-s3 or s3fs", "gs": "gcsfuse"}.get(found[1], "its file system driver")
    alone = "; --training.checkpoint-path puts the checkpoints alone there" if found[1] == "gs" else ""
    raise CoveyError(
        f"run folders are not written to {found[1]}:// addresses",
        want="a folder; for several machines one that all of them share",
        fix=f"mount the bucket ({tools}) and name the mounted folder, or copy whole steps from a local folder{alone}",
        where=str(folder),
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_file(file: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one, never a part."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("wb") as draft:
        draft.write(data)
        draft.flush()
        os.fsync(draft.fileno())
    os.replace(temporary, file)


def _leaves_folder(link: Path) -> bool:
    folder, target = link.parent.resolve(), link.resolve()
    in_hub_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or in_hub_cache)
