"""Checks that several processes make together before anything is loaded: all run the same code, and all see one folder.

A process with other code would compute other numbers from the same data, and nothing later notices it. A folder that
each machine has for itself stops a run at its first save, where each process waits for the files of the others. Both
are compared through the key-value store, which needs no device program. With one process nothing is checked.
"""

import hashlib
import json
import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import jax

import covey
from covey.errors import CoveyError
from covey.parallel import liveness, store

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
"""Packages whose version may change results."""
NAMED = 5
"""Largest number of differences that an error names for a process."""


def check_same_code() -> None:
    """Refuse processes that have other versions of Python and of packages than process 0, or another source of Covey.

    Raises:
        CoveyError: some have.
    """
    check_alike(
        "code",
        lambda: versions() | source_digests(),
        want="the same versions, and the same files of Covey, in all processes",
        fix="install on all machines what process 0 has: its pip freeze, its wheel or commit of Covey",
    )


def check_alike(about: str, mine: Callable[[], Mapping[str, str]], want: str, fix: str) -> None:
    """Refuse processes that have another value of a key than process 0; a value of 64 hexadecimal digits is not shown.

    Args:
        about: name of what is compared.
        mine: function that returns the values of this process.
        want: wanted, in the error.
        fix: way to mend it, in the error.

    Raises:
        CoveyError: some have.
    """
    if jax.process_count() == 1:
        return
    everyone = _exchange(about, {"host": socket.gethostname(), "values": mine()})
    first = everyone[0]
    others = [
        f"process {number} on {each['host']}: {differences}"
        for number, each in enumerate(everyone)
        if (differences := _differences(first["values"], each["values"]))
    ]
    if others:
        what = f"{about} differs from that of process 0 on {first['host']}: {'; '.join(islice(others, NAMED))}"
        raise CoveyError(what, want=want, fix=fix)


def check_shared_folder(folder: Path) -> None:
    """Refuse a folder that is not one and the same for all processes, or that one of them cannot write in. Process 0
    creates it if it is missing, and writes a new file, which all read.

    Raises:
        CoveyError: a process sees another folder or none, or may not write there.
    """
    if jax.process_count() == 1:
        return
    folder, first = folder.absolute(), jax.process_index() == 0
    mine = {"name": f".shared-{secrets.token_hex(8)}", "text": secrets.token_hex(16), "folder": str(folder)}
    problem = _problem(lambda: _write(folder, mine)) if first else ""
    announced = _exchange("folder", {"problem": problem, **mine})[0]
    try:
        if not announced["problem"] and not first:
            problem = _problem(lambda: _read(folder, announced))
        problems = _exchange("folder", {"problem": problem, "host": socket.gethostname()})
    finally:
        if first:
            (folder / mine["name"]).unlink(missing_ok=True)
    for number, each in enumerate(problems):
        if each["problem"]:
            raise CoveyError(
                f"process {number} on {each['host']}: {each['problem']}",
                want="one folder that all processes share and may write in",
                fix="mount one file system (NFS, Lustre, a bucket through gcsfuse or mount-s3) at the same path on all "
                "machines, and name a folder there by its absolute path",
                where=announced["folder"],
            )


def versions() -> dict[str, str]:
    """Return the versions of Covey, Python and `PACKAGES`; of Python as far as results follow from it: its `sum` of
    floats has changed in 3.12.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return {"covey": covey.__version__, "python": python} | {name: version_of(name) for name in PACKAGES}


def version_of(package: str) -> str:
    """Return the version of an installed package, or "" if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def source_digests() -> dict[str, str]:
    """Return the SHA-256 of each module and recipe of Covey, by its path in the package."""
    root = Path(covey.__file__).parent
    files = (path for path in root.rglob("*") if path.suffix in (".py", ".yaml"))
    return {f"covey/{path.relative_to(root).as_posix()}": digest_of(path) for path in files}


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, line ends as they are."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _differences(wanted: Mapping[str, str], values: Mapping[str, str]) -> str:
    names = [name for name in sorted(wanted.keys() | values.keys()) if wanted.get(name) != values.get(name)]
    shown = [_difference(name, wanted.get(name, ""), values.get(name, "")) for name in names[:NAMED]]
    return ", ".join([*shown, *([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])])


def _difference(name: str, wanted: str, value: str) -> str:
    if not value:
        return f"{name} is missing"
    if len(wanted) == 64 or len(value) == 64:  # digests say nothing to a reader
        return f"{name} is {'another file' if wanted else 'not there in process 0'}"
    return f"{name} is {value}, there {wanted or 'missing'}"


def _exchange(about: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = store.exchange(json.dumps(value), f"check/{about}", liveness.refuse_to_wait)
    return [json.loads(text) for text in texts]


def _problem(call: Callable[[], str]) -> str:
    try:
        return call()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _write(folder: Path, mine: Mapping[str, str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / mine["name"]).open("x") as file:
        file.write(mine["text"])
    return ""


def _read(folder: Path, announced: Mapping[str, str]) -> str:
    """Read the file of process 0 and write one beside it; describe what is wrong."""
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
    own = folder / f"{announced['name']}-{jax.process_index()}"
    own.write_text("")
    own.unlink()
    return ""
