"""Files of a checkpoint that somebody else made, before they are read.

A name in an index may not have parts (`models.loading.weights`), and a link may not lead out of the checkpoint's
folder: what it leads to would be read, shown in errors and copied by exports. One layout needs such links and gets
them: the hub's cache, where `snapshots/COMMIT/FILE` is a link to `../../blobs/DIGEST`. A folder that is itself a link
is the user's own word, and followed.
"""

from pathlib import Path

from covey.errors import WeightsError

POINTER = b"version https://git-lfs"


def check_given(path: Path) -> None:
    """Refuse a file that is empty, a pointer of Git LFS in place of its content, or a link out of its folder.

    A file that is not there is nobody's concern here.

    Raises:
        WeightsError: it is one of these.
    """
    if path.is_symlink() and _leads_out(path):
        raise WeightsError(
            "this is a link that leads out of the checkpoint's folder",
            want="files in the folder, or links into the blobs of the hub's cache",
            fix="copy the file here, or give the folder that holds it",
            where=str(path),
        )
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(len(POINTER))
    if not head:
        raise WeightsError("the file is empty", fix="fetch it again", where=str(path))
    if head == POINTER:
        raise WeightsError(
            "only a pointer of Git LFS is here: the content was not fetched",
            fix="git lfs pull in this folder, or fetch the model without git",
            where=str(path),
        )


def _leads_out(link: Path) -> bool:
    folder, target = link.parent.resolve(), link.resolve()
    in_hub_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or in_hub_cache)
