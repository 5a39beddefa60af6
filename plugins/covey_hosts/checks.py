"""Checks that several processes make together: all run the same code on the same recipe, data and weights, and all see
one folder.

A process with other code would compute other numbers from the same data, and nothing later notices it. A folder that
each machine has for itself stops a run at its first save, where each process waits for the files of the others.
"""

import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import covey
from covey.errors import CoveyError, RecipeError
from covey.files import file_sha256
from covey.run.folder import PACKAGES
from covey_hosts.channel import Channel

NAMED = 5
"""Largest number of differences that an error names for a process, and of processes that it names."""


def check_same_code(channel: Channel) -> None:
    """Refuse processes that have other versions of Python and of packages than process 0, or another source of Covey.

    Raises:
        RecipeError: some have.
    """
    check_same(
        channel,
        "code",
        lambda: versions() | source_digests(),
        want="the same versions, and the same files of Covey, in all processes",
        fix="install on all machines what process 0 has: its pip freeze, its wheel or commit of Covey",
    )


def check_same(
    channel: Channel, name: str, value: Callable[[], Any], fix: str, want: str = "the same in all processes"
) -> None:
    """Refuse processes with another `value` than process 0.

    Args:
        channel: the channel.
        name: name of the value.
        value: function that returns the value of this process. The error names differences of dicts, no digests.
        fix: `fix` of the error.
        want: `want` of the error.

    Raises:
        RecipeError: the values differ.
    """
    everyone = channel.all_gather((socket.gethostname(), value()), name)
    host, first = everyone[0]
    others = [
        f"process {number} on {place}{_differences(first, theirs)}"
        for number, (place, theirs) in enumerate(everyone)
        if theirs != first
    ]
    if others:
        raise RecipeError(
            f"{name} differs from that of process 0 on {host}: {'; '.join(others[:NAMED])}", want=want, fix=fix
        )


def check_shared_folder(channel: Channel, folder: Path) -> None:
    """Refuse a folder that is not the same for all processes, or that one of them cannot write in. Process 0 creates it
    if it is missing, and writes a new file, which all read.

    Raises:
        CoveyError: a process sees another folder or none, or may not write there.
    """
    folder, first = folder.absolute(), channel.index == 0
    mine = {"name": f".shared-{secrets.token_hex(8)}", "text": secrets.token_hex(16), "folder": str(folder)}
    problem = _problem(lambda: _write(folder, mine)) if first else ""
    announced, failed = channel.broadcast((mine, problem), "folder")
    try:
        if not failed and not first:
            problem = _problem(lambda: _read(folder, announced, channel.index))
        problems = channel.all_gather((socket.gethostname(), problem), "problems of the folder")
    finally:
        if first:
            (folder / mine["name"]).unlink(missing_ok=True)
    for number, (host, problem) in enumerate(problems):
        if problem:
            raise CoveyError(
                f"process {number} on {host}: {problem}",
                want="one folder that all processes share and may write in",
                fix="mount one file system (NFS, Lustre, a bucket through gcsfuse or mount-s3) at the same path on all "
                "machines, and name a folder there by its absolute path",
                where=announced["folder"],
            )


def versions() -> dict[str, str]:
    """Return the versions of Covey, Python (major and minor: 3.12 has changed `sum` of floats) and `PACKAGES`."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"covey": covey.__version__, "python": python} | {name: version(name) for name in PACKAGES}


@cache
def source_digests() -> dict[str, str]:
    """Return the SHA-256 of each module and recipe of Covey and its plugins, by its path."""
    packages = (Path(covey.__file__).parent, *Path(__file__).parents[1].glob("covey_*"))
    return {f"{package.name}/{name}": digest for package in packages for name, digest in _digests(package).items()}


def _digests(package: Path) -> dict[str, str]:
    files = (path for path in package.rglob("*") if path.suffix in (".py", ".yaml"))
    names = {path.relative_to(package).as_posix(): path for path in files}
    return {name: file_sha256(path) for name, path in names.items() if not name.startswith("tests/")}


def _differences(wanted: Any, value: Any) -> str:
    if not (isinstance(wanted, Mapping) and isinstance(value, Mapping)):
        return ""
    names = [name for name in sorted(wanted.keys() | value.keys()) if wanted.get(name) != value.get(name)]
    differences = [_difference(name, str(wanted.get(name, "")), str(value.get(name, ""))) for name in names[:NAMED]]
    return ": " + ", ".join([*differences, *([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])])


def _difference(name: str, wanted: str, value: str) -> str:
    if not value:
        return f"{name} is missing"
    if len(wanted) == 64 or len(value) == 64:  # digests say nothing to a reader
        return f"{name} is {'another file' if wanted else 'not there in process 0'}"
    return f"{name} is {value}, there {wanted or 'missing'}"


def _problem(call: Callable[[], str]) -> str:
    try:
        return call()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _write(folder: Path, mine: Mapping[str, str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mine["name"]).write_text(mine["text"])
    return ""


def _read(folder: Path, announced: Mapping[str, str], index: int) -> str:
    """Read the file of process 0 and write another as process `index`; describe a problem."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    # Asks the server of a network file system, which this machine would else only do when its cache has run out.
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if (folder / announced["name"]).read_text() != announced["text"]:
            return f"{folder} has another content than process 0 has written there"
    except FileNotFoundError:
        for path in missing:
            with suppress(OSError):  # it is not empty
                path.rmdir()
        return f"{folder} is not the folder of that path in process 0: a file written there is not here"
    probe = folder / f"{announced['name']}-{index}"
    probe.write_text("")
    probe.unlink()
    return ""
